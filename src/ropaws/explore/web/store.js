/**
 * What the page knows. Parts of the page listen for the events below and draw themselves anew.
 *
 * @import { State } from "./api.js"
 * @import { Columns, Version } from "./columns.js"
 * @import { Filter } from "./filters.js"
 * @typedef {"state" | "columns" | "labels" | "selection" | "filter" | "theme" | "session" | "layout"
 *   | "arrival"} StoreEvent
 *   - columns: positions or predictions have changed; session: image numbers have a new meaning; layout: other parts of the page are shown
 */
import { labelColor } from "./colors.js";
import { filterOf } from "./filters.js";
import { labelName } from "./format.js";

export class Store extends EventTarget {
  constructor() {
    super();
    /** @type {State | null} */
    this.state = null;
    /** @type {Columns | null} */
    this.columns = null;
    /** @type {Version | null} - of the columns, and of own answers applied to them since */
    this.version = null;
    /** @type {Filter} */
    this.filter = filterOf("suggested");
    /** @type {Set<number>} */
    this.selection = new Set();
    /** @type {Map<number, string>} - of the images seen so far */
    this.names = new Map();
    this.arrived = 0; // share of the columns that are on their way
    this.dark = false;
    this.isBlind = false; // an audit shows no predictions
  }

  /** Whether predictions are shown now. */
  get showsPredictions() {
    return !(this.isBlind && this.filter.view === "audit");
  }

  /** @param {boolean} on */
  setBlind(on) {
    this.isBlind = on;
    this.emit("labels");
  }

  /** Columns are on their way. @param {number} share - that is here */
  setArrived(share) {
    this.arrived = share;
    this.emit("arrival");
  }

  /** @param {StoreEvent} event */
  emit(event) {
    this.dispatchEvent(new Event(event));
  }

  /** @param {StoreEvent[]} events @param {() => void} act */
  on(events, act) {
    for (const event of events) this.addEventListener(event, act);
  }

  get classes() {
    return this.state?.classes ?? [];
  }

  get readOnly() {
    return this.state?.read_only ?? false;
  }

  /** @param {number} code */
  nameOf(code) {
    return labelName(code, this.classes);
  }

  /** @param {number} code */
  colorOf(code) {
    return labelColor(code, this.classes, this.dark);
  }

  /** @param {number} id @param {number} otherwise - the label if the columns are not here yet */
  labelOf(id, otherwise = -1) {
    return this.columns?.label[id] ?? otherwise;
  }

  /** @param {Iterable<number>} ids */
  select(ids) {
    this.selection = new Set(ids);
    this.emit("selection");
  }

  /** @param {number} id */
  toggle(id) {
    if (!this.selection.delete(id)) this.selection.add(id);
    this.emit("selection");
  }

  /** @param {Partial<Filter>} change */
  setFilter(change) {
    this.filter = { ...this.filter, ...change };
    this.emit("filter");
  }

  /** Lists all images, those most like this one first. @param {number} id */
  showLike(id) {
    const like = { id, name: this.names.get(id) ?? `image ${id}` };
    this.setFilter({ ...filterOf("all"), like, sort: "suggested" });
  }

  /**
   * The address of an image; a new session may have given its number to another.
   *
   * @param {number} id
   * @param {"thumbnail" | "full"} kind
   */
  imageUrl(id, kind) {
    return `/api/images/${id}/${kind}?session=${encodeURIComponent(this.state?.session ?? "")}`;
  }
}
