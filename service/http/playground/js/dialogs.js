// The dialogs for the API key and for code samples.

import { byId, complain, copy } from "./dom.js";
import { LANGUAGES } from "./code.js";

/** Returns a function that opens the dialog; `changed` is called when the key has changed. */
export function keyDialog(api, changed) {
  const [dialog, field] = [byId("key-dialog"), byId("key")];
  const open = () => {
    field.value = api.key;
    dialog.returnValue = "";
    dialog.showModal();
    field.focus();
  };
  byId("key-open").addEventListener("click", open);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // the form's first button would forget the key
    byId("key-use").click();
  });
  byId("key-use").addEventListener("click", (event) => {
    // A header can hold only printable ASCII.
    if (/^[\x21-\x7e]*$/.test(field.value.trim())) return;
    event.preventDefault();
    complain(field, "An API key has printable ASCII characters only, without spaces.");
  });
  dialog.addEventListener("close", () => {
    const key = dialog.returnValue === "use" ? field.value.trim() : dialog.returnValue === "forget" ? "" : api.key;
    field.value = "";
    if (key === api.key) return;
    api.key = key;
    byId("key-set").hidden = !key;
    byId("key-open").title = key ? "API key: set" : "API key";
    changed();
  });
  return open;
}

/** Returns a function that opens the dialog. `request()` returns `{body, context, note}`; `body` is null if it is invalid. */
export function codeDialog(request) {
  const [dialog, box] = [byId("code-dialog"), byId("code")];
  const tabs = [...dialog.querySelectorAll("[role=tab]")];
  let language = "curl";
  const draw = () => {
    const { body, context, note } = request();
    box.textContent = body ? LANGUAGES[language](body, context) : "";
    byId("code-note").textContent = note;
    box.setAttribute("aria-labelledby", `tab-${language}`);
    for (const tab of tabs) {
      const chosen = tab.id === `tab-${language}`;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
  };
  const choose = (tab) => {
    language = tab.id.replace("tab-", "");
    draw();
    tab.focus();
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) choose(tabs[(index + step + tabs.length) % tabs.length]);
    });
  });
  byId("code-copy").addEventListener("click", (event) => copy(box.textContent, event.currentTarget));
  const open = () => {
    draw();
    dialog.showModal();
    byId(`tab-${language}`).focus();
  };
  byId("code-open").addEventListener("click", open);
  return open;
}
