/**
 * The class picker: type a part of a name, Enter labels; a name that no class has makes a new class.
 *
 * @import { Store } from "./store.js"
 * @import { Labeling } from "./labeling.js"
 */
import { element, find, setText } from "./dom.js";
import { OUT_OF_CLASS, plural } from "./format.js";

/** @typedef {{id: number, name: string, isNew: boolean}} Choice */

/**
 * The classes whose name has the text, those that start with it first; then a new class of that name.
 *
 * @param {string} text @param {{id: number, name: string}[]} classes @returns {Choice[]}
 */
export function choicesOf(text, classes) {
  const wanted = text.trim().toLowerCase();
  const all = [...classes, { id: OUT_OF_CLASS, name: "out-of-class" }];
  const at = (/** @type {{name: string}} */ c) => c.name.toLowerCase().indexOf(wanted);
  const found = all.filter((c) => at(c) >= 0).sort((a, b) => Math.min(1, at(a)) - Math.min(1, at(b)));
  const exact = all.some((c) => c.name.toLowerCase() === wanted);
  const choices = found.map(({ id, name }) => ({ id, name, isNew: false }));
  return wanted && !exact ? [...choices, { id: -1, name: text.trim(), isNew: true }] : choices;
}

export class Picker {
  /** @param {Store} store @param {Labeling} labeling */
  constructor(store, labeling) {
    this.store = store;
    this.labeling = labeling;
    this.dialog = find("picker", HTMLDialogElement);
    this.input = find("picker-text", HTMLInputElement);
    this.list = find("picker-list", HTMLElement);
    /** @type {Choice[]} */
    this.choices = [];
    this.active = 0;
    this.input.addEventListener("input", () => this.update(0));
    this.input.addEventListener("keydown", (event) => this.onKey(event));
  }

  open() {
    const n = this.labeling.targets.length;
    if (this.labeling.isRefused(this.labeling.targets)) return;
    setText("picker-title", `Label ${plural(n, "image")} as`);
    this.input.value = "";
    this.update(0);
    this.dialog.showModal();
    this.input.focus();
  }

  /** @param {number} active */
  update(active) {
    this.choices = choicesOf(this.input.value, this.store.classes);
    this.active = Math.min(Math.max(0, active), Math.max(0, this.choices.length - 1));
    this.list.replaceChildren(...this.choices.map((choice, k) => this.row(choice, k)));
    this.input.setAttribute("aria-activedescendant", this.choices.length ? `choice-${this.active}` : "");
    this.list.children[this.active]?.scrollIntoView({ block: "nearest" });
  }

  /** @param {Choice} choice @param {number} k */
  row(choice, k) {
    const color = choice.isNew ? "transparent" : this.store.colorOf(choice.id);
    const name = choice.isNew ? `New class “${choice.name}”` : choice.name;
    return element(
      "li",
      {
        role: "option",
        id: `choice-${k}`,
        color,
        "aria-selected": String(k === this.active),
        on: { click: () => this.take(choice) },
      },
      element("span", { className: "dot" }),
      name,
    );
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    if (event.key === "ArrowDown") this.update(this.active + 1);
    else if (event.key === "ArrowUp") this.update(this.active - 1);
    else if (event.key === "Enter" && this.choices.length) this.take(this.choices[this.active]);
    else return;
    event.preventDefault();
  }

  /** @param {Choice} choice */
  take(choice) {
    this.dialog.close();
    if (choice.isNew) this.labeling.addClass(choice.name, this.labeling.targets);
    else this.labeling.label(choice.id);
  }
}
