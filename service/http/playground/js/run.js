// One request from its start to its end: what has arrived, and when.

import { ApiError } from "./api.js";

/** The answer so far. Times are in seconds after the request was sent. */
export class Run extends EventTarget {
  state = "waiting";
  finish = "";
  error = null;
  first = null;
  last = null;
  /** Tokens counted while they arrive; at the end, `usage` has the server's count. */
  tokens = 0;
  /** Tokens of the first piece. */
  atFirst = 0;
  usage = null;
  facts = null;
  requestId = "";
  /** Whether there was reasoning and text. Tokens are held back until the text begins: they may belong to the reasoning. */
  #reasoned = false;
  #wrote = false;
  #held = [];
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

  /** Tokens per second after the first: as they arrive, and at the end as the server measured it. Null for fewer than two. */
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
    this.#reasoned ||= reasoning !== "";
    this.#piece(text, reasoning, this.#written(logprobs, text));
  }

  #piece(text, reasoning, tokens) {
    this.dispatchEvent(new CustomEvent("piece", { detail: { text, reasoning, tokens } }));
  }

  /** The tokens to show with a text. How tokens and text are divided into chunks depends on timing. */
  #written(logprobs, text) {
    if (this.#wrote) return logprobs;
    this.#held.push(...logprobs);
    if (!text) return [];
    this.#wrote = true;
    return this.#reasoned ? lastOf(this.#held, text) : this.#held;
  }

  #end(state) {
    if (!this.#wrote && !this.#reasoned && this.#held.length) this.#piece("", "", this.#held);
    this.state = state;
    this.dispatchEvent(new Event("end"));
  }
}

/** The tokens from the last one with which the text could begin; none if there is no such token. */
function lastOf(logprobs, text) {
  const begins = (tokens) => {
    const bytes = new Uint8Array(tokens.flatMap((token) => token.bytes ?? []));
    return new TextDecoder().decode(bytes).trimStart().startsWith(text.trimStart());
  };
  const first = Math.max(0, logprobs.length - text.length - 8); // each has at least a character; a few more may follow
  for (let at = logprobs.length - 1; at >= first; at -= 1) if (begins(logprobs.slice(at))) return logprobs.slice(at);
  return [];
}
