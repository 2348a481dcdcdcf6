/**
 * The image under the pointer on the map.
 *
 * @import { Api } from "./api.js"
 * @import { Store } from "./store.js"
 */
import { Away, Refused } from "./api.js";
import { element, find } from "./dom.js";
import { UNLABELED, fileName, percent } from "./format.js";

const WIDTH = 180;
const HEIGHT = 220;

export class Tooltip {
  /** @param {Api} api @param {Store} store */
  constructor(api, store) {
    this.api = api;
    this.store = store;
    this.box = find("tooltip", HTMLElement);
    /** @type {number | null} */
    this.shown = null;
  }

  hide() {
    this.shown = null;
    this.box.hidden = true;
  }

  /** @param {number} id @param {number} x - in the window @param {number} y */
  show(id, x, y) {
    this.shown = id;
    const name = element("strong", {}, fileName(this.store.names.get(id) ?? "…"));
    const image = element("img", { alt: "", src: this.store.imageUrl(id, "thumbnail") });
    image.addEventListener("error", () => image.remove());
    this.box.replaceChildren(image, name, ...this.facts(id).map((text) => element("span", {}, text)));
    const left = x + 14 + WIDTH > window.innerWidth ? x - 14 - WIDTH : x + 14;
    this.box.style.setProperty("left", `${Math.max(4, left)}px`);
    this.box.style.setProperty("top", `${Math.max(4, Math.min(y + 14, window.innerHeight - HEIGHT))}px`);
    this.box.hidden = false;
    setTimeout(() => this.fetchName(id, name), 80);
  }

  /** @param {number} id @returns {string[]} */
  facts(id) {
    const { columns } = this.store;
    if (!columns) return [];
    const facts = [];
    if (columns.label[id] !== UNLABELED) facts.push(`label: ${this.store.nameOf(columns.label[id])}`);
    if (columns.predicted[id] !== UNLABELED && this.store.showsPredictions) {
      facts.push(
        `predicted: ${this.store.nameOf(columns.predicted[id])} ${percent(columns.confidence[id] / 255)}`,
      );
      facts.push(`in-domain: ${percent(columns.inDomain[id] / 255)}`);
    }
    if (columns.suspected[id]) facts.push("suspected label error");
    return facts;
  }

  /** @param {number} id @param {HTMLElement} into */
  async fetchName(id, into) {
    if (this.shown !== id || this.store.names.has(id)) return;
    try {
      const { items } = await this.api.images({ ids: [id], limit: 1 });
      if (!items.length) return;
      this.store.names.set(id, items[0].name);
      into.textContent = fileName(items[0].name);
    } catch (error) {
      if (!(error instanceof Away || error instanceof Refused)) throw error;
    }
  }
}
