/**
 * The views and filters on the page, kept in step with the filter in the store.
 *
 * @import { Store } from "./store.js"
 * @import { SortName, ViewName } from "./filters.js"
 * @import { Counts } from "./api.js"
 */
import { button, element, fill, find, setText } from "./dom.js";
import { SORT_NAMES, VIEW_NAMES, filterOf } from "./filters.js";
import { OUT_OF_CLASS, count } from "./format.js";

/** @type {Partial<Record<ViewName, keyof Counts>>} */
const COUNTED = {
  suggested: "suggested",
  unlabeled: "unlabeled",
  labeled: "labeled",
  "out-of-class": "outside",
  "label-errors": "suspected",
  duplicates: "duplicates",
  audit: "audit",
  skipped: "skipped",
};

export class FilterForm {
  /** @param {Store} store */
  constructor(store) {
    this.store = store;
    this.text = find("filter-text", HTMLInputElement);
    this.class = find("filter-class", HTMLSelectElement);
    this.sort = find("filter-sort", HTMLSelectElement);
    this.descending = find("filter-descending", HTMLButtonElement);
    this.ranges = {
      confidence: [find("confidence-low", HTMLInputElement), find("confidence-high", HTMLInputElement)],
      inDomain: [find("in-domain-low", HTMLInputElement), find("in-domain-high", HTMLInputElement)],
    };
    this.timer = 0;
    this.sort.replaceChildren(
      ...Object.entries(SORT_NAMES).map(([value, text]) => element("option", { value }, text)),
    );
    this.listen();
  }

  listen() {
    const { store } = this;
    find("filter-form", HTMLFormElement).addEventListener("submit", (event) => event.preventDefault());
    this.text.addEventListener("keydown", (event) => this.onTextKey(event.key));
    this.text.addEventListener("input", () => this.soon(() => store.setFilter({ text: this.text.value })));
    this.class.addEventListener("change", () =>
      store.setFilter({ class: this.class.value === "" ? null : Number(this.class.value) }),
    );
    this.sort.addEventListener("change", () =>
      store.setFilter({ sort: /** @type {SortName} */ (this.sort.value) }),
    );
    this.descending.addEventListener("click", () =>
      store.setFilter({ descending: !store.filter.descending }),
    );
    find("filter-reset", HTMLButtonElement).addEventListener("click", () =>
      store.setFilter(filterOf(store.filter.view)),
    );
    for (const name of /** @type {const} */ (["confidence", "inDomain"])) {
      for (const [k, input] of this.ranges[name].entries()) {
        input.addEventListener("input", () => this.onRange(name, k));
      }
    }
    store.on(["state", "filter"], () => this.draw());
  }

  /** Enter goes to the images that were found, Esc to those of before. @param {string} key */
  onTextKey(key) {
    if (key !== "Enter" && key !== "Escape") return;
    clearTimeout(this.timer);
    if (key === "Escape") this.text.value = "";
    this.text.blur(); // keys are those of the grid again
    if (this.text.value !== this.store.filter.text) this.store.setFilter({ text: this.text.value });
  }

  /** Waits for the end of typing or sliding. @param {() => void} act */
  soon(act) {
    clearTimeout(this.timer);
    this.timer = setTimeout(act, 250);
  }

  /**
   * @param {"confidence" | "inDomain"} name
   * @param {number} k - the slider that moves; it pushes the other
   */
  onRange(name, k) {
    const [low, high] = this.ranges[name];
    if (Number(low.value) > Number(high.value)) (k ? low : high).value = (k ? high : low).value;
    this.writeRange(name);
    this.soon(() => this.store.setFilter({ [name]: [Number(low.value) / 100, Number(high.value) / 100] }));
  }

  /** @param {"confidence" | "inDomain"} name */
  writeRange(name) {
    const [low, high] = this.ranges[name];
    setText(name === "confidence" ? "confidence-text" : "in-domain-text", `${low.value} to ${high.value}%`);
  }

  draw() {
    const { filter, classes, state } = this.store;
    fill(find("views", HTMLElement), [filter.view, filter.ids !== null, state?.counts], () =>
      /** @type {ViewName[]} */ (Object.keys(VIEW_NAMES)).map((view) => this.viewButton(view)),
    );
    fill(
      this.class,
      classes.map((c) => [c.id, c.name]),
      () => [
        element("option", { value: "" }, "any"),
        ...classes.map((c) => element("option", { value: String(c.id) }, c.name)),
        element("option", { value: String(OUT_OF_CLASS) }, "out-of-class"),
      ],
    );
    this.class.value = filter.class === null ? "" : String(filter.class);
    this.sort.value = filter.sort;
    this.descending.setAttribute("aria-pressed", String(filter.descending));
    if (document.activeElement !== this.text) this.text.value = filter.text;
    for (const name of /** @type {const} */ (["confidence", "inDomain"])) this.drawRange(name);
  }

  /** @param {"confidence" | "inDomain"} name */
  drawRange(name) {
    const inputs = this.ranges[name];
    if (inputs.some((input) => input === document.activeElement)) return;
    for (const [k, input] of inputs.entries())
      input.value = String(Math.round(100 * this.store.filter[name][k]));
    this.writeRange(name);
  }

  /** @param {ViewName} view */
  viewButton(view) {
    const { filter, state } = this.store;
    const counted = COUNTED[view];
    const show = () => {
      node.blur(); // Enter is a key of the grid again, not another click
      this.store.setFilter(filterOf(view));
    };
    const node = button("", show, {
      className: "view",
      "aria-pressed": String(filter.view === view && !filter.ids),
    });
    const n = view === "all" ? state?.images : counted && state?.counts[counted];
    node.append(
      element("span", {}, VIEW_NAMES[view]),
      element("span", { className: "value" }, n === undefined ? "" : count(n)),
    );
    return node;
  }
}
