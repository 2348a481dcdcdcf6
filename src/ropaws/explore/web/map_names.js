/**
 * The names of classes on the map, each where its images are densest.
 *
 * @import { Columns } from "./columns.js"
 * @import { ColorMode } from "./colors.js"
 * @import { Size, View } from "./geometry.js"
 * @typedef {{text: string, x: number, y: number, count: number}} ClusterName - a position on the map
 */
import { bounds, toPixels } from "./geometry.js";

const SIDE = 48; // cells of the map's larger side in which images are counted
const LEAST_SHARE = 0.002; // of all images: smaller classes have no name on the map
const LONGEST = 24; // letters
const LINE = 16; // pixels

/**
 * One name for each class that has enough images, the largest first.
 *
 * @param {Columns} columns @param {ColorMode} mode @param {{id: number, name: string}[]} classes
 * @param {Uint8Array | null} mask - images with 0 do not count
 * @returns {ClusterName[]}
 */
export function clusterNames(columns, mode, classes, mask = null) {
  if (mode !== "predicted" && mode !== "label") return [];
  const values = mode === "label" ? columns.label : columns.predicted;
  const box = bounds(columns.x, columns.y);
  const cell = Math.max(box.right - box.left, box.bottom - box.top, 1e-6) / SIDE;
  const width = SIDE + 2; // a border, so that every cell has neighbors
  const counts = classes.map((c) => ({ name: c.name, cells: new Int32Array(width * width), n: 0 }));
  const place = new Int32Array(1 << 16).fill(-1); // of each code among the classes
  for (const [k, { id }] of classes.entries()) place[id & 0xffff] = k;
  for (let i = 0; i < columns.n; i++) {
    const k = mask && !mask[i] ? -1 : place[values[i] & 0xffff];
    if (k < 0) continue;
    const column = Math.min(SIDE - 1, Math.floor((columns.x[i] - box.left) / cell)) + 1;
    const row = Math.min(SIDE - 1, Math.floor((columns.y[i] - box.top) / cell)) + 1;
    counts[k].cells[row * width + column]++;
    counts[k].n++;
  }
  const enough = Math.max(3, LEAST_SHARE * columns.n);
  return counts
    .filter(({ n }) => n >= enough)
    .sort((a, b) => b.n - a.n)
    .map(({ name, cells, n }) => {
      const [column, row] = densest(cells, width);
      return {
        text: short(name),
        x: box.left + (column - 0.5) * cell,
        y: box.top + (row - 0.5) * cell,
        count: n,
      };
    });
}

/** Where nine cells hold the most together: the middle of what is in them. @param {Int32Array} cells @param {number} width */
function densest(cells, width) {
  let [best, most] = [width + 1, -1];
  const around = [-1, 0, 1].flatMap((dy) => [-1, 0, 1].map((dx) => [dx, dy]));
  for (let at = width + 1; at < cells.length - width - 1; at++) {
    if (at % width === 0 || at % width === width - 1) continue;
    let sum = 0;
    for (const [dx, dy] of around) sum += cells[at + dy * width + dx];
    if (sum > most) [best, most] = [at, sum];
  }
  const middle = (/** @type {0 | 1} */ axis) =>
    around.reduce((sum, step) => sum + cells[best + step[1] * width + step[0]] * step[axis], 0) /
    Math.max(1, most);
  return [(best % width) + middle(0), Math.floor(best / width) + middle(1)];
}

/** @param {string} name */
function short(name) {
  const letters = [...name];
  return letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : name;
}

/**
 * Those that fit: the larger class first, no name over another.
 *
 * @param {ClusterName[]} names @param {View} view @param {Size} size @param {(text: string) => number} widthOf
 * @returns {{text: string, x: number, y: number}[]} - centers in pixels
 */
export function placed(names, view, size, widthOf) {
  /** @type {{text: string, x: number, y: number, half: number}[]} */
  const found = [];
  for (const { text, x, y } of names) {
    const [px, py] = toPixels(view, size, x, y);
    const half = widthOf(text) / 2 + 3;
    if (px < half || py < LINE || px > size.width - half || py > size.height - LINE) continue;
    const isFree = found.every((f) => Math.abs(f.x - px) > f.half + half || Math.abs(f.y - py) > LINE);
    if (isFree) found.push({ text, x: px, y: py, half });
  }
  return found;
}
