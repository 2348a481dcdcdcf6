/**
 * The map's canvas: all images as points, written as pixels into one buffer, then what is marked on top.
 *
 * @import { Columns } from "./columns.js"
 * @import { Size, View } from "./geometry.js"
 * @typedef {{dx: Int32Array, dy: Int32Array, reach: number}} Disc - the pixels of a disc, around its center
 */
import { BACKGROUNDS, packed } from "./colors.js";
import { toPixels } from "./geometry.js";

/**
 * @typedef {{
 *   columns: Columns, view: View, fitScale: number, colors: Uint32Array, mask: Uint8Array | null,
 *   selection: Set<number>, hovered: number | null, lasso: [number, number][], dark: boolean,
 * }} Scene - view in CSS pixels; lasso in positions
 */

/**
 * Diameter of a point in CSS pixels: small for many points, larger when zoomed in.
 *
 * @param {number} n
 * @param {number} zoom
 */
export function pointSize(n, zoom) {
  const base = n > 50_000 ? 1.5 : n > 10_000 ? 2.2 : n > 2_000 ? 3.5 : 6;
  return Math.min(12, base * Math.max(1, zoom) ** 0.4);
}

export class MapCanvas {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    const context = canvas.getContext("2d");
    if (!context) throw new Error("this browser has no 2D canvas");
    this.context = context;
    this.ratio = 1;
    /** @type {ImageData | null} */
    this.image = null;
    this.pixels = new Uint32Array();
  }

  /** In CSS pixels. @returns {{width: number, height: number}} */
  get size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  /** Fits the buffer to the element. */
  resize() {
    this.ratio = Math.min(2, window.devicePixelRatio || 1);
    this.canvas.width = Math.max(1, Math.round(this.canvas.clientWidth * this.ratio));
    this.canvas.height = Math.max(1, Math.round(this.canvas.clientHeight * this.ratio));
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /** @param {Scene} scene */
  draw(scene) {
    if (!this.image) return;
    const { columns, colors, selection, dark } = scene;
    const { ratio, pixels } = this;
    const size = { width: this.canvas.width, height: this.canvas.height };
    const view = { ...scene.view, scale: scene.view.scale * ratio };
    const points = Math.max(1, Math.round(ratio * pointSize(columns.n, scene.view.scale / scene.fitScale)));
    const paint = (
      /** @type {ArrayLike<number> | number} */ paints,
      /** @type {number} */ more,
      /** @type {number[] | null} */ which,
    ) =>
      drawPoints(
        pixels,
        size,
        view,
        columns.x,
        columns.y,
        paints,
        disc(points + Math.round(more * ratio)),
        which,
      );
    pixels.fill(0);
    paint(colors, 0, null);
    if (scene.mask)
      paint(
        colors,
        0,
        kept(columns.n, (i) => scene.mask?.[i] === 1),
      );
    const labeled = kept(columns.n, (i) => columns.label[i] !== -1 && scene.mask?.[i] !== 0);
    paint(packed(BACKGROUNDS[dark ? "dark" : "light"]), 4, labeled);
    paint(colors, 2, labeled);
    if (selection.size) {
      const selected = [...selection];
      const extra = selected.length > 300 ? 0 : 2; // many large points would hide each other
      paint(packed(dark ? "#ffffff" : "#000000"), extra + 2, selected);
      paint(colors, extra, selected);
    }
    this.context.putImageData(this.image, 0, 0);
    this.drawMarks(scene, points / ratio);
  }

  /** @param {Scene} scene @param {number} points */
  drawMarks(scene, points) {
    const { context, ratio } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.lineWidth = 2;
    context.strokeStyle = scene.dark ? "#ffffff" : "#000000";
    if (scene.hovered !== null) {
      const [x, y] = toPixels(
        scene.view,
        this.size,
        scene.columns.x[scene.hovered],
        scene.columns.y[scene.hovered],
      );
      context.beginPath();
      context.arc(x, y, points / 2 + 5, 0, 2 * Math.PI);
      context.stroke();
    }
    if (scene.lasso.length > 1) {
      context.beginPath();
      for (const [x, y] of scene.lasso) context.lineTo(...toPixels(scene.view, this.size, x, y));
      context.closePath();
      context.setLineDash([5, 4]);
      context.stroke();
      context.setLineDash([]);
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
  }
}

/** @param {number} n @param {(i: number) => boolean} wanted @returns {number[]} */
function kept(n, wanted) {
  const found = [];
  for (let i = 0; i < n; i++) if (wanted(i)) found.push(i);
  return found;
}

// Points written as pixels into a buffer. A canvas call per point would take most of a second for 100,000
// points; writing pixels takes milliseconds, on machines without WebGL too.

/** @param {number} diameter - in pixels @returns {Disc} */
export function disc(diameter) {
  const radius = diameter / 2;
  /** @type {[number, number][]} */
  const inside = [];
  const from = Math.ceil(-radius);
  for (let y = from; y < from + diameter; y++) {
    for (let x = from; x < from + diameter; x++) {
      const [cx, cy] = [x - from + 0.5 - radius, y - from + 0.5 - radius];
      if (diameter <= 2 || cx * cx + cy * cy <= radius * radius) inside.push([x, y]);
    }
  }
  const [dx, dy] = [0, 1].map((k) => Int32Array.from(inside, (pixel) => pixel[k]));
  return { dx, dy, reach: Math.ceil(radius) + 1 };
}

/**
 * Draws points; a point with color 0 is left out.
 *
 * @param {Uint32Array} pixels - size.width x size.height, rows one after another
 * @param {Size} size
 * @param {View} view
 * @param {ArrayLike<number>} xs
 * @param {ArrayLike<number>} ys
 * @param {ArrayLike<number> | number} colors - one per point or for all, as `packed` in colors.js gives them
 * @param {Disc} shape
 * @param {ArrayLike<number> | null} which - the points to draw, in this order; all if null
 */
export function drawPoints(pixels, size, view, xs, ys, colors, shape, which = null) {
  const { width, height } = size;
  const { dx, dy, reach } = shape;
  const steps = dx.map((step, k) => step + dy[k] * width);
  const [left, top] = [width / 2 - view.x * view.scale, height / 2 - view.y * view.scale];
  const n = which ? which.length : xs.length;
  for (let k = 0; k < n; k++) {
    const i = which ? which[k] : k;
    const color = typeof colors === "number" ? colors : colors[i];
    if (color === 0) continue;
    const px = Math.round(xs[i] * view.scale + left);
    const py = Math.round(ys[i] * view.scale + top);
    if (px >= reach && py >= reach && px < width - reach && py < height - reach) {
      const at = py * width + px;
      for (let s = 0; s < steps.length; s++) pixels[at + steps[s]] = color;
    } else if (px > -reach && py > -reach && px < width + reach && py < height + reach) {
      drawClipped(pixels, size, px, py, color, shape);
    }
  }
}

/**
 * @param {Uint32Array} pixels @param {Size} size @param {number} px @param {number} py @param {number} color
 * @param {Disc} shape
 */
function drawClipped(pixels, size, px, py, color, shape) {
  for (let s = 0; s < shape.dx.length; s++) {
    const [x, y] = [px + shape.dx[s], py + shape.dy[s]];
    if (x >= 0 && y >= 0 && x < size.width && y < size.height) pixels[y * size.width + x] = color;
  }
}
