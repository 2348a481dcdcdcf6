/**
 * Thumbnails on the map, once so few images are in view that there is room for them.
 *
 * @import { PointIndex, Size, View } from "./geometry.js"
 * @import { Store } from "./store.js"
 * @typedef {{id: number, x: number, y: number}} Shown - the center in pixels
 */
import { toPixels, toPosition } from "./geometry.js";

const SIDE = 44; // pixels of a thumbnail with its frame
const MOST_IN_VIEW = 600; // images; more are points only
const KEPT = 400; // thumbnails in memory

/**
 * Which images have room for a thumbnail: one in each square of the window, those that come first.
 *
 * @param {PointIndex} index @param {View} view @param {Size} size @param {(i: number) => boolean} wanted
 * @returns {Shown[]}
 */
export function roomFor(index, view, size, wanted) {
  const [left, top] = toPosition(view, size, 0, 0);
  const [right, bottom] = toPosition(view, size, size.width, size.height);
  const inView = index.within({ left, right, top, bottom }, MOST_IN_VIEW);
  const taken = new Set();
  /** @type {Shown[]} */
  const found = [];
  for (const id of inView ?? []) {
    if (!wanted(id)) continue;
    const [x, y] = toPixels(view, size, index.xs[id], index.ys[id]);
    const [column, row] = [Math.round(x / SIDE), Math.round(y / SIDE)];
    const square = `${column} ${row}`;
    if (taken.has(square)) continue;
    taken.add(square);
    found.push({ id, x: column * SIDE, y: row * SIDE });
  }
  return found;
}

export class MapThumbnails {
  /** @param {Store} store @param {() => void} redraw - when one has come */
  constructor(store, redraw) {
    this.store = store;
    this.redraw = redraw;
    /** @type {Map<string, HTMLImageElement>} - by address, the last used last */
    this.images = new Map();
    /** @type {Shown[]} */
    this.shown = [];
  }

  /**
   * @param {CanvasRenderingContext2D} context - in CSS pixels
   * @param {Shown[]} shown @param {(id: number) => string} colorOf - of the frame
   */
  draw(context, shown, colorOf) {
    this.shown = shown;
    context.lineWidth = 2;
    for (const { id, x, y } of shown) {
      const image = this.imageOf(id);
      if (!image.complete || !image.naturalWidth) continue;
      const scale = (SIDE - 4) / Math.max(image.naturalWidth, image.naturalHeight);
      const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
      context.drawImage(image, x - width / 2, y - height / 2, width, height);
      context.strokeStyle = colorOf(id);
      context.strokeRect(x - width / 2, y - height / 2, width, height);
    }
    for (const address of [...this.images.keys()].slice(0, Math.max(0, this.images.size - KEPT)))
      this.images.delete(address);
  }

  /** @param {number} id */
  imageOf(id) {
    const address = this.store.imageUrl(id, "thumbnail");
    const known = this.images.get(address);
    const image = known ?? new Image();
    if (!known) {
      image.addEventListener("load", this.redraw);
      image.src = address;
    }
    this.images.delete(address);
    this.images.set(address, image);
    return image;
  }

  /** The image whose thumbnail is at a pixel. @param {number} px @param {number} py @returns {number | null} */
  at(px, py) {
    const half = SIDE / 2;
    return this.shown.find(({ x, y }) => Math.abs(x - px) < half && Math.abs(y - py) < half)?.id ?? null;
  }
}
