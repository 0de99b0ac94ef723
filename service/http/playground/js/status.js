// The status view: the load of each server, updated once a second while the view is visible.

import { byId, el, svg } from "./dom.js";
import { bytes, count, percent, plural, rate } from "./format.js";

const EVERY = 1000;
const KEPT = 120;

export class Status {
  #timer = 0;
  #history = new Map();
  #paused = false;
  #shown = false;

  constructor(api) {
    this.api = api;
    byId("pause").addEventListener("click", () => this.#pause(!this.#paused));
    document.addEventListener("visibilitychange", () => this.#next(0));
  }

  show(visible) {
    this.#shown = visible;
    this.#next(0);
  }

  #pause(on) {
    this.#paused = on;
    byId("pause").textContent = on ? "Resume" : "Pause";
    this.#note(on ? "Paused" : "Live");
    this.#next(0);
  }

  #next(delay) {
    clearTimeout(this.#timer);
    if (this.#shown && !this.#paused && !document.hidden) this.#timer = setTimeout(() => this.#look(), delay);
  }

  async #look() {
    let note = "Live";
    try {
      const status = await this.api.status(AbortSignal.timeout(10_000));
      if (this.#paused) return;
      this.#draw(status);
    } catch (error) {
      note = error.reason ? `${error.reason}: ${error.message}` : "The server did not answer in time.";
    }
    if (!this.#paused) this.#note(note);
    this.#next(EVERY);
  }

  #note(words) {
    const note = byId("status-note");
    if (note.textContent !== words) note.textContent = words;
    note.classList.toggle("live", words === "Live");
  }

  #draw({ http, servers }) {
    const box = byId("servers");
    const now = performance.now() / 1000;
    const drawn = servers.map((server) => {
      const history = this.#remember(server, now);
      return section(server, history);
    });
    box.replaceChildren(
      ...drawn,
      el("p", { className: "front" }, `HTTP: ${plural(http.running, "request")} running, ${plural(http.streams, "stream")}, ${bytes(http.body_bytes)} of request bodies.`),
    );
  }

  #remember(server, now) {
    const history = this.#history.get(server.address) ?? [];
    this.#history.set(server.address, history);
    if (server.loads) {
      const last = history[history.length - 1];
      const tokens = server.loads.output_tokens ?? 0;
      // A count below the last one means that the server was restarted.
      const speed = last && tokens >= last.tokens ? (tokens - last.tokens) / (now - last.at) : 0;
      history.push({ at: now, tokens, speed, running: server.loads.running, waiting: server.loads.waiting });
      if (history.length > KEPT) history.shift();
    }
    return history;
  }
}

function section(server, history) {
  const model = server.models[0];
  // `serve --http-port` reaches its own server through a socket in a private folder.
  const name = server.address.startsWith("unix:") ? "This server" : server.address;
  const head = el(
    "header",
    {},
    el("h2", {}, name),
    el("p", {}, model ? `${model.id}, ${model.saccade.dtype}, context of ${count(model.max_model_len)} tokens` : ""),
    ...(server.loads?.draining ? [el("span", { className: "draining" }, "Draining")] : []),
  );
  const failure = server.error ?? server.loads_error;
  const body = failure ? [problem(server, failure)] : [el("div", { className: "cards" }, ...cards(server.loads, history))];
  return el("section", { className: "server", attrs: { "aria-label": name } }, head, ...body);
}

function problem(server, failure) {
  const closed = !server.error && ["PERMISSION_DENIED", "UNAUTHENTICATED"].includes(failure.code);
  const hint = closed ? "The load is shown only to callers with the scope admin: enter a key that has it, or start a server without keys with --admin." : "";
  return el("div", { className: "problem" }, el("strong", {}, failure.code), el("p", {}, failure.message), el("p", { className: "note" }, hint));
}

