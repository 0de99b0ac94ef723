// The pane of one answer: its text, its numbers, and its error.

import { byId, copy, el, say, show } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { TokenText } from "./tokens.js";

const STATES = { idle: "Ready", waiting: "Waiting", streaming: "Answering", done: "Done", stopped: "Stopped", failed: "Failed" };
const FINISHED = { length: "Output limit reached", stop: "Complete", tool_calls: "Calls a tool", aborted: "Cancelled" };

export class Pane {
  /** `which`: "a" or "b". `again` asks again; `askKey` asks for an API key; `setting` returns a function that shows the
   * setting that caused an error, or null. */
  constructor(which, { again, askKey, setting }) {
    this.which = which;
    this.again = again;
    this.askKey = askKey;
    this.setting = setting;
    this.root = byId("pane-template").content.firstElementChild.cloneNode(true);
    const tag = this.part(".tag");
    tag.textContent = which.toUpperCase();
    tag.classList.add(which);
    this.text = new TokenText(this.part(".words"));
    this.part(".copy").addEventListener("click", (event) => copy(this.text.text, event.currentTarget));
    this.root.setAttribute("aria-label", `Answer ${which.toUpperCase()}`);
    this.run = null;
    this.clear();
  }

  part(selector) {
    return this.root.querySelector(selector);
  }

  clear() {
    this.run = null;
    this.spoken = 0;
    this.text.clear();
    this.part(".reasoning div").textContent = "";
    show(this.part(".reasoning"), false);
    show(this.part(".error"), false);
    this.part(".finish").textContent = "";
    this.part(".request").textContent = "";
    this.#numbers();
    this.#state("idle");
  }

  /** Shows in which settings this answer differs from the other one. */
  differs(words) {
    this.part(".differs").textContent = words;
  }

  /** Follows a run; resolves at its end. */
  async follow(run) {
    this.clear();
    this.run = run;
    this.#state("waiting");
    run.addEventListener("piece", ({ detail }) => this.#piece(detail));
    await new Promise((resolve) => run.addEventListener("end", resolve, { once: true }));
    if (this.run === run) this.#ended();
  }

  #piece({ text, reasoning, tokens }) {
    if (reasoning) this.#reasoned(reasoning);
    if (text || tokens.length) {
      if (text && !this.text.text) this.part(".reasoning").open = false;
      this.text.add(text, tokens);
      this.#speak(false);
    }
    this.#state(this.run.state);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#numbers();
    });
  }

  #reasoned(text) {
    const box = this.part(".reasoning");
    if (box.hidden) box.open = true;
    show(box, true);
    this.part(".reasoning div").append(text);
  }

  #ended() {
    const { run } = this;
    this.text.end();
    this.#numbers();
    this.#state(run.state);
    if (run.error) this.#failed(run.error);
    this.part(".finish").textContent = run.state === "done" ? (FINISHED[run.finish] ?? run.finish) : "";
    const seed = run.facts?.seed;
    const facts = [seed === undefined ? "" : `seed ${seed}`, run.requestId ? `request ${run.requestId}` : ""];
    this.part(".request").textContent = facts.filter(Boolean).join(" · ");
    this.#speak(true);
  }

  /** Announces complete sentences, and the rest at the end: announcements of single words would interrupt each other. */
  #speak(ended) {
    const text = this.text.text;
    const end = ended ? text.length : text.lastIndexOf(". ") + 1;
    const name = byId("panes").childElementCount > 1 ? `${this.which.toUpperCase()}: ` : "";
    if (end > this.spoken) say(name + text.slice(this.spoken, end).trim());
    this.spoken = Math.max(this.spoken, end);
  }

  #state(state) {
    if (this.root.dataset.state === state) return;
    this.root.dataset.state = state;
    this.part(".state").textContent = STATES[state];
    this.part(".copy").disabled = !["done", "stopped", "failed"].includes(state) || !this.text.text;
    this.root.setAttribute("aria-busy", String(state === "waiting" || state === "streaming"));
  }

  #numbers() {
    const run = this.run;
    const usage = run?.usage;
    const details = usage?.prompt_tokens_details;
    const prompt = usage?.prompt_tokens ?? run?.facts?.prompt_tokens;
    const media = details ? details.image_tokens + (details.video_tokens ?? 0) : run?.facts?.image_tokens;
    const tokens = usage?.completion_tokens ?? run?.tokens;
    const server = run?.facts?.first_token_seconds;
    const put = (name, value, title = "") => {
      const field = this.part(`[data-number=${name}]`);
      if (field.textContent !== value) field.textContent = value;
      field.title = title;
    };
    const or = (value, format = count) => (value === null || value === undefined ? "–" : format(value));
    put("rate", or(run?.rate, rate));
    put("first", or(run?.first, seconds), server ? `${seconds(server)} of it in the server` : "");
    put("output", or(tokens || null));
    put("prompt", or(prompt));
    put("image", or(media));
    put("cached", or(details?.cached_tokens), prompt ? `of ${count(prompt)} tokens of the prompt` : "");
    this.#bar(prompt, media, details?.cached_tokens);
    const thought = usage?.completion_tokens_details?.reasoning_tokens;
    this.part(".reasoning summary span").textContent = thought ? `${count(thought)} tokens` : "";
  }

  /** Shows the prompt as a bar: images and text, and below them the part that came from the cache. */
  #bar(prompt, media, cached) {
    const part = (selector, tokens) =>
      this.part(selector).style.setProperty("--part", String(prompt ? (tokens ?? 0) / prompt : 0));
    part(".of-media", media);
    part(".of-text", prompt - (media ?? 0));
    part(".of-cache", cached);
  }

  #failed(error) {
    const box = this.part(".error");
    box.querySelector("strong").textContent = error.reason || "Error";
    box.querySelector("p").textContent = error.message;
    const ids = [error.status ? `HTTP ${error.status}` : "", error.requestId ? `request ${error.requestId}` : ""];
    box.querySelector(".ids").textContent = ids.filter(Boolean).join(" · ");
    const actions = box.querySelector(".actions");
    actions.replaceChildren();
    if (error.status === 401) {
      actions.append(el("button", { type: "button", className: "quiet", textContent: "Enter an API key", on: { click: this.askKey } }));
    }
    const shown = this.setting(error);
    if (shown) actions.append(el("button", { type: "button", className: "quiet", textContent: "Show the setting", on: { click: shown } }));
    if (error.requestId) {
      const button = el("button", { type: "button", className: "quiet", textContent: "Copy request id" });
      button.addEventListener("click", () => copy(error.requestId, button));
      actions.append(button);
    }
    if (error.status === 429 || error.status === 503 || !error.status) actions.append(this.#retry(error.retryAfter ?? 0));
    show(box, true);
  }

  /** A button that asks again, once the server's delay is over. */
  #retry(delay) {
    const button = el("button", { type: "button", className: "quiet", on: { click: this.again } });
    const until = performance.now() + delay * 1000;
    const tick = () => {
      const left = Math.ceil((until - performance.now()) / 1000);
      button.disabled = left > 0;
      button.textContent = left > 0 ? `Ask again in ${left} s` : "Ask again";
      if (left > 0) setTimeout(tick, 250);
    };
    tick();
    return button;
  }
}
