// The patch grid over an image: a cell is an image token, faint lines divide it into patches.

import { svg } from "./dom.js";

/** Describes a layout in words. */
export function describe(layout) {
  const [rows, columns] = [layout.grid_rows, layout.grid_columns];
  const slices = layout.slice_rows * layout.slice_columns;
  const cut = slices ? `, and ${slices} slices of ${layout.slice_grid_rows} × ${layout.slice_grid_columns}` : "";
  const frames = layout.frames ? `${layout.frames} frames, each ` : "";
  return `${frames}${rows} × ${columns} patches${cut}, ${layout.tokens} tokens`;
}

/** An overlay for a frame that shows the image. Pointer and arrow keys choose a token; `onToken` gets its description. */
export class Grid {
  constructor(frame, onToken) {
    this.frame = frame;
    this.onToken = onToken;
    this.layout = null;
    this.cell = null;
    frame.addEventListener("pointermove", (event) => this.#point(event));
    frame.addEventListener("pointerleave", () => this.#choose(null));
    frame.addEventListener("keydown", (event) => this.#key(event));
    frame.addEventListener("blur", () => this.#choose(null));
  }

  draw(layout) {
    this.frame.querySelector("svg")?.remove();
    this.layout = layout;
    this.cell = null;
    if (!layout) {
      this.frame.removeAttribute("tabindex");
      this.frame.removeAttribute("aria-label");
      this.frame.removeAttribute("role");
      return;
    }
    const { grid_rows: rows, grid_columns: columns, merge_size: merge } = layout;
    const lines = (step, skip) => {
      let path = "";
      for (let y = step; y < rows; y += step) if (y % skip) path += `M0 ${y}H${columns}`;
      for (let x = step; x < columns; x += step) if (x % skip) path += `M${x} 0V${rows}`;
      return path;
    };
    this.mark = svg("rect", { class: "mark", width: merge, height: merge, visibility: "hidden" });
    const parts = [
      svg("path", { class: "patches", d: merge > 1 ? lines(1, merge) : "" }),
      svg("path", { class: "tokens", d: lines(merge, Number.POSITIVE_INFINITY) }),
      svg("path", { class: "slices", d: this.#slices() }),
      this.mark,
    ];
    this.frame.append(
      svg("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...parts),
    );
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "group");
    this.frame.setAttribute("aria-label", `Patch grid, ${describe(layout)}. Arrow keys choose a token.`);
  }

  #slices() {
    const { grid_rows: rows, grid_columns: columns, slice_rows: down, slice_columns: across } = this.layout;
    let path = "";
    for (let i = 1; i < down; i++) path += `M0 ${(rows * i) / down}H${columns}`;
    for (let i = 1; i < across; i++) path += `M${(columns * i) / across} 0V${rows}`;
    return path;
  }

  get #size() {
    return [this.layout.grid_rows / this.layout.merge_size, this.layout.grid_columns / this.layout.merge_size];
  }

  #point(event) {
    if (!this.layout) return;
    const box = this.frame.getBoundingClientRect();
    const [rows, columns] = this.#size;
    const at = (place, start, length, cells) =>
      Math.min(cells - 1, Math.max(0, Math.floor(((place - start) / length) * cells)));
    this.#choose([at(event.clientY, box.top, box.height, rows), at(event.clientX, box.left, box.width, columns)]);
  }

  #key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!this.layout || !step || event.target !== this.frame) return;
    event.preventDefault();
    const [rows, columns] = this.#size;
    const [row, column] = this.cell ?? [0, 0];
    const moved = this.cell ? [row + step[0], column + step[1]] : [0, 0];
    this.#choose([Math.min(rows - 1, Math.max(0, moved[0])), Math.min(columns - 1, Math.max(0, moved[1]))]);
  }

  #choose(cell) {
    if (!this.layout || (cell && this.cell && cell[0] === this.cell[0] && cell[1] === this.cell[1])) return;
    if (!cell && !this.cell) return;
    this.cell = cell;
    this.mark.setAttribute("visibility", cell ? "visible" : "hidden");
    if (!cell) {
      this.onToken(null);
      return;
    }
    const { merge_size: merge } = this.layout;
    this.mark.setAttribute("y", cell[0] * merge);
    this.mark.setAttribute("x", cell[1] * merge);
    const [rows, columns] = this.#size;
    this.onToken(`Token ${cell[0] * columns + cell[1] + 1} of ${rows * columns}: row ${cell[0] + 1}, column ${cell[1] + 1}`);
  }
}
