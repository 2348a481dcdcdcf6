/**
 * The map: zoom, pan, hover and lasso over the canvas of points.
 *
 * @import { Contour } from "./map_contours.js"
 * @import { ClusterName } from "./map_names.js"
 * @import { Store } from "./store.js"
 * @import { ColorMode } from "./colors.js"
 * @import { Tooltip } from "./tooltip.js"
 */
import { legend, pointColors, unpacked } from "./colors.js";
import { element, fill, find } from "./dom.js";
import { maskOf } from "./filters.js";
import { PointIndex, fit, lassoed, pan, toPixels, toPosition, zoomAt } from "./geometry.js";
import { MapCanvas } from "./map_canvas.js";
import { contours } from "./map_contours.js";
import { clusterNames } from "./map_names.js";
import { MapThumbnails, roomFor } from "./map_thumbnails.js";

const REACH = 12; // pixels from the pointer to the nearest point
const STEP = 60; // pixels per arrow key
const NEAR = 3; // times the scale at which all is shown: from there on thumbnails are
const MANY = 20_000; // images from which on contours are drawn unless a person says otherwise
const REST_MS = 150; // without a movement, after which the map is drawn whole

export class PoolMap {
  /**
   * @param {Store} store
   * @param {Tooltip} tooltip
   * @param {(id: number) => void} open
   * @param {(ids: number[]) => void} picked
   */
  constructor(store, tooltip, open, picked) {
    this.store = store;
    this.tooltip = tooltip;
    this.open = open;
    this.picked = picked;
    this.element = find("map-canvas", HTMLCanvasElement);
    this.canvas = new MapCanvas(this.element);
    this.modeSelect = find("map-color", HTMLSelectElement);
    this.view = { x: 0, y: 0, scale: 1 };
    this.fitScale = 1;
    this.isFit = true; // follow the window's size until the person zooms
    /** @type {PointIndex | null} */
    this.index = null;
    this.mapVersion = -1;
    this.colors = new Uint32Array();
    /** @type {Uint8Array | null} */
    this.mask = null;
    /** @type {number | null} */
    this.hovered = null;
    /** @type {[number, number][]} */
    this.lasso = [];
    this.lassoMode = false;
    /** @type {Map<number, {x: number, y: number}>} */
    this.pointers = new Map();
    this.moved = 0;
    this.frame = 0;
    this.resting = 0; // a timer that runs while the map is moved
    this.selected = new Uint32Array();
    /** @type {ClusterName[]} */
    this.names = [];
    /** @type {Contour[] | null} */
    this.contours = null; // of what the filter keeps; null until they are asked for
    /** @type {boolean | null} */
    this.contoursChosen = null; // by a person
    this.thumbnails = new MapThumbnails(store, () => this.schedule());
    this.listen();
  }

