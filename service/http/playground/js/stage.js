// Shows the images and clips, and accepts new ones, which are dropped, pasted, chosen, or an example.

import { byId, el, say, show, writing } from "./dom.js";
import { bytes } from "./format.js";
import { Grid, describe } from "./grid.js";

const EXAMPLES = [
  ["shapes.png", "What does the picture show?"],
  ["wide.png", "In which place is the circle?"],
  ["number.png", "What number is printed here?"],
  ["handwritten.png", "What digit did someone write by hand?"],
];

export class Stage {
  /** `suggest` gets the question of an example. */
  constructor(media, suggest) {
    this.media = media;
    this.suggest = suggest;
    /** What was wrong with the files that were added last. */
    this.problem = "";
    /** Whether an example is being fetched. */
    this.loading = false;
    this.grid = new Grid(byId("frame"), (words) => this.#caption(words));
    media.addEventListener("change", () => this.draw());
    this.#take();
    byId("grid-on").addEventListener("change", () => this.#grid());
    byId("as-clip").addEventListener("change", (event) => {
      media.selected.clip = event.target.checked;
      media.selected.layout = null;
      media.changed();
    });
    this.draw();
  }

  // -- input

  #take() {
    const [stage, files] = [byId("stage"), byId("files")];
    byId("pick").addEventListener("click", () => this.pick());
    files.addEventListener("change", async () => {
      await this.#add([...files.files]);
      files.value = "";
    });
    let depth = 0; // dragenter and dragleave also come from children
    const over = (change) => {
      depth = Math.max(0, depth + change);
      stage.classList.toggle("over", depth > 0);
    };
    const carries = (event) => event.dataTransfer?.types.includes("Files");
    document.addEventListener("dragenter", (event) => carries(event) && over(1));
    document.addEventListener("dragleave", (event) => carries(event) && over(-1));
    document.addEventListener("dragover", (event) => carries(event) && event.preventDefault());
    document.addEventListener("drop", (event) => {
      if (!carries(event)) return;
      event.preventDefault();
      depth = 0;
      over(0);
      this.#add([...event.dataTransfer.files]);
    });
    document.addEventListener("paste", (event) => {
      const pasted = [...(event.clipboardData?.files ?? [])];
      if (!pasted.length || document.querySelector("dialog[open]")) return;
      // Tables and documents are pasted both as text and as an image of it.
      if (writing(event.target) && event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.#add(pasted);
    });
  }

  /** Opens the browser's dialog for files. */
  pick() {
    byId("files").click();
  }

  async #add(files) {
    const refused = await this.media.add(files);
    this.problem = refused.map(({ name, why }) => `${name}: ${why}.`).join(" ");
    this.#caption(null);
    if (!refused.length && files.length) say(`Added ${files.map((file) => file.name).join(", ")}.`);
  }

  async #example(name, question) {
    if (this.loading) return; // a second click would add the example twice
    this.loading = true;
    try {
      const response = await fetch(`examples/${name}`);
      await this.#add([new File([await response.blob()], name, { type: "image/png" })]);
      this.suggest(question);
    } catch {
      this.problem = `${name}: the server cannot be reached.`;
      this.#caption(null);
    } finally {
      this.loading = false;
    }
  }

  // -- display

  draw() {
    const item = this.media.selected;
    show(byId("empty"), !item);
    show(byId("frame"), item);
    if (item?.id !== this.shown) {
      this.problem = "";
      this.#show(item);
    }
    this.shown = item?.id;
    show(byId("clip-switch"), item?.either);
    byId("as-clip").checked = Boolean(item?.clip);
    this.#strip();
    this.#grid();
    this.#caption(null);
  }

