// Calls to the server that this page came from.

import { toJson } from "./request.js";
import { events } from "./sse.js";

/** An error of the server, with its reason and the request's id. */
export class ApiError extends Error {
  constructor(message, { status = 0, reason = "", requestId = "", retryAfter = null, field = "" } = {}) {
    super(message);
    Object.assign(this, { status, reason, requestId, retryAfter, field });
  }
}

export class Api {
  /** Kept only in memory, so that reloading the page forgets it. */
  key = "";

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
      throw new ApiError("The server cannot be reached.", { reason: "UNREACHABLE" });
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  async get(path, signal) {
    const response = await this.#fetch(path, { signal });
    return response.json();
  }

  async models() {
    return (await this.get("v1/models")).data;
  }

  async status(signal) {
    return this.get("status", signal);
  }

  /** The chunks of a streamed chat completion. Aborting the signal ends the work on the server. */
  async *chat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: toJson(body),
      signal,
    });
    const requestId = response.headers.get("x-request-id") ?? "";
    let done = false;
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") done = true; // only the end of the body follows
        if (done) continue;
        const chunk = JSON.parse(data);
        // A seed may have more digits than a JavaScript number can hold.
        if (chunk.saccade) chunk.saccade.seed = data.match(/"seed":(\d+)/)?.[1];
        if (chunk.error) throw fromObject(chunk.error, { requestId });
        yield chunk;
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // a lost connection is a TypeError
    }
    if (!done) throw new ApiError("The connection ended before the answer did.", { reason: "STREAM_CUT", requestId });
  }
}

function fromObject(error, facts) {
  return new ApiError(error.message, {
    ...facts,
    reason: error.code ?? error.type ?? "",
    requestId: error.request_id ?? facts.requestId,
    field: error.param ?? "",
  });
}

async function refusal(response) {
  const seconds = Number.parseFloat(response.headers.get("retry-after"));
  const facts = {
    status: response.status,
    requestId: response.headers.get("x-request-id") ?? "",
    retryAfter: Number.isFinite(seconds) ? seconds : null,
  };
  try {
    return fromObject((await response.json()).error, facts);
  } catch {
    return new ApiError(`The server answered ${response.status} ${response.statusText}.`, { ...facts, reason: "HTTP" });
  }
}
