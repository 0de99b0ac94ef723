// An answer's text as tokens, shaded by their uncertainty, with probabilities and alternatives for the chosen token.

import { byId, el, say, show } from "./dom.js";
import { percent } from "./format.js";

const VISIBLE = { "\n": "↵", "\t": "⇥", " ": "␣" };

/** A token's text with blanks made visible. */
export const visible = (text) => text.replace(/[\n\t ]/g, (sign) => VISIBLE[sign]);

/** Shows one text. Pointer, focus and arrow keys choose a token. */
export class TokenText {
  #decoder = new TextDecoder();
  #pending = [];
  #held = [];
  #placed = 0;
  #chosen = null;

  constructor(box) {
    this.box = box;
    this.text = "";
    this.spans = [];
    box.addEventListener("pointerover", (event) => this.#choose(event.target.closest?.(".token")));
    // Lifting a finger also fires pointerleave: a token that was tapped stays chosen until something else is touched.
    box.addEventListener("pointerleave", (event) => event.pointerType === "touch" || this.#choose(null));
    document.addEventListener("pointerdown", (event) => box.contains(event.target) || this.#choose(null));
    box.addEventListener("blur", () => this.#choose(null));
    box.addEventListener("keydown", (event) => this.#key(event));
  }

  clear() {
    this.#choose(null);
    this.box.replaceChildren();
    this.box.removeAttribute("tabindex");
    this.#decoder = new TextDecoder();
    Object.assign(this, { text: "", spans: [] });
    this.#pending = [];
    this.#held = [];
    this.#placed = 0;
  }

  /** Adds text, and the tokens that it consists of, if they are known. Text may arrive after its tokens. */
  add(text, tokens) {
    this.text += text;
    if (!tokens.length && !this.spans.length && !this.#pending.length) {
      this.#plain(text);
      return;
    }
    for (const token of tokens) {
      const bytes = token.bytes ? new Uint8Array(token.bytes) : new Uint8Array();
      this.#held.push(token);
      const piece = this.#decoder.decode(bytes, { stream: true });
      if (piece === "" && bytes.length) continue; // the token ends within a character, which the next one completes
      this.#pending.push({ tokens: this.#held, piece });
      this.#held = [];
    }
    this.#place(false);
  }

  /** Called when the answer has ended; text that no token matches is shown as it is. */
  end() {
    this.#place(true);
    this.#plain(this.text.slice(this.#placed));
    if (this.spans.length) {
      this.box.tabIndex = 0;
      this.box.setAttribute("role", "group");
      this.box.setAttribute("aria-label", "Answer. Left and right arrow keys go through its tokens.");
    }
  }

  #place(ended) {
    while (this.#pending.length) {
      const { tokens, piece } = this.#pending[0];
      const rest = this.text.slice(this.#placed, this.#placed + piece.length);
      if (rest === piece && piece !== "") this.#placed += piece.length;
      else if (!ended && piece !== "" && piece.startsWith(rest)) return; // its text has not arrived yet
      this.#pending.shift();
      this.#span(tokens, piece, rest !== piece || piece === "");
    }
  }

  #plain(text) {
    if (text) this.box.append(text);
    this.#placed = this.text.length;
  }

  /** `outside`: whether the token is not part of the text, such as an end token or the end of a stop string. */
  #span(tokens, piece, outside) {
    const last = tokens[tokens.length - 1];
    const probability = Math.exp(tokens.reduce((sum, token) => sum + token.logprob, 0));
    const span = el("span", { className: outside ? "token outside" : "token" }, outside ? visible(last.token) : piece);
    span.style.setProperty("--unsure", `${Math.round((1 - probability) * 50)}%`);
    this.spans.push(Object.assign(span, { info: last, probability: Math.exp(last.logprob) }));
    this.box.append(span);
  }

  #key(event) {
    const at = this.spans.indexOf(this.#chosen);
    const last = this.spans.length - 1;
    const to = {
      ArrowRight: Math.min(last, at + 1), ArrowLeft: Math.max(0, at - 1), Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape" && this.#chosen) {
      event.stopPropagation();
      this.#choose(null);
    } else if (to !== undefined && this.spans.length) {
      event.preventDefault();
      this.#choose(this.spans[to], true);
    }
  }

  #choose(span, spoken = false) {
    if (span === this.#chosen) return;
    this.#chosen?.classList.remove("chosen");
    this.#chosen = span ?? null;
    const card = byId("token-card");
    show(card, span);
    if (!span) return;
    span.classList.add("chosen");
    card.replaceChildren(...details(span));
    place(card, span);
    if (spoken) say(`${visible(span.info.token)}, ${percent(span.probability)}`);
  }
}

function details({ info, probability }) {
  const others = info.top_logprobs ?? [];
  const rank = others.findIndex((other) => other.token === info.token && other.logprob === info.logprob);
  const title = el(
    "p",
    { className: "token-title" },
    el("code", {}, visible(info.token)),
    el("span", {}, rank > 0 || (rank < 0 && others.length) ? `${percent(probability)}, not the likeliest` : percent(probability)),
  );
  const rows = others.map((other, index) => {
    const bar = el("i");
    bar.style.setProperty("--part", String(Math.exp(other.logprob)));
    return el(
      "li",
      { className: index === rank ? "own" : "" },
      el("code", {}, visible(other.token)), bar, el("span", {}, percent(Math.exp(other.logprob))),
    );
  });
  return rows.length ? [title, el("ol", {}, ...rows)] : [title];
}

/** Places the card inside the window, below the token or, if there is no space, above it. */
function place(card, span) {
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const [width, height] = [card.offsetWidth, card.offsetHeight];
  const left = Math.max(8, Math.min(box.left, document.body.clientWidth - width - 8));
  const below = box.bottom + 8;
  const top = below + height > innerHeight - 8 ? Math.max(8, box.top - height - 8) : below;
  card.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}