  #show(item) {
    const frame = byId("frame");
    frame.replaceChildren();
    this.grid.draw(null);
    if (!item) return;
    const sized = (width, height) => {
      [item.width, item.height] = [width, height];
      frame.style.setProperty("--ratio", String(width / height || 1));
      this.#caption(null);
    };
    const failed = () => frame.replaceChildren(el("p", { className: "unseen" }, `${item.name}: this browser cannot show it.`));
    if (item.kind.startsWith("video/")) {
      const video = el("video", { src: item.view, controls: true, muted: true, playsInline: true, attrs: { "aria-label": item.name } });
      video.addEventListener("loadedmetadata", () => sized(video.videoWidth, video.videoHeight));
      video.addEventListener("error", failed);
      frame.append(video);
    } else {
      const image = el("img", { src: item.view, alt: item.name, draggable: false });
      image.addEventListener("load", () => sized(image.naturalWidth, image.naturalHeight));
      image.addEventListener("error", failed);
      frame.append(image);
    }
  }

  #grid() {
    const layout = byId("grid-on").checked ? (this.media.selected?.layout ?? null) : null;
    if (layout === this.grid.layout) return;
    this.problem = "";
    this.grid.draw(layout);
  }

  #caption(words) {
    const item = this.media.selected;
    const facts = () => {
      if (!item) return "No image yet.";
      const size = item.width ? `${item.width} × ${item.height} px` : bytes(item.size);
      return item.layout ? `${size}: ${describe(item.layout)}` : `${size}. Its patch grid appears after you ask.`;
    };
    const text = words ?? (this.problem || facts());
    if (byId("caption").textContent !== text) byId("caption").textContent = text;
  }

  #strip() {
    const strip = byId("strip");
    const focused = document.activeElement?.closest?.("#strip [data-key]")?.dataset.key;
    strip.setAttribute("aria-label", this.media.items.length ? "Images and clips" : "Examples");
    if (this.media.items.length) this.#thumbs(strip);
    else this.#examples(strip);
    if (focused) (strip.querySelector(`[data-key="${focused}"]`) ?? strip.querySelector("button"))?.focus();
  }

  #examples(strip) {
    if (strip.querySelector(".example")) return;
    strip.replaceChildren(
      el("span", { className: "hint" }, "Or try"),
      ...EXAMPLES.map(([name, question]) =>
        el(
          "button",
          {
            type: "button", className: "thumb example", title: question, data: { key: name },
            on: { click: () => this.#example(name, question) },
          },
          el("img", { src: `examples/${name}`, alt: `Example: ${question}`, width: 48, height: 48 }),
        ),
      ),
    );
  }

  #thumbs(strip) {
    strip.replaceChildren(
      ...this.media.items.map((item, index) => {
        const name = `${item.clip ? "Clip" : "Image"} ${index + 1}, ${item.name}`;
        const view = item.kind.startsWith("video/")
          ? el("video", { src: item.view, muted: true, tabIndex: -1, attrs: { "aria-hidden": "true" } })
          : el("img", { src: item.view, alt: "" });
        return el(
          "div",
          { className: "thumb-box" },
          el(
            "button",
            {
              type: "button", className: "thumb", title: item.name, data: { key: `item-${item.id}` },
              attrs: { "aria-pressed": String(item === this.media.selected), "aria-label": name },
              on: { click: () => this.media.select(item), keydown: (event) => this.#thumbKey(event, item) },
            },
            view,
            ...(item.clip ? [el("span", { className: "badge" }, "clip")] : []),
          ),
          el("button", {
            type: "button", className: "remove", title: "Remove", data: { key: `remove-${item.id}` },
            attrs: { "aria-label": `Remove ${item.name}` }, on: { click: () => this.#remove(item) },
          }),
        );
      }),
      el("button", {
        type: "button", className: "thumb add", title: "Add files", data: { key: "add" }, textContent: "+",
        attrs: { "aria-label": "Add files" }, on: { click: () => this.pick() },
      }),
    );
  }

  #thumbKey(event, item) {
    if (event.key !== "Delete" && event.key !== "Backspace") return;
    event.preventDefault();
    this.#remove(item);
  }

  #remove(item) {
    this.media.remove(item);
    say(`Removed ${item.name}.`);
  }
}
