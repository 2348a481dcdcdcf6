/**
 * One image of the grid.
 *
 * @import { Item } from "./api.js"
 * @import { Store } from "./store.js"
 */
import { element } from "./dom.js";
import { UNLABELED, fileName, percent } from "./format.js";

/** @param {Store} store @param {Item} item @param {number} k - its place on the page */
export function makeTile(store, item, k) {
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
export function markTile(store, tile, item, { isCursor, isAnswered }) {
  const label = store.labelOf(item.id, item.label);
  const guess = predictionOf(store, item);
  tile.setAttribute("aria-selected", String(store.selection.has(item.id)));
  tile.tabIndex = isCursor ? 0 : -1;
  tile.classList.toggle("cursor", isCursor);
  tile.classList.toggle("answered", isAnswered);
  write(tile, ".badge", "labeled ", label === UNLABELED ? "" : store.nameOf(label), store.colorOf(label));
  write(tile, ".guess", "predicted ", guess.text, store.colorOf(guess.code));
}

/**
 * @param {HTMLElement} tile @param {string} part
 * @param {string} spoken - for screen readers, before the text
 * @param {string} text @param {string} color
 */
function write(tile, part, spoken, text, color) {
  const node = tile.querySelector(part);
  if (!(node instanceof HTMLElement)) return;
  node.replaceChildren(element("span", { className: "spoken" }, spoken), text);
  node.hidden = !text;
  node.style.setProperty("--color", color);
}

/** @param {Store} store @param {Item} item */
function predictionOf(store, item) {
  const { columns } = store;
  const code = columns?.predicted[item.id] ?? item.predicted;
  const confidence = columns ? columns.confidence[item.id] / 255 : item.confidence;
  return { code, text: code === UNLABELED ? "" : `${store.nameOf(code)} ${percent(confidence)}` };
}
