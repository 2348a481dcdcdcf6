/**
 * The grid: one page of images at a time, with a cursor that the keys move and a selection.
 *
 * @import { Api, Item } from "./api.js"
 * @import { Store } from "./store.js"
 */
import { Away, Refused } from "./api.js";
import { element, find, setText } from "./dom.js";
import { PAGE, describe, queryOf } from "./filters.js";
import { UNLABELED, count, fileName, percent } from "./format.js";
import { attempt, say } from "./messages.js";
import { auditText } from "./panel.js";
import { nextOpen } from "./queue.js";

const MOST_PER_REQUEST = 500;
const MOST_SELECTED = 20_000; // by "select all": beyond it, the lasso is faster

export class Grid {
  /** @param {Api} api @param {Store} store @param {(id: number) => void} open - shows an image in detail */
  constructor(api, store, open) {
    this.api = api;
    this.store = store;
    this.open = open;
    this.box = find("grid", HTMLElement);
    /** @type {Item[]} */
    this.items = [];
    /** @type {Map<number, HTMLElement>} */
    this.tiles = new Map();
    /** @type {Set<number>} - answered since the page was fetched */
    this.answered = new Set();
    this.total = 0;
    this.offset = 0;
    this.cursor = 0;
    this.anchor = 0; // where a range of shift-clicks starts
    this.isLoading = false;
    this.isDone = false;
    this.asked = 0; // the number of the last request: a late answer to an earlier one is dropped
    this.listen();
  }

  listen() {
    this.box.addEventListener("click", (event) => this.onClick(event));
    this.box.addEventListener("dblclick", (event) => {
      const k = this.indexAt(event.target);
      if (k !== null) this.open(this.items[k].id);
    });
    find("page-before", HTMLButtonElement).addEventListener("click", () => this.turn(-1));
    find("page-after", HTMLButtonElement).addEventListener("click", () => this.turn(1));
    find("select-page", HTMLButtonElement).addEventListener("click", () => this.selectPage());
    find("open-current", HTMLButtonElement).addEventListener(
      "click",
      () => this.current && this.open(this.current.id),
    );
    find("select-all", HTMLButtonElement).addEventListener("click", () => attempt(() => this.selectAll()));
    this.store.on(["filter", "session"], () => this.start());
    this.store.on(["labels", "selection", "columns", "theme"], () => this.mark());
  }

  /**
   * The image at the cursor. None while a page is on its way, when a key would hit an image not seen yet, nor
   * when all are answered, when it would hit the last one again.
   *
   * @returns {Item | null}
   */
  get current() {
    return this.isLoading || this.isDone ? null : (this.items[this.cursor] ?? null);
  }

  /** Whether the grid is on the screen, and not the map alone or another tab. */
  get isShown() {
    return this.box.checkVisibility();
  }

  /** Whether the middle of the image at the cursor is in sight. */
  get isCursorSeen() {
    const item = this.items[this.cursor];
    const tile = item && this.tiles.get(item.id)?.getBoundingClientRect();
    if (!tile || !this.isShown) return false;
    const box = this.box.getBoundingClientRect();
    const middle = (tile.top + tile.bottom) / 2;
    return middle > box.top && middle < box.bottom;
  }

  /** The first images of another choice. */
  async start() {
    await this.load(0);
    this.box.scrollTop = 0;
  }

  /** @param {number} offset @returns {Promise<void>} */
  async load(offset) {
    const asked = ++this.asked;
    this.setLoading(true);
    try {
      const page = await this.api.images(queryOf(this.store.filter, offset, PAGE));
      if (asked !== this.asked) return;
      if (!page.items.length && offset > 0) return await this.load(Math.max(0, offset - PAGE));
      this.setLoading(false);
      this.take(page.items, page.total, offset);
    } catch (error) {
      if (error instanceof Refused) say(error.message, "error");
      else if (!(error instanceof Away)) throw error;
    } finally {
      if (asked === this.asked) this.setLoading(false);
    }
  }

  /** @param {boolean} on */
  setLoading(on) {
    this.isLoading = on;
    this.box.setAttribute("aria-busy", String(on));
  }

  /** @param {Item[]} items @param {number} total @param {number} offset */
  take(items, total, offset) {
    const hadFocus = this.box.contains(document.activeElement);
    Object.assign(this, { items, total, offset, answered: new Set(), isDone: false });
    for (const item of items) this.store.names.set(item.id, item.name);
    this.cursor = Math.max(0, nextOpen(this, 0) ?? 0);
    this.anchor = this.cursor;
    this.draw();
    if (hadFocus) this.focusCursor();
    this.prefetch();
  }

