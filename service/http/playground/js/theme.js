// The colour scheme: the system's, light or dark.

import { byId, say, stored } from "./dom.js";

const NAMES = { system: "as the system", light: "light", dark: "dark" };
const NEXT = { system: "light", light: "dark", dark: "system" };

export function theme() {
  const button = byId("theme");
  const current = () => document.documentElement.dataset.theme ?? "system";
  const label = () => {
    byId("theme-text").textContent = `Colours: ${NAMES[current()]}`;
    button.title = `Colours: ${NAMES[current()]}`;
  };
  const turn = () => {
    const next = NEXT[current()];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    stored.set("saccade-theme", next === "system" ? null : next);
    label();
    say(`Colours: ${NAMES[next]}.`);
  };
  button.addEventListener("click", turn);
  label();
  return turn;
}
