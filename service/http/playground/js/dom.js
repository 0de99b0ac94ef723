// Small helpers for the document.

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; `data`, `attrs` and `on` are objects of their own. */
export function el(tag, { data = {}, attrs = {}, on = {}, ...props } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(attrs)) made.setAttribute(name, value);
  for (const [name, handler] of Object.entries(on)) made.addEventListener(name, handler);
  made.append(...children);
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attrs = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attrs)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Shows an element or hides it. */
export function show(element, visible) {
  element.hidden = !visible;
}

/** Announces text to screen readers; it replaces the previous announcement. */
export function say(text) {
  byId("live").textContent = text;
}

/** Whether an element is a field whose value typing or pasting changes. */
export const writing = (element) =>
  element.isContentEditable || ["TEXTAREA", "SELECT"].includes(element.tagName) ||
  (element.tagName === "INPUT" && !["checkbox", "radio", "file"].includes(element.type));

/** Focuses a field and shows what is wrong with it, until it is edited. */
export function complain(field, message) {
  field.focus();
  field.setCustomValidity(message);
  field.reportValidity();
  field.addEventListener("input", () => field.setCustomValidity(""), { once: true });
  say(message);
}

/** Copies text, and shows the result on the button for a moment. */
export async function copy(text, button) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  try {
    await write(text);
    button.textContent = "Copied";
    say("Copied.");
  } catch {
    button.textContent = "Not allowed";
    say("The browser did not allow copying.");
  }
  clearTimeout(Number(button.dataset.timer));
  button.dataset.timer = String(setTimeout(() => (button.textContent = label), 1600));
}

/** Writes to the clipboard. `navigator.clipboard` is missing in pages that come from other machines without TLS. */
async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text, className: "hidden" });
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(area); // nothing else takes focus beside a dialog
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("not copied");
}

/** Values in the browser's storage, to which the page may have no access. */
export const stored = {
  get(name) {
    try {
      return localStorage.getItem(name);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      if (value === null) localStorage.removeItem(name);
      else localStorage.setItem(name, value);
    } catch {
      // The value is not kept for the next visit.
    }
  },
};
