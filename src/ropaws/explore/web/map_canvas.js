/**
 * The map's canvas: all images as points, drawn by the graphics card or written as pixels into one buffer, then
 * what is marked on top.
 *
 * @import { Columns } from "./columns.js"
 * @import { Size, View } from "./geometry.js"
 * @import { Layer } from "./map_gl.js"
 * @import { Contour } from "./map_contours.js"
 * @import { ClusterName } from "./map_names.js"
 * @typedef {{dx: Int32Array, dy: Int32Array, reach: number}} Disc - the pixels of a disc, around its center
 */
import { BACKGROUNDS, packed } from "./colors.js";
import { toPixels } from "./geometry.js";
import { GlPoints } from "./map_gl.js";
import { placed } from "./map_names.js";

const WHILE_MOVING = 200_000; // points of a frame at most, where no graphics card draws them

/**
 * @typedef {{
 *   columns: Columns, view: View, fitScale: number, colors: Uint32Array, mask: Uint8Array | null,
 *   selected: Uint32Array, hovered: number | null, lasso: [number, number][], dark: boolean,
 *   moving?: boolean, names?: ClusterName[], contours?: Contour[],
 *   drawImages?: (context: CanvasRenderingContext2D) => void,
 * }} Scene - view in CSS pixels; lasso in positions; moving: a frame of many that a person drags
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
  /** @param {HTMLCanvasElement} canvas @param {{slowCard?: boolean, noCard?: boolean}} options - for measuring */
  constructor(canvas, options = {}) {
    this.canvas = canvas;
    const context = canvas.getContext("2d");
    if (!context) throw new Error("this browser has no 2D canvas");
    this.context = context;
    this.ratio = 1;
    /** @type {ImageData | null} */
    this.image = null;
    this.pixels = new Uint32Array();
    /** @type {{colors: Uint32Array, kept: Uint32Array | null, labeled: Uint32Array, few: Uint32Array | null} | null} */
    this.lists = null;
    this.below = document.createElement("canvas"); // what a card draws on lies under the marks
    this.card = options.noCard ? null : GlPoints.open(this.below, options.slowCard);
    if (this.card) canvas.before(this.below);
    this.below.className = "map-points";
    this.below.addEventListener("webglcontextlost", () => this.loseCard());
  }

  /** In CSS pixels. @returns {{width: number, height: number}} */
  get size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  /** Pixels are written from now on. */
  loseCard() {
    this.card = null;
    this.below.remove();
    this.resize();
  }

  /** Fits the buffer to the element. */
  resize() {
    this.ratio = Math.min(2, window.devicePixelRatio || 1);
    for (const canvas of this.card ? [this.canvas, this.below] : [this.canvas]) {
      canvas.width = Math.max(1, Math.round(this.canvas.clientWidth * this.ratio));
      canvas.height = Math.max(1, Math.round(this.canvas.clientHeight * this.ratio));
    }
    if (this.card) return;
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /** Which points are drawn anew on top; found once for all frames with these colors. @param {Scene} scene */
  listsOf({ columns, colors, mask }) {
    if (this.lists?.colors === colors) return this.lists;
    const labeled = kept(columns.n, (i) => columns.label[i] !== -1 && mask?.[i] !== 0);
    const step = Math.ceil(columns.n / WHILE_MOVING);
    const few =
      step > 1 ? Uint32Array.from({ length: Math.floor(columns.n / step) }, (_, k) => k * step) : null;
    this.lists = { colors, kept: mask && kept(columns.n, (i) => mask[i] === 1), labeled, few };
    return this.lists;
  }

  /** From the bottom to the top. @param {Scene} scene @param {number} points @returns {Layer[]} */
  layers(scene, points) {
    const { kept: masked, labeled, few } = this.listsOf(scene);
    const diameter = (/** @type {number} */ more) => points + Math.round(more * this.ratio);
    const thin = scene.moving && !this.card ? few : null;
    /** @type {Layer[]} */
    const layers = [{ which: thin, diameter: points, paint: null }];
    if (masked && (!thin || masked.length <= WHILE_MOVING))
      layers.push({ which: masked, diameter: points, paint: null });
    layers.push({
      which: labeled,
      diameter: diameter(4),
      paint: BACKGROUNDS[scene.dark ? "dark" : "light"],
    });
    layers.push({ which: labeled, diameter: diameter(2), paint: null });
    const { selected } = scene;
    if (selected.length) {
      const extra = selected.length > 300 ? 0 : 2; // many large points would hide each other
      layers.push({
        which: selected,
        diameter: diameter(extra + 2),
        paint: scene.dark ? "#ffffff" : "#000000",
      });
      layers.push({ which: selected, diameter: diameter(extra), paint: null });
    }
    return layers;
  }

  /** @param {Scene} scene */
  draw(scene) {
    if (!this.image && !this.card) return;
    const { columns, colors } = scene;
    const size = { width: this.canvas.width, height: this.canvas.height };
    const view = { ...scene.view, scale: scene.view.scale * this.ratio };
    const zoom = scene.view.scale / scene.fitScale;
    const points = Math.max(1, Math.round(this.ratio * pointSize(columns.n, zoom)));
    const layers = this.layers(scene, points);
    if (this.card) {
      this.card.draw(size, view, columns, colors, layers);
      this.context.clearRect(0, 0, size.width, size.height);
    } else if (this.image) {
      this.pixels.fill(0);
      for (const { which, diameter, paint } of layers) {
        const paints = paint ? packed(paint) : colors;
        drawPoints(this.pixels, size, view, columns.x, columns.y, paints, disc(diameter), which);
      }
      this.context.putImageData(this.image, 0, 0);
    }
    this.drawMarks(scene, points / this.ratio);
  }

  /** @param {Scene} scene @param {number} points */
  drawMarks(scene, points) {
    const { context, ratio } = this;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawContours(scene);
    scene.drawImages?.(context);
    this.drawNames(scene);
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

  /** Thin lines on wider ones in the color of the page; the innermost are the widest. @param {Scene} scene */
  drawContours({ contours = [], view, dark }) {
    const { context, size } = this;
    const [left, top] = toPixels(view, size, 0, 0);
    context.lineCap = "round";
    for (const [place, { segments }] of contours.entries()) {
      context.beginPath();
      for (let at = 0; at < segments.length; at += 4) {
        context.moveTo(segments[at] * view.scale + left, segments[at + 1] * view.scale + top);
        context.lineTo(segments[at + 2] * view.scale + left, segments[at + 3] * view.scale + top);
      }
      const width = 2 - place / contours.length;
      context.lineWidth = width + 2;
      context.strokeStyle = BACKGROUNDS[dark ? "dark" : "light"];
      context.stroke();
      context.lineWidth = width;
      context.strokeStyle = dark ? "#ffffff" : "#000000";
      context.stroke();
    }
  }

  /** With a border in the color of the page, so that they can be read on any points. @param {Scene} scene */
  drawNames({ names = [], view, dark }) {
    const { context } = this;
    context.font = "600 13px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.lineWidth = 4;
    context.strokeStyle = BACKGROUNDS[dark ? "dark" : "light"];
    context.fillStyle = dark ? "#ffffff" : "#000000";
    for (const { text, x, y } of placed(
      names,
      view,
      this.size,
      (words) => context.measureText(words).width,
    )) {
      context.strokeText(text, x, y);
      context.fillText(text, x, y);
    }
  }
}

/** @param {number} n @param {(i: number) => boolean} wanted */
function kept(n, wanted) {
  const found = [];
  for (let i = 0; i < n; i++) if (wanted(i)) found.push(i);
  return Uint32Array.from(found);
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
