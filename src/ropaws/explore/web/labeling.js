/**
 * What labeling does: which images are meant, what they are told, and where the cursor moves next.
 *
 * @import { Sync } from "./sync.js"
 * @import { Store } from "./store.js"
 * @import { Grid } from "./grid.js"
 * @import { DetailView } from "./detail.js"
 */
import { find } from "./dom.js";
import { SKIPPED, UNLABELED, plural } from "./format.js";
import { attempt, say } from "./messages.js";
import { advance, setAnswered, setOpenAgain, stay } from "./queue.js";

export class Labeling {
  /** @param {Store} store @param {Sync} sync @param {Grid} grid @param {DetailView} detail */
  constructor(store, sync, grid, detail) {
    this.store = store;
    this.sync = sync;
    this.grid = grid;
    this.detail = detail;
    /** @type {Promise<unknown>} - resolves when the cursor is where the last answer moves it */
    this.moved = Promise.resolve();
  }

  /**
   * The images that an answer is for: the open one, else the selection, else the one at the cursor. Only what
   * is seen: a selection is named, counted and marked wherever there are buttons to label it.
   *
   * @returns {number[]}
   */
  get targets() {
    if (this.detail.id !== null) return [this.detail.id];
    if (!find("label-bar", HTMLElement).checkVisibility()) return [];
    if (this.store.selection.size) return [...this.store.selection];
    return this.grid.current && this.grid.isCursorSeen ? [this.grid.current.id] : [];
  }

  /** @param {number[]} ids */
  why(ids) {
    const shown = new Set(this.grid.items.map((item) => item.id));
    if (this.store.filter.ids || !ids.every((id) => shown.has(id))) return "map";
    /** @type {Record<string, string>} */
    const reasons = { suggested: "suggested", audit: "audit", "label-errors": "label-error" };
    return reasons[this.store.filter.view] ?? "grid";
  }

  /** Says so if nothing can be labeled now. @param {number[]} ids */
  isRefused(ids) {
    if (this.store.readOnly) say("This page is read-only");
    else if (!this.store.columns) say("The images are not here yet");
    else if (ids.length) return false;
    else if (this.grid.isLoading) say("The images are on their way: press again");
    else if (this.grid.current && this.grid.isShown) {
      this.grid.focusCursor();
      say("The current image was out of sight: press again to label it");
    } else say("No image to label: select some first");
    return true;
  }

  /** @param {number} code - a class id, or one of the codes in format.js */
  label(code) {
    const ids = this.targets;
    if (this.isRefused(ids)) return;
    const what = ids.length === 1 ? "1 image" : plural(ids.length, "image");
    /** @type {Record<number, string>} */
    const texts = { [UNLABELED]: `${what}: label removed`, [SKIPPED]: `${what} skipped` };
    const text = texts[code] ?? `${what} labeled ${this.store.nameOf(code)}`;
    this.sync.give({ path: "/api/labels", ids, label: code, why: this.why(ids), text });
    this.after(ids, text);
  }

  /** The label of a suspected error is right. */
  confirm() {
    const ids = this.targets.filter((id) => this.store.labelOf(id) !== UNLABELED);
    if (this.isRefused(ids)) return;
    const text = `${plural(ids.length, "label")} confirmed`;
    this.sync.give({ path: "/api/confirm", ids, label: null, why: "label-error", text });
    this.after(ids, text);
  }

  /** Corrects a suspected error to the class that the other images vote for. */
  takeSuggestion() {
    const id = this.targets[0];
    const item = this.grid.items.find((other) => other.id === id);
    if (item?.suggest === undefined || item.suggest === null) say("No class is suggested for this image");
    else this.label(item.suggest);
  }

  /** @param {number[]} ids @param {string} text */
  async after(ids, text) {
    say(text);
    setAnswered(this.grid, ids);
    const isOpen = this.detail.id !== null;
    const inGrid = ids.some((id) => this.grid.items.some((item) => item.id === id));
    if (!isOpen) this.store.select([]);
    if (!inGrid) return;
    if (ids.length > 1 && stay(this.grid)) return;
    const moved = advance(this.grid, () => this.sync.sent);
    this.moved = moved;
    const next = await moved;
    if (!isOpen) return;
    if (next) this.detail.show(next.id);
    else this.detail.close();
  }

  async undo() {
    if (this.store.readOnly) return say("This page is read-only");
    await this.moved; // else it would come back to a page that is about to be left
    const { asked } = this.grid;
    this.grid.setLoading(true); // the cursor is about to return: no key hits an image meanwhile
    await attempt(async () => {
      const { text, ids } = await this.sync.undo();
      say(text);
      await setOpenAgain(this.grid, ids);
    });
    if (asked === this.grid.asked) this.grid.setLoading(false); // else a page has been, or is, on its way
  }

  /** @param {string} name @param {number[]} ids - labeled with the new class, may be empty */
  async addClass(name, ids) {
    if (this.store.readOnly) return say("This page is read-only");
    await attempt(async () => {
      await this.sync.sent;
      await this.sync.api.post(
        "/api/classes",
        ids.length ? { action: "add", name, ids } : { action: "add", name },
      );
      await this.sync.refreshAfresh();
      const text = ids.length ? `New class ${name}: ${plural(ids.length, "image")}` : `New class ${name}`;
      if (ids.length) await this.after(ids, text);
      else say(text);
    });
  }

  async refit() {
    const job = this.store.state?.job;
    if (this.store.readOnly) say("This page is read-only");
    else if (job?.kind === "refit") say(`Please wait: ${job.text}`);
    else await this.ask("/api/refit");
  }

  /** @param {string} path @param {object} [body] @param {string} [text] - said when it is done */
  async ask(path, body = {}, text = "") {
    await attempt(async () => {
      const answer = await this.sync.api.post(path, body);
      if (text || answer.text) say(answer.text ?? text);
      await this.sync.refreshAfresh();
    });
  }
}
