/**
 * One image at a time: large, with its probabilities and the labeled images nearest to it.
 *
 * @import { Api, Detail } from "./api.js"
 * @import { Store } from "./store.js"
 * @import { Grid } from "./grid.js"
 */
import { Away, Refused } from "./api.js";
import { button, element, find, setText } from "./dom.js";
import { fileName, percent } from "./format.js";
import { say } from "./messages.js";

export class DetailView {
  /** @param {Api} api @param {Store} store */
  constructor(api, store) {
    this.api = api;
    this.store = store;
    this.dialog = find("detail", HTMLDialogElement);
    this.facts = find("detail-facts", HTMLElement);
    /** @type {number | null} - the image shown, null while closed */
    this.id = null;
    /** @type {Detail | null} */
    this.detail = null;
    /** @type {Grid | null} */
    this.grid = null;
    this.dialog.addEventListener("close", () => this.onClose());
    find("detail-close", HTMLButtonElement).addEventListener("click", () => this.close());
    find("detail-before", HTMLButtonElement).addEventListener("click", () => this.step(-1));
    find("detail-after", HTMLButtonElement).addEventListener("click", () => this.step(1));
    store.on(["labels", "columns", "theme"], () => this.detail && this.drawFacts(this.detail));
    store.on(["session"], () => this.close());
  }

  /** @param {number} id */
  async show(id) {
    this.id = id;
    this.detail = null;
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.focus(); // not the first button: its ring would draw the eye
    setText("detail-name", fileName(this.store.names.get(id) ?? "…"));
    const image = element("img", {
      alt: this.store.names.get(id) ?? "the image",
      src: this.store.imageUrl(id, "full"),
    });
    const gone = element("p", { className: "empty" }, "The file cannot be read.");
    image.addEventListener("error", () => image.replaceWith(gone));
    find("detail-image", HTMLElement).replaceChildren(image);
    this.facts.replaceChildren();
    try {
      const detail = await this.api.image(id);
      if (this.id !== id) return;
      this.detail = detail;
      this.store.names.set(id, detail.name);
      setText("detail-name", fileName(detail.name));
      image.alt = detail.name;
      this.drawFacts(detail);
      this.prefetch();
    } catch (error) {
      if (error instanceof Refused) say(error.message, "error");
      else if (!(error instanceof Away)) throw error;
    }
  }

  /** The next image, so that it is there when it is asked for. */
  prefetch() {
    const at = this.grid?.items.findIndex((item) => item.id === this.id) ?? -1;
    const next = this.grid?.items[at + 1];
    if (at >= 0 && next) new Image().src = this.store.imageUrl(next.id, "full");
  }

  close() {
    this.dialog.close();
  }

  onClose() {
    this.id = null;
    this.detail = null;
    this.grid?.focusCursor();
  }

  /** @param {number} id */
  showLike(id) {
    this.close();
    this.store.showLike(id);
  }

  /** @param {number} by */
  step(by) {
    const { grid } = this;
    const at = grid ? grid.items.findIndex((item) => item.id === this.id) : -1;
    const next = grid?.items[at + by];
    if (!grid || at < 0 || !next) return;
    grid.moveTo(at + by);
    this.show(next.id);
  }

  /** @param {Detail} detail */
  drawFacts(detail) {
    const { store } = this;
    const label = store.labelOf(detail.id, detail.label);
    const chip = element("span", { className: "chip", color: store.colorOf(label) }, store.nameOf(label));
    this.facts.replaceChildren(
      element("p", { className: "path" }, `${detail.name} (${detail.width} × ${detail.height})`),
      element("p", {}, "Label: ", chip),
      button("More like this", () => this.showLike(detail.id), { title: "The most similar first (m)" }),
      ...(detail.note && store.showsPredictions ? [element("p", { className: "note" }, detail.note)] : []),
      ...(detail.probs.length && store.showsPredictions ? this.bars(detail) : []),
      ...(detail.nearest.length && store.showsPredictions ? this.nearest(detail) : []),
    );
  }

  /** @param {Detail} detail */
  bars(detail) {
    const bar = (/** @type {string} */ name, /** @type {number} */ p, /** @type {string} */ color) =>
      element(
        "li",
        { color },
        element("span", { className: "name" }, name),
        element("meter", { min: 0, max: 1, value: p, "aria-label": name }),
        element("span", { className: "value" }, percent(p)),
      );
    return [
      element("h3", {}, "Prediction"),
      element(
        "ul",
        { className: "bars" },
        ...detail.probs.map((c) => bar(c.name, c.p, this.store.colorOf(c.id))),
      ),
      element("ul", { className: "bars" }, bar("in-domain", detail.in_domain, "var(--dim)")),
    ];
  }

  /** @param {Detail} detail */
  nearest(detail) {
    const one = (/** @type {Detail["nearest"][number]} */ other) => {
      const label = this.store.labelOf(other.id, other.label);
      const image = element("img", { alt: "", src: this.store.imageUrl(other.id, "thumbnail") });
      const text = `${this.store.nameOf(label)} ${percent(other.similarity)}`;
      const open = button("", () => this.show(other.id), {
        className: "near",
        title: other.name,
        color: this.store.colorOf(label),
      });
      open.append(image, element("span", {}, text));
      return open;
    };
    return [
      element("h3", {}, "Nearest labeled images"),
      element("div", { className: "nearest" }, ...detail.nearest.map(one)),
    ];
  }
}
