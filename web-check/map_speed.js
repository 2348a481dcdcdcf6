/** Milliseconds of what the map does, with 100,000 points on 1280 x 800 pixels; map_speed.py keeps them. */
import { pointColors } from "/web/colors.js";
import { PointIndex, bounds, fit, lassoed, pan, zoomAt } from "/web/geometry.js";
import { MapCanvas } from "/web/map_canvas.js";

const POINTS = 100_000;
const LABELED = 1_000;
const FRAMES = 120;
const CLASSES = Array.from({ length: 10 }, (_, id) => ({ id, name: `class ${id}` }));

/** Ten clouds of points. */
function makeColumns() {
  const n = POINTS;
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  const kind = Int16Array.from({ length: n }, (_, i) => i % 10);
  const around = (/** @type {(angle: number) => number} */ wave) =>
    Float32Array.from(kind, (k) => 4 * wave(k * 0.628) + normal());
  const bytes = () => Uint8Array.from({ length: n }, () => Math.floor(256 * Math.random()));
  const label = new Int16Array(n).fill(-1);
  for (let i = 0; i < LABELED; i++) label[i * (n / LABELED)] = i % 10;
  const none = new Uint8Array(n);
  return {
    ...{ n, x: around(Math.cos), y: around(Math.sin), predicted: kind, label },
    ...{ confidence: bytes(), inDomain: bytes(), suspected: none, duplicate: none },
  };
}

/** @param {() => void} act @returns {number} */
function milliseconds(act) {
  const start = performance.now();
  act();
  return performance.now() - start;
}

/** @param {number[]} values */
function summary(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (/** @type {number} */ share) =>
    sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  return { least: sorted[0], median: at(0.5), p95: at(0.95) };
}

/** Draws frame after frame, as for a person who drags the map. @param {MapCanvas} canvas @param {any} scene */
async function dragged(canvas, scene) {
  const [times, stamps] = [[], []];
  for (let frame = 0; frame < FRAMES; frame++) {
    scene.view = pan(scene.view, frame % 2 ? 7 : -7, 3);
    stamps.push(await new Promise(requestAnimationFrame));
    times.push(milliseconds(() => canvas.draw(scene)));
  }
  const gaps = stamps.slice(1).map((stamp, k) => stamp - stamps[k]);
  return { draw: summary(times.slice(10)), between_frames: summary(gaps.slice(10)) };
}

async function main() {
  const columns = makeColumns();
  const canvas = new MapCanvas(/** @type {HTMLCanvasElement} */ (document.getElementById("canvas")));
  canvas.resize();
  const view = fit(bounds(columns.x, columns.y), canvas.size);
  const colors = pointColors(columns, "predicted", CLASSES, false);
  const scene = {
    columns,
    view,
    fitScale: view.scale,
    colors,
    mask: null,
    selection: new Set(),
    hovered: 1,
    lasso: [],
    dark: false,
  };
  const close = zoomAt(view, canvas.size, 640, 400, 4, { least: 0, most: 1e9 });
  /** @type {PointIndex | null} */
  let index = null;
  const indexing = milliseconds(() => (index = new PointIndex(columns.x, columns.y)));
  const circle = Array.from({ length: 200 }, (_, k) => [4 * Math.cos(k / 31.8), 4 * Math.sin(k / 31.8)]);
  const hovers = Array.from({ length: 1000 }, () => [8 * Math.random() - 4, 8 * Math.random() - 4]);
  const half = new Set(Array.from({ length: POINTS / 2 }, (_, i) => 2 * i));
  const result = {
    points: POINTS,
    labeled: LABELED,
    pixels: [canvas.canvas.width, canvas.canvas.height],
    milliseconds: {
      whole_map: await dragged(canvas, { ...scene }),
      zoomed_four_times: await dragged(canvas, { ...scene, view: close }),
      half_selected: await dragged(canvas, { ...scene, selection: half }),
      recolor: milliseconds(() => pointColors(columns, "confidence", CLASSES, true)),
      index: indexing,
      hover:
        milliseconds(() => hovers.forEach(([x, y]) => index?.nearest(x, y, 12 / view.scale))) / hovers.length,
      lasso: milliseconds(() => lassoed(/** @type {[number, number][]} */ (circle), columns.x, columns.y)),
    },
  };
  await fetch("/result", { method: "POST", body: JSON.stringify(result) });
}

main();
