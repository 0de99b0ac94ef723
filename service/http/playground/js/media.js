// The images and clips of the next request.

const CLIPS = /^video\//;
const EITHER = new Set(["image/gif", "image/webp", "image/apng"]); // may hold one image or many

let next = 1;

/** A list of attachments. It dispatches "change" when the list or the selection has changed. */
export class Media extends EventTarget {
  items = [];
  selected = null;
  /** Whether the model accepts clips; a GIF is then sent as a clip by default. */
  takesClips = false;

  /** Resolves when the files that are being added have been read, which takes seconds for large ones. */
  added = Promise.resolve();

  /** Adds files. Returns `{name, why}` for each file that cannot be added. */
  add(files) {
    const adding = this.#add(files);
    this.added = Promise.allSettled([this.added, adding]);
    return adding;
  }

  async #add(files) {
    const refused = [];
    for (const file of files) {
      const kind = file.type || guess(file.name);
      if (!/^(image|video)\//.test(kind)) {
        refused.push({ name: file.name, why: "neither an image nor a clip" });
        continue;
      }
      let url;
      try {
        url = await dataUrl(file, kind);
      } catch {
        refused.push({ name: file.name, why: "the browser cannot read it" }); // a folder, or a deleted or very large file
        continue;
      }
      const clip = CLIPS.test(kind) || (kind === "image/gif" && this.takesClips);
      const item = {
        id: next++, name: this.#unused(file.name || `pasted.${kind.split("/")[1]}`), kind, clip, either: EITHER.has(kind),
        layout: null, size: file.size, width: 0, height: 0, url, view: URL.createObjectURL(file),
      };
      this.items.push(item);
      this.selected = item;
    }
    this.changed();
    return refused;
  }

  /** The name, with a number if another item has the same name. */
  #unused(name) {
    const taken = new Set(this.items.map((item) => item.name));
    let own = name;
    for (let i = 2; taken.has(own); i += 1) own = name.replace(/(\.[^.]*)?$/, `-${i}$1`);
    return own;
  }

  remove(item) {
    const index = this.items.indexOf(item);
    if (index < 0) return;
    URL.revokeObjectURL(item.view);
    this.items.splice(index, 1);
    if (this.selected === item) this.selected = this.items[Math.min(index, this.items.length - 1)] ?? null;
    this.changed();
  }

  select(item) {
    this.selected = item;
    this.changed();
  }

  /** Stores how the server has divided the items that were sent: one layout for each, in order. */
  describe(items, layouts) {
    items.forEach((item, index) => (item.layout = layouts[index] ?? item.layout));
    this.changed();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function guess(name) {
  const suffix = name.split(".").pop().toLowerCase();
  if (["mp4", "m4v", "webm", "mov", "mkv"].includes(suffix)) return "video/mp4";
  return ["heic", "avif", "tif", "tiff", "apng", "ppm"].includes(suffix) ? `image/${suffix}` : "";
}

function dataUrl(file, kind) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.replace(/^data:[^;,]*/, `data:${kind}`));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
