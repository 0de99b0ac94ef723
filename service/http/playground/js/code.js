// The request as code. Files are read by their names; the key comes from the environment.

import { toJson } from "./request.js";

/** Functions of `(body, context)`. `body`: as it is sent; `context`: `{origin, grpc, hasKey, items, question, values}`. */
export const LANGUAGES = { curl, python, grpc };

/** The path of a file in the folder where the code runs; a colon would make its name a URL. */
const file = (item) => (item.name.includes(":") ? `./${item.name}` : item.name);

/** A shell word, quoted if necessary. */
const word = (words) => (/^[\w./-]+$/.test(words) ? words : `'${words.replaceAll("'", "'\\''")}'`);

/** The body with the name of a file in place of each data URL. */
function named(body, items, write) {
  let index = 0;
  const parts = (content) =>
    Array.isArray(content)
      ? content.map((part) => {
          if (part.type === "text") return part;
          const item = items[index++];
          return { type: part.type, [part.type]: { url: write(item) } };
        })
      : content;
  return { ...body, messages: body.messages.map((message) => ({ ...message, content: parts(message.content) })) };
}

/** A request with curl. The shell expands the here-document, which reads the files. */
function curl(body, { origin, hasKey, items }) {
  const marks = items.map((item) => [`@@${item.id}@@`, `data:${item.kind};base64,$(base64 <${word(file(item))} | tr -d '\\n')`]);
  const text = toJson(named(body, items, (item) => `@@${item.id}@@`), 2).replace(/[\\$`]/g, "\\$&");
  const filled = marks.reduce((all, [mark, value]) => all.replace(mark, () => value), text);
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $SACCADE_API_KEY"` : "";
  return `curl -sN ${origin}/v1/chat/completions${key} \\\n  -H 'Content-Type: application/json' --data-binary @- <<END\n${filled}\nEND\n`;
}

const PYTHON = { true: "True", false: "False", null: "None" };

/** Converts JSON to a Python literal. */
export function literal(value, indent = "") {
  const inner = `${indent}    `;
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((item) => inner + literal(item, inner)).join(",\n")},\n${indent}]` : "[]";
  }
  if (value instanceof Raw) return value.text;
  if (value && typeof value === "object") {
    const rows = Object.entries(value).map(([name, item]) => `${inner}${text(name)}: ${literal(item, inner)}`);
    return rows.length ? `{\n${rows.join(",\n")},\n${indent}}` : "{}";
  }
  return typeof value === "string" ? text(value) : (PYTHON[value] ?? String(value));
}

/** A JSON string is also a valid Python string. */
const text = (value) => JSON.stringify(value);

class Raw {
  constructor(words) {
    this.text = words;
  }
}

const OPENAI = new Set([
  "model", "messages", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "response_format", "logprobs",
  "top_logprobs", "stream", "stream_options",
]);

function python(body, { origin, hasKey, items }) {
  const read = named(body, items, (item) => new Raw(`data_url(${text(file(item))}, ${text(item.kind)})`));
  const own = Object.entries(read).filter(([name]) => OPENAI.has(name));
  const extra = Object.entries(read).filter(([name]) => !OPENAI.has(name));
  if (!body.model) own.unshift(["model", ""]);
  const rows = own.map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (extra.length) rows.push(`    extra_body=${literal(Object.fromEntries(extra), "    ")},`);
  const reader = items.length
    ? `\n\ndef data_url(path, kind):\n    with open(path, "rb") as file:\n        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"\n\n`
    : "";
  const key = hasKey ? `os.environ["SACCADE_API_KEY"]` : `"none"`;
  const imports = [items.length ? "import base64\n" : "", hasKey ? "import os\n" : ""].join("");
  return `${imports}${imports ? "\n" : ""}from openai import OpenAI
${reader}
client = OpenAI(base_url=${text(`${origin}/v1`)}, api_key=${key})
stream = client.chat.completions.create(
${rows.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
`;
}

/** The request as a call of the SDK. */
function grpc(body, { grpc: address, hasKey, items, question, values }) {
  const rows = [];
  const put = (name, value) => value !== undefined && rows.push(`        ${name}=${literal(value, "        ")},`);
  const names = (clip) => items.filter((item) => item.clip === clip).map(file);
  const ordered = items.every((item, index) => !item.clip || items.slice(index).every((other) => other.clip));
  let prompt = question;
  if (values.system.trim() || !ordered) {
    const parts = items.map((item) => (item.clip ? { type: "video", path: file(item) } : { type: "image", path: file(item) }));
    const asked = { role: "user", content: [...parts, { type: "text", text: question }] };
    prompt = values.system.trim() ? [{ role: "system", content: values.system }, asked] : [asked];
  } else {
    put("images", names(false).length ? names(false) : undefined);
    put("videos", names(true).length ? names(true) : undefined);
  }
  put("max_tokens", body.max_completion_tokens);
  for (const name of ["temperature", "top_p", "top_k", "seed", "stop"]) put(name, body[name]);
  put("enable_thinking", body.enable_thinking);
  put("max_reasoning_tokens", body.max_reasoning_tokens);
  put("logprobs", body.top_logprobs);
  const format = body.response_format;
  put("response_format", format?.type === "json_schema" ? format.json_schema.schema : format);
  const key = hasKey ? `, api_key=os.environ["SACCADE_API_KEY"]` : "";
  const tls = location.protocol === "https:" ? ", tls=True" : "";
  return `${hasKey ? "import os\n\n" : ""}import saccade

with saccade.Client(${text(address)}${key}${tls}) as client:
    with client.stream(
        ${[literal(prompt, "        "), ""].join(",")}
${rows.map((row) => `${row}\n`).join("")}    ) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print()
`;
}
