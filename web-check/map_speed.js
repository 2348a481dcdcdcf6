/** Milliseconds of what the map does, with 100,000 points and a million; map_speed.py keeps them. */
import { pointColors } from "/web/colors.js";
import { PointIndex, bounds, fit, lassoed, pan, zoomAt } from "/web/geometry.js";
import { filterOf, maskOf } from "/web/filters.js";
import { MapCanvas } from "/web/map_canvas.js";
import { contours } from "/web/map_contours.js";
import { clusterNames } from "/web/map_names.js";

const SIZES = [100_000, 1_000_000];
const MOST_BY_PROCESSOR = 100_000; // by WebGL without a card: a million take many seconds a frame
const LABELED = 1_000;
const FRAMES = { written: 40, drawn: 6 }; // the second where the processor does what a card would
const SKIPPED = { written: 10, drawn: 2 }; // at the beginning
const CLASSES = Array.from({ length: 10 }, (_, id) => ({ id, name: `class ${id}` }));

/** Ten clouds of points. @param {number} n */
function makeColumns(n) {
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

/** The least of five. @param {() => void} act */
function fastest(act) {
  return Math.min(...Array.from({ length: 5 }, () => milliseconds(act)));
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
  const way = canvas.card ? "drawn" : "written";
  for (let frame = 0; frame < FRAMES[way]; frame++) {
    scene.view = pan(scene.view, frame % 2 ? 7 : -7, 3);
    stamps.push(await new Promise(requestAnimationFrame));
    times.push(
      milliseconds(() => {
        canvas.draw(scene);
        const gl = canvas.card?.gl; // what a card draws is done when a pixel is asked for
        gl?.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
      }),
    );
  }
  const gaps = stamps.slice(1).map((stamp, k) => stamp - stamps[k]);
  return { draw: summary(times.slice(SKIPPED[way])), between_frames: summary(gaps.slice(SKIPPED[way])) };
}

/** @param {number} points @param {{slowCard?: boolean, noCard?: boolean}} options */
async function measure(points, options) {
  const columns = makeColumns(points);
  const element = document.createElement("canvas");
  document.body.replaceChildren(element);
  const canvas = new MapCanvas(element, options);
  if (options.slowCard && !canvas.card) return null;
  canvas.resize();
  const view = fit(bounds(columns.x, columns.y), canvas.size);
  const colors = pointColors(columns, "predicted", CLASSES, false);
  const names = clusterNames(columns, "predicted", CLASSES);
  const lines = contours(columns);
  const marks = {
    mask: null,
    contours: lines,
    selected: new Uint32Array(),
    hovered: 1,
    lasso: [],
    dark: false,
    names,
  };
  const scene = { columns, view, fitScale: view.scale, colors, ...marks };
  const close = zoomAt(view, canvas.size, 640, 400, 4, { least: 0, most: 1e9 });
  const half = Uint32Array.from({ length: points / 2 }, (_, i) => 2 * i);
  const frames = {
    whole_map: await dragged(canvas, { ...scene }),
    while_moving: await dragged(canvas, { ...scene, moving: true }),
    zoomed_four_times: await dragged(canvas, { ...scene, view: close, moving: true }),
    half_selected: await dragged(canvas, { ...scene, selected: half }),
  };
  return { frames, columns, view };
}

/** What does not depend on how points are drawn. @param {ReturnType<typeof makeColumns>} columns @param {{scale: number}} view */
function reckon(columns, view) {
  /** @type {PointIndex | null} */
  let index = null;
  const indexing = milliseconds(() => (index = new PointIndex(columns.x, columns.y)));
  const circle = Array.from({ length: 200 }, (_, k) => [4 * Math.cos(k / 31.8), 4 * Math.sin(k / 31.8)]);
  const hovers = Array.from({ length: 1000 }, () => [8 * Math.random() - 4, 8 * Math.random() - 4]);
  const filter = { ...filterOf("all"), confidence: [0.5, 1] };
  return {
    recolor: fastest(() => pointColors(columns, "confidence", CLASSES, true)),
    contours: fastest(() => contours(columns)),
    names: fastest(() => clusterNames(columns, "predicted", CLASSES)),
    filter: fastest(() => maskOf(/** @type {any} */ (filter), columns)),
    index: indexing,
    hover:
      milliseconds(() => hovers.forEach(([x, y]) => index?.nearest(x, y, 12 / view.scale))) / hovers.length,
    lasso: fastest(() => lassoed(/** @type {[number, number][]} */ (circle), columns.x, columns.y)),
  };
}

async function main() {
  /** @type {Record<string, any>} */
  const found = {};
  for (const points of SIZES) {
    const canvas = await measure(points, { noCard: true });
    const card = points > MOST_BY_PROCESSOR ? null : await measure(points, { slowCard: true });
    if (!canvas) throw new Error("nothing was drawn");
    const { columns, view } = canvas;
    found[points] = { canvas: canvas.frames, webgl: card?.frames ?? null, ...reckon(columns, view) };
  }
  const result = { labeled: LABELED, pixels: [innerWidth, innerHeight], milliseconds: found };
  await fetch("/result", { method: "POST", body: JSON.stringify(result) });
}

main();
