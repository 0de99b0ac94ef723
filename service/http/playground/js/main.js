// Puts the page together.

import { Api } from "./api.js";
import { codeDialog, keyDialog } from "./dialogs.js";
import { byId, complain, say, show } from "./dom.js";
import { count } from "./format.js";
import { Media } from "./media.js";
import { Pane } from "./pane.js";
import { SettingError, chatBody } from "./request.js";
import { Run } from "./run.js";
import { Settings, settingOf } from "./settings.js";
import { Shortcuts } from "./shortcuts.js";
import { Stage } from "./stage.js";
import { Status } from "./status.js";
import { theme } from "./theme.js";

const api = new Api();
const media = new Media();
const settings = new Settings();
const question = byId("question");
const status = new Status(api);
let model = null;
let runs = [];

// -- the model -------------------------------------------------------------------------------------------------------

const RETRY = 2000;
let retry = 0;

/** Asks for the model, repeatedly while the server cannot be reached or is not ready. */
async function connect() {
  clearTimeout(retry);
  const badge = byId("model");
  try {
    [model] = await api.models();
    const { saccade } = model;
    byId("model-text").textContent = `${model.id} · ${saccade.dtype} · ${count(model.max_model_len)} tokens`;
    badge.dataset.state = "ready";
    media.takesClips = saccade.takes_videos;
    settings.defaults(saccade.default_sampling ?? {});
    grpcAddress = reachable((await api.status()).http.grpc_address);
  } catch (error) {
    byId("model-text").textContent = error.status === 401 ? "Needs an API key" : error.message;
    badge.dataset.state = "failed";
    if (!error.status || error.status >= 500) retry = setTimeout(connect, RETRY);
  }
}

let grpcAddress = "127.0.0.1:50051";

/** The server's gRPC address, as this browser can reach it. */
function reachable(address) {
  if (address.startsWith("unix:")) return grpcAddress;
  return address.replace(/^(0\.0\.0\.0|\[?::\]?)(?=:\d+$)/, location.hostname);
}

// -- asking ----------------------------------------------------------------------------------------------------------

const askKey = keyDialog(api, connect);
const panes = { a: pane("a"), b: pane("b") };
byId("panes").append(panes.a.root);

function pane(which) {
  const setting = (error) => {
    const field = settingOf(error.field ?? "");
    return field ? () => settings.point(which, { field, message: error.message }) : null;
  };
  const again = () => {
    byId("go").focus(); // the button that was pressed disappears
    ask();
  };
  return new Pane(which, { again, askKey: () => askKey(), setting });
}

function body(which, items = media.items) {
  return chatBody({ model: model?.id, values: settings.values(which), items, question: question.value });
}

const running = () => runs.some((run) => run.running);

let waiting = false; // for files that are being read

async function ask() {
  if (running() || waiting) return;
  if (!question.value.trim()) {
    complain(question, "The question is empty.");
    return;
  }
  waiting = true;
  await media.added;
  waiting = false;
  const items = [...media.items];
  const sides = settings.comparing ? ["a", "b"] : ["a"];
  const bodies = [];
  for (const which of sides) {
    try {
      bodies.push(body(which, items));
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      settings.point(which, error);
      return;
    }
  }
  runs = bodies.map((each) => new Run(api, each));
  button(true);
  await Promise.all(
    runs.map((run, index) => {
      const drawn = (event) => event.detail && run.facts?.media && described(run, items, drawn);
      run.addEventListener("piece", drawn);
      return panes[sides[index]].follow(run);
    }),
  );
  button(false);
  // The server may have stopped, or serve another model now.
  if (runs.some(({ error }) => error && (!error.status || error.status === 404))) connect();
}

function described(run, items, listener) {
  run.removeEventListener("piece", listener);
  media.describe(items, run.facts.media);
}

function button(asking) {
  byId("go-text").textContent = asking ? "Stop" : "Ask";
  byId("go-key").hidden = asking;
  byId("go").classList.toggle("stop", asking);
}

function stop() {
  if (!running()) return false;
  runs.forEach((run) => run.stop());
  say("Stopped.");
  return true;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!stop()) ask();
});

byId("compare").addEventListener("change", (event) => compare(event.target.checked));

function compare(on) {
  byId("compare").checked = on;
  settings.compare(on);
  byId("panes").classList.toggle("two", on);
  if (on) byId("panes").append(panes.b.root);
  else panes.b.root.remove();
  differ();
}

function differ() {
  for (const which of ["a", "b"]) {
    panes[which].differs(settings.comparing ? settings.differences(which) || "the same" : "");
  }
}

settings.addEventListener("change", differ);

// An example fills in its question, unless the user has written one.
let suggested = "";
const stage = new Stage(media, (words) => {
  if (!question.value.trim() || question.value === suggested) question.value = words;
  suggested = words;
});

// -- code ------------------------------------------------------------------------------------------------------------

const openCode = codeDialog(() => {
  const which = settings.current;
  const context = {
    origin: location.origin, grpc: grpcAddress, hasKey: Boolean(api.key), items: media.items, question: question.value,
    values: settings.sets[which],
  };
  const files = media.items.length ? "Run it in the folder of the files. " : "";
  const key = api.key ? "The key comes from SACCADE_API_KEY." : "";
  try {
    return { body: body(which), context, note: files + key };
  } catch (error) {
    return { body: null, context, note: error.message };
  }
});

// -- views and keys --------------------------------------------------------------------------------------------------

function view() {
  const name = location.hash === "#status" ? "status" : "ask";
  for (const each of ["ask", "status"]) {
    show(byId(each), each === name);
    if (each === name) byId(`nav-${each}`).setAttribute("aria-current", "page");
    else byId(`nav-${each}`).removeAttribute("aria-current");
  }
  document.title = name === "status" ? "Status - Saccade" : "Saccade playground";
  status.show(name === "status");
}

const turn = theme();
const help = () => byId("help-dialog").showModal();
byId("help-open").addEventListener("click", help);
addEventListener("hashchange", view);
view();

/** Wraps an action of the question view, so that it shows that view first. */
const asking = (run) => () => {
  if (location.hash === "#status") {
    location.hash = "#ask";
    view();
  }
  return run();
};

new Shortcuts([
  { keys: "ctrl+enter", words: "Ask", run: asking(() => void ask()) },
  { keys: "escape", words: "Stop the answer", run: stop },
  { keys: "/", words: "Go to the question", run: asking(() => question.focus()) },
  { keys: "o", words: "Choose files", run: asking(() => stage.pick()) },
  { keys: "g", words: "Patch grid on or off", run: asking(() => byId("grid-on").click()) },
  { keys: "c", words: "Compare two settings", run: asking(() => compare(!settings.comparing)) },
  { keys: "s", words: "Settings", run: asking(() => settings.toggle()) },
  { keys: "x", words: "This request as code", run: openCode },
  { keys: "k", words: "API key", run: askKey },
  { keys: "t", words: "Change the colours", run: turn },
  { keys: "1", words: "Ask view", run: () => void (location.hash = "#ask") },
  { keys: "2", words: "Status view", run: () => void (location.hash = "#status") },
  { keys: "?", words: "These shortcuts", run: help },
]);

connect();