  draw() {
    this.tiles = new Map(this.items.map((item, k) => [item.id, makeTile(this.store, item, k)]));
    this.box.replaceChildren(...this.tiles.values());
    if (!this.items.length) this.box.append(element("p", { className: "empty" }, this.emptyText()));
    const last = this.offset + this.items.length;
    const where = this.total ? `${count(this.offset + 1)}–${count(last)} of ${count(this.total)}` : "none";
    setText("page-where", where);
    setText("grid-title", describe(this.store.filter, this.store.classes));
    find("page-before", HTMLButtonElement).disabled = this.offset === 0;
    find("page-after", HTMLButtonElement).disabled = last >= this.total;
    find("select-page", HTMLButtonElement).disabled = !this.items.length;
    this.mark();
  }

  emptyText() {
    const { filter, state } = this.store;
    if (state?.job?.kind === "features")
      return "The images appear here once their features have been computed.";
    if (filter.view === "suggested" && state?.job?.kind === "refit")
      return "The refit that is running brings new suggestions.";
    if (filter.view === "suggested") return "No suggestions now: refit, or choose another view.";
    const audit = state?.panel.audit;
    if (filter.view === "audit" && audit) return auditText(audit);
    if (filter.view === "audit") return "No audit is running: start one in the panel.";
    return "No image matches these filters.";
  }

  /** Draws what changes without a new page: labels, predictions, cursor and selection. */
  mark() {
    for (const [k, item] of this.items.entries()) {
      const tile = this.tiles.get(item.id);
      const marks = { isCursor: k === this.cursor, isAnswered: this.answered.has(item.id) };
      if (tile) markTile(this.store, tile, item, marks);
    }
    const all = find("select-all", HTMLButtonElement);
    const isPage = this.items.length > 0 && this.items.every((item) => this.store.selection.has(item.id));
    const isMore = this.total > this.items.length && this.store.selection.size < this.total;
    all.hidden = !(isPage && isMore && this.total <= MOST_SELECTED);
    all.textContent = `Select all ${count(this.total)}`;
  }

  /** @param {EventTarget | null} target @returns {number | null} */
  indexAt(target) {
    const tile = target instanceof Element ? target.closest(".tile") : null;
    return tile ? Number(tile.id.slice("tile-".length)) : null;
  }

  /** @param {MouseEvent} event */
  onClick(event) {
    const k = this.indexAt(event.target);
    if (k === null) return;
    if (event.shiftKey) {
      const [from, to] = [Math.min(this.anchor, k), Math.max(this.anchor, k)];
      this.store.select([...this.store.selection, ...this.items.slice(from, to + 1).map((item) => item.id)]);
    } else if (event.ctrlKey || event.metaKey) {
      this.store.toggle(this.items[k].id);
    } else {
      const only = this.store.selection.size === 1 && this.store.selection.has(this.items[k].id);
      this.store.select(only ? [] : [this.items[k].id]);
    }
    if (!event.shiftKey) this.anchor = k;
    this.moveTo(k);
  }

  selectPage() {
    const ids = this.items.map((item) => item.id);
    const all = ids.length > 0 && ids.every((id) => this.store.selection.has(id));
    this.store.select(all ? [] : ids);
  }

  /** Selects every image that the filter keeps, on all pages. */
  async selectAll() {
    const { asked } = this;
    const ids = [];
    for (let offset = 0; offset < this.total; offset += MOST_PER_REQUEST) {
      const page = await this.api.images(queryOf(this.store.filter, offset, MOST_PER_REQUEST));
      for (const item of page.items) ids.push(item.id);
    }
    if (asked === this.asked) this.store.select(ids);
  }

  /** @param {number} k */
  moveTo(k) {
    if (!this.items.length) return;
    this.isDone = false;
    this.cursor = Math.min(this.items.length - 1, Math.max(0, k));
    this.mark();
    this.focusCursor();
  }

  /** @param {FocusOptions} [options] */
  focusCursor(options) {
    const item = this.items[this.cursor];
    if (item && !document.querySelector("dialog[open]")) this.tiles.get(item.id)?.focus(options);
  }

  /** How many tiles a row has. */
  get across() {
    const tops = [...this.tiles.values()].map((tile) => tile.offsetTop);
    const next = tops.findIndex((top) => top > tops[0]);
    return next < 0 ? Math.max(1, tops.length) : next;
  }