function cards(loads, history) {
  const used = loads.total_blocks - loads.free_blocks;
  const inUse = loads.handoff_used_bytes - loads.handoff_cached_bytes;
  const speed = history[history.length - 1]?.speed ?? 0;
  const encoder = loads.encoder;
  return [
    card(
      "Requests", count(loads.live_requests), `of at most ${count(loads.max_requests)}`,
      line(history, (point) => point.running + point.waiting, "Running and waiting"),
      facts([["Running", `${count(loads.running)} of ${count(loads.max_running)}`], ["Waiting", count(loads.waiting)]]),
    ),
    card(
      "Tokens/s", rate(speed), `${count(loads.output_tokens)} since the start`,
      line(history, (point) => point.speed, "Tokens/s"),
      facts([["Prompt tokens from the cache", count(loads.prefix_cache_hit_tokens)]]),
    ),
    card(
      "Decoder memory", percent(used / (loads.total_blocks || 1)), `${count(used)} of ${count(loads.total_blocks)} blocks`,
      bar([["used", used / (loads.total_blocks || 1)]], "Blocks of the state arena"),
      facts([["Prefix cache", bytes(loads.prefix_cache_bytes)], ["State checkpoints", count(loads.prefix_cache_checkpoints)]]),
    ),
    card(
      "Image embeddings", bytes(loads.handoff_used_bytes), `of ${bytes(loads.handoff_capacity_bytes)}`,
      bar([["used", inUse / (loads.handoff_capacity_bytes || 1)], ["cached", loads.handoff_cached_bytes / (loads.handoff_capacity_bytes || 1)]], "Handoff buffer"),
      facts([["In use", bytes(inUse)], ["Cached", bytes(loads.handoff_cached_bytes)], ["Waiting", count(loads.waiting_media)], ["Encoding", count(loads.encoding_media)]]),
    ),
    ...(encoder ? [budgets(encoder)] : []),
    card(
      "Messages", bytes(loads.inflight_bytes), "of calls in progress",
      facts([["Uploaded media", bytes(loads.media_bytes)]]),
    ),
  ];
}

const card = (title, value, words, ...parts) =>
  el("article", { className: "card" }, el("h3", {}, title), el("p", { className: "value" }, el("b", {}, value), el("span", {}, words)), ...parts);

const facts = (rows) => el("dl", { className: "facts" }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

function bar(parts, name) {
  const total = parts.reduce((sum, [, part]) => sum + part, 0);
  const box = el("div", { className: "meter", attrs: { role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(total * 100)) } });
  for (const [kind, part] of parts) {
    const piece = el("i", { className: kind });
    piece.style.setProperty("--part", String(part));
    box.append(piece);
  }
  return box;
}

/** A line chart of the last two minutes. */
function line(history, value, name) {
  const values = history.map(value);
  const top = Math.max(1, ...values);
  const points = values.map((v, i) => `${KEPT - values.length + i},${(30 - (28 * v) / top).toFixed(1)}`).join(" ");
  const drawing = svg("svg", { viewBox: `0 0 ${KEPT - 1} 31`, preserveAspectRatio: "none", role: "img", "aria-label": `${name}, the last two minutes` });
  if (values.length) {
    const first = KEPT - values.length;
    drawing.append(svg("polygon", { points: `${first},31 ${points} ${KEPT - 1},31` }), svg("polyline", { points }));
  }
  return drawing;
}

function budgets(encoder) {
  const launches = encoder.eager_launches + encoder.budgets.reduce((sum, budget) => sum + budget.replays, 0);
  const padding = encoder.padded_tokens / (encoder.real_tokens + encoder.padded_tokens || 1);
  const most = Math.max(1, ...encoder.budgets.map((budget) => budget.replays));
  const rows = encoder.budgets.map((budget) => {
    const piece = el("i");
    piece.style.setProperty("--part", String(budget.replays / most));
    return el(
      "li",
      { className: budget.graph ? "graph" : "eager" },
      el("b", {}, count(budget.tokens)), piece, el("span", {}, budget.graph ? plural(budget.replays, "replay") : "eager"),
    );
  });
  return el(
    "article",
    { className: "card budgets" },
    el("h3", {}, "Encoder budgets"),
    el("p", { className: "value" }, el("b", {}, count(encoder.images)), el("span", {}, `images in ${launches === 1 ? "1 launch" : `${count(launches)} launches`}, up to ${count(encoder.max_images)} in one`)),
    el("ol", { attrs: { "aria-label": "Image tokens of a launch" } }, ...rows),
    facts([["Eager launches", count(encoder.eager_launches)], ["Padding", percent(padding)]]),
  );
}
