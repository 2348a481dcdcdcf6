/** The keyboard: which key does what. */
import { element, find } from "./dom.js";

/** @type {[string, string][]} */
const KEY_HELP = [
  ["1 … 9, 0", "label as one of the first ten classes"],
  ["c", "choose a class by name, or make a new one"],
  ["o", "out-of-class: none of my classes"],
  ["s", "skip"],
  ["Backspace", "remove the label"],
  ["z", "undo"],
  ["y", "the label is right (suspected label errors)"],
  ["Enter", "open the image; in suspected label errors: take the suggested class"],
  ["v", "open the image, in every view"],
  ["m", "more like this: the most similar images first"],
  ["Arrows", "move in the grid or on the map"],
  ["Page Up, Page Down", "turn the page"],
  ["Space", "select or deselect"],
  ["a", "select the page"],
  ["+, −, Home", "zoom the map, show all of it"],
  ["l", "lasso on the map"],
  ["d", "density contours on the map"],
  ["r", "refit"],
  ["/", "filter by file name"],
  ["Esc", "close, or clear the selection"],
  ["?", "this list"],
];

const TYPED = new Set(["text", "search", "number", "email", "url", "password", "tel"]);

/**
 * Whether a key pressed in this element belongs to the element.
 *
 * @param {{tagName: string, type?: string}} target @param {string} key
 */
export function isTyping(target, key) {
  const tag = target.tagName.toLowerCase();
  if (tag === "textarea" || tag === "select") return true;
  if (tag === "input" && TYPED.has(target.type ?? "text")) return true;
  if (tag === "input")
    return key === " " || key === "Enter" || key.startsWith("Arrow") || key === "Home" || key === "End";
  return (tag === "button" || tag === "a" || tag === "summary") && (key === " " || key === "Enter");
}

/** The position of the class that a digit stands for, or null. @param {string} key */
export function positionOf(key) {
  return /^[0-9]$/.test(key) ? (Number(key) + 9) % 10 : null;
}

export function openKeys() {
  const list = find("keys-list", HTMLElement);
  if (!list.children.length) {
    list.append(
      ...KEY_HELP.flatMap(([keys, text]) => [
        element("dt", {}, element("kbd", {}, keys)),
        element("dd", {}, text),
      ]),
    );
  }
  find("keys", HTMLDialogElement).showModal();
}