  /** Acts on a key that moves in the grid; false if it is none. @param {string} key */
  onKey(key) {
    const last = this.items.length - 1;
    /** @type {Record<string, () => void>} */
    const moves = {
      ArrowRight: () => this.moveTo(this.cursor + 1),
      ArrowLeft: () => this.moveTo(this.cursor - 1),
      ArrowDown: () => this.moveTo(this.cursor + this.across),
      ArrowUp: () => this.moveTo(this.cursor - this.across),
      Home: () => this.moveTo(0),
      End: () => this.moveTo(last),
      PageDown: () => this.turn(1),
      PageUp: () => this.turn(-1),
      " ": () => this.current && this.store.toggle(this.current.id),
    };
    moves[key]?.();
    return key in moves;
  }

  /** @param {number} pages */
  async turn(pages) {
    const offset = this.offset + pages * PAGE;
    if (offset < 0 || offset >= this.total) return;
    await this.load(offset);
    this.box.scrollTop = 0;
  }

  /** Thumbnails of the next page, so that turning is instant. */
  async prefetch() {
    const { asked } = this;
    if (this.offset + PAGE >= this.total) return;
    await new Promise((done) => setTimeout(done, 600));
    if (asked !== this.asked) return;
    try {
      const page = await this.api.images(queryOf(this.store.filter, this.offset + PAGE, PAGE));
      if (asked !== this.asked) return;
      for (const item of page.items) new Image().src = this.store.imageUrl(item.id, "thumbnail");
    } catch (error) {
      if (!(error instanceof Away || error instanceof Refused)) throw error;
    }
  }
}

// One image of the grid

/** @param {Store} store @param {Item} item @param {number} k - its place on the page */
function makeTile(store, item, k) {
  const image = element("img", { alt: "", loading: "lazy", decoding: "async", draggable: false });
  const gone = element("span", { className: "gone" }, "file not readable");
  image.addEventListener("error", () => image.replaceWith(gone));
  image.src = store.imageUrl(item.id, "thumbnail");
  const title = item.note ? `${item.name}\n${item.note}` : item.name;
  return element(
    "div",
    { role: "option", className: "tile", id: `tile-${k}`, title },
    element("span", { className: "thumb" }, image, element("span", { className: "badge" })),
    element("span", { className: "file" }, fileName(item.name)),
    element("span", { className: "guess" }),
    item.note ? element("span", { className: "note" }, item.note) : null,
  );
}

/**
 * Shows what changes while the page stays: label, prediction, cursor and selection.
 *
 * @param {Store} store @param {HTMLElement} tile @param {Item} item
 * @param {{isCursor: boolean, isAnswered: boolean}} marks
 */
function markTile(store, tile, item, { isCursor, isAnswered }) {
  const label = store.labelOf(item.id, item.label);
  const guess = predictionOf(store, item);
  tile.setAttribute("aria-selected", String(store.selection.has(item.id)));
  tile.tabIndex = isCursor ? 0 : -1;
  tile.classList.toggle("cursor", isCursor);
  tile.classList.toggle("answered", isAnswered);
  write(tile, ".badge", "labeled ", label === UNLABELED ? "" : store.nameOf(label), store.colorOf(label));
  write(
    tile,
    ".guess",
    "predicted ",
    store.showsPredictions ? guess.name : "",
    store.colorOf(guess.code),
    guess.share,
  );
}

/**
 * @param {HTMLElement} tile @param {string} part
 * @param {string} spoken - for screen readers, before the text
 * @param {string} name @param {string} color
 * @param {string} [share] - stays whole where a long name is cut
 */
function write(tile, part, spoken, name, color, share = "") {
  const node = tile.querySelector(part);
  if (!(node instanceof HTMLElement)) return;
  node.replaceChildren(
    element("span", { className: "spoken" }, spoken),
    element("span", { className: "name" }, name),
    share && element("span", {}, ` ${share}`),
  );
  node.hidden = !name;
  node.style.setProperty("--color", color);
}

/** @param {Store} store @param {Item} item */
function predictionOf(store, item) {
  const { columns } = store;
  const code = columns?.predicted[item.id] ?? item.predicted;
  const confidence = columns ? columns.confidence[item.id] / 255 : item.confidence;
  return { code, name: code === UNLABELED ? "" : store.nameOf(code), share: percent(confidence) };
}