  listen() {
    const { element: canvas, store } = this;
    store.on(["columns"], () => this.takeColumns());
    store.on(["arrival"], () => this.showArrival());
    store.on(["labels", "filter", "theme"], () => this.recolor());
    store.on(["state"], () => this.drawLegend());
    store.on(["selection"], () => this.takeSelection());
    store.on(["session"], () => this.takeSelection());
    this.modeSelect.addEventListener("change", () => this.recolor());
    new ResizeObserver(() => this.resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointercancel", (event) => this.onUp(event));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("dblclick", () => this.hovered !== null && this.open(this.hovered));
    find("zoom-in", HTMLButtonElement).addEventListener("click", () => this.zoom(1.5));
    find("zoom-out", HTMLButtonElement).addEventListener("click", () => this.zoom(1 / 1.5));
    find("zoom-fit", HTMLButtonElement).addEventListener("click", () => this.showAll());
    find("lasso", HTMLButtonElement).addEventListener("click", () => this.setLassoMode(!this.lassoMode));
    find("contours", HTMLButtonElement).addEventListener("click", () => this.toggleContours());
  }

  /** @returns {ColorMode} */
  get mode() {
    return this.store.showsPredictions ? /** @type {ColorMode} */ (this.modeSelect.value) : "label";
  }

  takeColumns() {
    const { columns, version } = this.store;
    if (!columns || !version) return;
    const hasMap = version.map > 0 && columns.n > 0;
    const empty = find("map-empty", HTMLElement);
    empty.hidden = hasMap;
    empty.textContent = "The map appears here once it has been computed.";
    this.element.hidden = !hasMap;
    if (!hasMap) return;
    if (this.mapVersion !== version.map || this.index?.order.length !== columns.n) {
      this.mapVersion = version.map;
      this.index = new PointIndex(columns.x, columns.y);
      if (this.isFit) this.showAll();
    }
    this.recolor();
  }

  /** The first time, a person waits for the columns. */
  showArrival() {
    const { columns, arrived } = this.store;
    const share = Math.round(100 * arrived);
    if (!columns)
      find("map-empty", HTMLElement).textContent = `Loading what is known of all images: ${share}%`;
  }

  recolor() {
    const { columns, filter, classes, dark } = this.store;
    if (!columns) return;
    this.mask = maskOf(filter, columns);
    this.colors = pointColors(columns, this.mode, classes, dark, this.mask);
    this.names = clusterNames(columns, this.mode, classes, this.mask);
    this.contours = null;
    this.showContourState();
    this.drawLegend();
    this.schedule();
  }

  drawLegend() {
    const entries = legend(this.mode, this.store.classes, this.store.dark);
    fill(find("map-legend", HTMLElement), entries, () =>
      entries.map(({ color, text }) =>
        element(
          "li",
          { color, title: text },
          element("span", { className: "dot" }),
          element("span", {}, text),
        ),
      ),
    );
  }

  resize() {
    if (!this.element.clientWidth) return;
    this.canvas.resize();
    if (this.isFit) this.showAll();
    this.draw();
  }

  schedule() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  draw() {
    const { columns, dark } = this.store;
    if (!columns || !this.index) return;
    const { index, view, fitScale, colors, mask, selected, hovered, lasso, names, thumbnails } = this;
    const moving = this.resting !== 0;
    const isNear = view.scale >= NEAR * fitScale;
    const shown = moving || !isNear ? [] : roomFor(index, view, this.canvas.size, (i) => mask?.[i] !== 0);
    const drawImages = (/** @type {CanvasRenderingContext2D} */ context) =>
      thumbnails.draw(context, shown, (id) => unpacked(colors[id]));
    const scene = { columns, view, fitScale, colors, mask, selected, hovered, lasso, dark };
    const lines = this.hasContours && !isNear ? (this.contours ??= contours(columns, mask)) : [];
    this.canvas.draw({ ...scene, moving, names, contours: lines, drawImages });
  }

  takeSelection() {
    this.selected = Uint32Array.from(this.store.selection);
    this.schedule();
  }

  /** The view has changed, and may again at once: thumbnails and the last points come when it rests. */
  move() {
    this.isFit = false;
    clearTimeout(this.resting);
    this.resting = window.setTimeout(() => {
      this.resting = 0;
      this.schedule();
    }, REST_MS);
    this.schedule();
  }

  showAll() {
    if (!this.index) return;
    this.view = fit(this.index.box, this.canvas.size);
    this.fitScale = this.view.scale;
    this.isFit = true;
    this.schedule();
  }

  /** @param {number} factor @param {number} [px] @param {number} [py] */
  zoom(factor, px = this.canvas.size.width / 2, py = this.canvas.size.height / 2) {
    const limits = { least: this.fitScale / 2, most: this.fitScale * 400 };
    this.view = zoomAt(this.view, this.canvas.size, px, py, factor, limits);
    this.move();
  }

  /** @param {number} dx @param {number} dy */
  pan(dx, dy) {
    this.view = pan(this.view, dx, dy);
    this.move();
  }

  /** Lines of equal density, on the map as a whole: between single images there is nothing for them to say. */
  get hasContours() {
    return this.contoursChosen ?? (this.store.columns?.n ?? 0) >= MANY;
  }

  toggleContours() {
    this.contoursChosen = !this.hasContours;
    this.showContourState();
    this.schedule();
  }

  showContourState() {
    find("contours", HTMLButtonElement).setAttribute("aria-pressed", String(this.hasContours));
  }

  /** @param {boolean} on */
  setLassoMode(on) {
    this.lassoMode = on;
    find("lasso", HTMLButtonElement).setAttribute("aria-pressed", String(on));
    this.element.classList.toggle("lasso", on);
  }

  /** The image at a pixel, among those that the filter keeps. @param {number} px @param {number} py */
  at(px, py) {
    const thumbnail = this.thumbnails.at(px, py);
    if (thumbnail !== null) return thumbnail;
    const [x, y] = toPosition(this.view, this.canvas.size, px, py);
    return this.index?.nearest(x, y, REACH / this.view.scale, (i) => this.mask?.[i] !== 0) ?? null;
  }

  /** @param {number | null} id */
  hover(id) {
    if (id === this.hovered) return;
    this.hovered = id;
    const { columns } = this.store;
    if (id === null || !columns) {
      this.tooltip.hide();
    } else {
      const [x, y] = toPixels(this.view, this.canvas.size, columns.x[id], columns.y[id]);
      const box = this.element.getBoundingClientRect();
      this.tooltip.show(id, box.left + x, box.top + y);
    }
    this.schedule();
  }

  /** @param {WheelEvent} event */
  onWheel(event) {
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    this.hover(null);
    this.zoom(Math.exp(-0.0016 * lines * event.deltaY), event.offsetX, event.offsetY);
  }

  /** @param {PointerEvent} event */
  onDown(event) {
    if (event.button !== 0) return;
    this.element.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.moved = 0;
    const starts = this.pointers.size === 1 && (event.shiftKey || this.lassoMode);
    this.lasso = starts ? [toPosition(this.view, this.canvas.size, event.offsetX, event.offsetY)] : [];
  }

  /** @param {PointerEvent} event */
  onMove(event) {
    const [x, y] = [event.offsetX, event.offsetY];
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.hover(this.at(x, y));
    const distance = Math.hypot(x - before.x, y - before.y);
    if (this.lasso.length) {
      if (distance < 3) return;
      this.lasso.push(toPosition(this.view, this.canvas.size, x, y));
      this.schedule();
    } else if (this.pointers.size === 2) {
      this.pinch(event.pointerId, x, y);
    } else {
      if (this.moved + distance > 4) this.pan(x - before.x, y - before.y);
      this.hover(null);
    }
    this.moved += distance;
    this.pointers.set(event.pointerId, { x, y });
  }

  /** @param {number} pointer @param {number} x @param {number} y */
  pinch(pointer, x, y) {
    const before = this.pointers.get(pointer);
    const other = [...this.pointers].find(([id]) => id !== pointer)?.[1];
    if (!before || !other) return;
    const factor =
      Math.hypot(x - other.x, y - other.y) / Math.max(1, Math.hypot(before.x - other.x, before.y - other.y));
    this.zoom(factor, (x + other.x) / 2, (y + other.y) / 2);
  }

  /** @param {PointerEvent} event */
  onUp(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    const { columns } = this.store;
    if (this.lasso.length > 2 && columns) {
      const found = lassoed(this.lasso, columns.x, columns.y, (i) => this.mask?.[i] !== 0);
      this.picked(found);
    } else if (this.moved <= 4 && event.type === "pointerup") {
      this.click(this.at(event.offsetX, event.offsetY), event.ctrlKey || event.metaKey || event.shiftKey);
    }
    this.lasso = [];
    this.schedule();
  }

  /** @param {number | null} id @param {boolean} more */
  click(id, more) {
    if (id === null) return void (more || this.store.select([]));
    if (more) this.store.toggle(id);
    else this.store.select([id]);
    this.hover(id);
  }

  /** Acts on a key while the map has the focus; false if it is none of the map's. @param {string} key */
  onKey(key) {
    /** @type {Record<string, [number, number]>} */
    const steps = { ArrowLeft: [STEP, 0], ArrowRight: [-STEP, 0], ArrowUp: [0, STEP], ArrowDown: [0, -STEP] };
    const { width, height } = this.canvas.size;
    if (key in steps) {
      this.pan(...steps[key]);
      this.hover(null);
      const [x, y] = toPosition(this.view, this.canvas.size, width / 2, height / 2);
      this.hover(this.index?.nearest(x, y, STEP / this.view.scale, (i) => this.mask?.[i] !== 0) ?? null);
      return true;
    }
    if (key === "Home") this.showAll();
    else if (key === " " && this.hovered !== null) this.store.toggle(this.hovered);
    else if (key === "Enter" && this.hovered !== null) this.open(this.hovered);
    else return key === " " || key === "Enter";
    return true;
  }
}
