// One request from its start to its end: what came, and when.

import { ApiError } from "./api.js";

/** The answer so far. Times are in seconds after the request was sent. */
export class Run extends EventTarget {
  state = "waiting";
  finish = "";
  error = null;
  first = null;
  last = null;
  /** Tokens counted while they come; `usage` has the server's count at the end. */
  tokens = 0;
  /** Those of the first piece. */
  atFirst = 0;
  usage = null;
  facts = null;
  requestId = "";
  #abort = new AbortController();

  constructor(api, body) {
    super();
    this.body = body;
    this.began = performance.now();
    this.done = this.#read(api, body);
  }

  stop() {
    this.#abort.abort();
  }

  get running() {
    return this.state === "waiting" || this.state === "streaming";
  }

  /** Tokens a second after the first: at the end as the server measured, before as they came. Null before there are two. */
  get rate() {
    const { first_token_seconds: first, last_token_seconds: last } = this.facts ?? {};
    if (this.usage && last > first) return (this.usage.completion_tokens - 1) / (last - first);
    return this.last > this.first ? (this.tokens - this.atFirst) / (this.last - this.first) : null;
  }

  async #read(api, body) {
    try {
      for await (const chunk of api.chat(body, this.#abort.signal)) this.#take(chunk);
      this.#end("done");
    } catch (error) {
      if (error.name === "AbortError") this.#end("stopped");
      else {
        this.error = error instanceof ApiError ? error : new ApiError(`This page failed: ${error.message}`, { reason: "PAGE" });
        this.requestId ||= this.error.requestId;
        this.#end("failed");
      }
    }
  }

  #take(chunk) {
    if (chunk.id) this.requestId = chunk.id.replace(/^chatcmpl-/, "");
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.saccade) this.facts = { ...this.facts, ...chunk.saccade };
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const [text, reasoning] = [delta.content ?? "", delta.reasoning_content ?? ""];
    const calls = delta.tool_calls ?? [];
    const logprobs = choice?.logprobs?.content ?? [];
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (text || reasoning || logprobs.length || calls.length) {
      this.last = (performance.now() - this.began) / 1000;
      this.tokens += logprobs.length || 1;
      if (this.first === null) [this.first, this.atFirst] = [this.last, this.tokens];
      this.state = "streaming";
    }
    this.dispatchEvent(new CustomEvent("piece", { detail: { text, reasoning, tokens: written(logprobs, text, reasoning) } }));
  }

  #end(state) {
    this.state = state;
    this.dispatchEvent(new Event("end"));
  }
}

/** The tokens of a piece that belong to its text: the last ones, where it begins with reasoning. */
function written(logprobs, text, reasoning) {
  if (!reasoning) return logprobs;
  let at = logprobs.length;
  for (let length = 0; at > 0 && length < text.length; at -= 1) length += logprobs[at - 1].token.length;
  return logprobs.slice(at);
}
