// Keyboard shortcuts. Single keys work outside of text fields, and can be switched off.

import { byId, el, stored, writing } from "./dom.js";

const mac = /Mac|iPhone|iPad/.test(navigator.platform);
export const COMMAND = mac ? "⌘" : "Ctrl";

/** `actions`: name -> `{keys, words, run}`; keys are "ctrl+enter", "escape", or one character. */
export class Shortcuts {
  constructor(actions) {
    this.actions = actions;
    byId("letters").checked = stored.get("saccade-letters") !== "off";
    byId("letters").addEventListener("change", (event) => stored.set("saccade-letters", event.target.checked ? null : "off"));
    byId("go-key").textContent = `${COMMAND} ↵`;
    byId("shortcuts").replaceChildren(
      ...actions.flatMap(({ keys, words }) => [el("dt", {}, el("kbd", {}, shown(keys))), el("dd", {}, words)]),
    );
    document.addEventListener("keydown", (event) => this.#key(event));
  }

  #key(event) {
    if (event.defaultPrevented || event.isComposing || event.altKey) return;
    if (document.querySelector("dialog[open]")) return;
    const command = event.ctrlKey || event.metaKey;
    const pressed = (command ? "ctrl+" : "") + event.key.toLowerCase();
    const action = this.actions.find(({ keys }) => keys === pressed);
    if (!action) return;
    const letter = pressed.length === 1;
    if (letter && (!byId("letters").checked || writing(event.target))) return;
    if (action.run() === false) return;
    event.preventDefault();
  }
}

const shown = (keys) => keys.replace("ctrl+", `${COMMAND} `).replace("enter", "↵").replace("escape", "Esc");
