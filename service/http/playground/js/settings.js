// The two sets of settings, A and B, behind one form.

import { byId, complain, show, stored } from "./dom.js";
import { sampling, schema } from "./request.js";

const SCHEMA = `{
  "type": "object",
  "properties": {
    "shape": {"type": "string"},
    "colour": {"type": "string"}
  },
  "required": ["shape", "colour"]
}`;

const NAMES = {
  system: "system prompt", temperature: "temperature", max_tokens: "tokens", top_p: "top p", top_k: "top k", seed: "seed",
  stop: "stop", reasoning: "reasoning", max_reasoning_tokens: "reasoning tokens", format: "format", schema: "schema",
  logprobs: "probabilities",
};

/** Field of the request -> setting from which it is made, where the names differ. */
const MADE = {
  max_completion_tokens: "max_tokens", enable_thinking: "reasoning", top_logprobs: "logprobs", response_format: "format",
};

/** The setting from which a field of the request, such as `stop[0]`, is made; "" if there is none. */
export function settingOf(path) {
  if (path.startsWith("response_format.json_schema")) return "schema";
  const name = path.match(/^\w*/)[0];
  return MADE[name] ?? (name in NAMES ? name : "");
}

export class Settings extends EventTarget {
  /** Whether B is in use. */
  comparing = false;

  constructor() {
    super();
    this.box = byId("settings");
    this.fields = [...this.box.querySelectorAll("[name]")].filter((field) => field.name in NAMES);
    this.field("schema").value = SCHEMA;
    this.sets = { a: this.#read() };
    this.sets.b = { ...this.sets.a };
    this.current = "a";
    this.box.addEventListener("input", (event) => event.target.name in NAMES && this.#edited());
    for (const radio of this.box.querySelectorAll("[name=which]")) {
      radio.addEventListener("change", () => this.choose(radio.value));
    }
    this.box.open = stored.get("saccade-settings") === "open";
    this.box.addEventListener("toggle", () => stored.set("saccade-settings", this.box.open ? "open" : null));
    this.#drawn();
  }

  field(name) {
    return this.box.querySelector(`[name=${name}]`);
  }

  #read() {
    // A field with only blanks counts as empty: as a number it would be 0.
    const value = (field) => (field.tagName === "INPUT" ? field.value.trim() : field.value);
    return Object.fromEntries(this.fields.map((field) => [field.name, value(field)]));
  }

  #edited() {
    this.sets[this.current] = this.#read();
    this.#drawn();
    this.dispatchEvent(new Event("change"));
  }

  /** Shows set "a" or "b" in the form. */
  choose(which) {
    this.current = which;
    for (const field of this.fields) field.value = this.sets[which][field.name];
    this.box.querySelector(`[name=which][value=${which}]`).checked = true;
    this.#drawn();
  }

  /** Starts a comparison, with B as a copy of A, or ends it. */
  compare(on) {
    this.comparing = on;
    show(byId("which"), on);
    if (on) {
      this.sets.b = { ...this.sets.a };
      this.box.open = true;
    }
    this.choose(on ? "b" : "a");
    this.dispatchEvent(new Event("change"));
  }

  /** Shows the model's defaults as placeholders of empty fields. */
  defaults(values) {
    const shown = { temperature: values.temperature ?? 1, top_p: values.top_p ?? 1, top_k: values.top_k || "Off" };
    for (const [name, value] of Object.entries(shown)) this.field(name).placeholder = `${value}`;
    this.#drawn();
  }

  /** Describes the fields in which a set differs from the other. */
  differences(which) {
    const [own, other] = which === "a" ? [this.sets.a, this.sets.b] : [this.sets.b, this.sets.a];
    const differ = Object.keys(NAMES).filter((name) => own[name] !== other[name]);
    const relevant = differ.filter((name) => name !== "schema" || own.format === "json_schema");
    const value = (name) => (own[name] === "" ? " default" : own[name].length < 12 ? ` ${own[name]}` : "");
    return relevant.map((name) => NAMES[name] + value(name)).join(", ");
  }

  #drawn() {
    const own = this.sets[this.current];
    show(byId("schema-field"), own.format === "json_schema");
    const note = byId("schema-note");
    try {
      schema(own.schema);
      note.textContent = "A valid JSON object.";
      this.field("schema").removeAttribute("aria-invalid");
    } catch (error) {
      note.textContent = error.message;
      this.field("schema").setAttribute("aria-invalid", "true");
    }
    const set = Object.keys(NAMES).filter((name) => !["logprobs", "schema", "max_tokens"].includes(name) && own[name]);
    const words = set.map((name) => (own[name].length < 12 ? `${NAMES[name]} ${own[name]}` : NAMES[name]));
    if (own.max_tokens) words.push(`at most ${own.max_tokens} tokens`);
    const summary = words.join(", ") || "model defaults";
    byId("settings-summary").textContent = summary[0].toUpperCase() + summary.slice(1);
  }

  /** Opens the form at the field that caused an error, and shows the error there. */
  point(which, error) {
    this.choose(which);
    this.box.open = true;
    complain(this.field(error.field), error.message);
  }

  toggle() {
    this.box.open = !this.box.open;
    if (this.box.open) this.box.querySelector("summary").focus();
  }

  /** The values of a set, after checking them. Throws SettingError. */
  values(which) {
    sampling(this.sets[which]);
    return this.sets[which];
  }
}
