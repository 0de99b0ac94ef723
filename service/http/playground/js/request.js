// Builds the body of a request from the values on the page, without access to the document. Code samples use the same body.

export class SettingError extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

const NUMBERS = ["temperature", "top_p", "top_k", "max_reasoning_tokens"];

/** Sampling parameters from one set of settings; unset ones are left to the server. Throws SettingError. */
export function sampling(values) {
  const body = {};
  for (const name of NUMBERS) if (values[name] !== "") body[name] = number(name, values[name]);
  if (values.max_tokens !== "") body.max_completion_tokens = number("max_tokens", values.max_tokens);
  if (values.seed !== "") body.seed = seed(values.seed);
  const stop = values.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if (values.reasoning) body.enable_thinking = values.reasoning === "on";
  if (values.format === "json_object") body.response_format = { type: "json_object" };
  if (values.format === "json_schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema(values.schema), strict: true } };
  }
  if (values.logprobs) Object.assign(body, { logprobs: true, top_logprobs: Number(values.logprobs) });
  return body;
}

function number(name, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingError(name, `${name.replaceAll("_", " ")}: "${text}" is not a number`);
  return value;
}

/** A seed has 64 bits, more than a JavaScript number can hold. */
function seed(text) {
  if (!/^\d+$/.test(text)) throw new SettingError("seed", `seed: "${text}" is not an integer >= 0`);
  return BigInt(text);
}

const MARK = `integer-${Math.random()}-`;

/** JSON in which BigInt values are written as numbers. */
export function toJson(body, indent) {
  const text = JSON.stringify(body, (_, value) => (typeof value === "bigint" ? MARK + value : value), indent);
  return text.replaceAll(new RegExp(`"${MARK}(\\d+)"`, "g"), "$1");
}

/** Parses a JSON schema. Throws SettingError. */
export function schema(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SettingError("schema", text.trim() ? `This is not JSON: ${error.message}` : "The JSON schema is empty.");
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new SettingError("schema", "A JSON schema is an object, such as {\"type\": \"object\"}.");
  }
  return value;
}

/** The messages: images and clips first, then the question. `items`: `{url, clip}` of each. */
export function messages(system, items, question) {
  const parts = items.map(({ url, clip }) =>
    clip ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } },
  );
  const asked = { role: "user", content: parts.length ? [...parts, { type: "text", text: question }] : question };
  return system.trim() ? [{ role: "system", content: system }, asked] : [asked];
}

/** The whole body. Throws SettingError. */
export function chatBody({ model, values, items, question }) {
  return {
    ...(model ? { model } : {}),
    messages: messages(values.system, items, question),
    ...sampling(values),
    stream: true,
    stream_options: { include_usage: true },
  };
}
