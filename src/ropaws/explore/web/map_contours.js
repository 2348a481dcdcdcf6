/**
 * Where most images of the map are: lines of equal density, each around a share of the images.
 *
 * @import { Columns } from "./columns.js"
 * @typedef {{share: number, segments: Float32Array}} Contour
 *   - of the images, about this share is inside; segments: x and y of both ends of each, on the map
 */
import { bounds } from "./geometry.js";

const SIDE = 160; // cells of the map's larger side in which images are counted
const BORDER = 6; // empty cells around them, so that lines are closed
const BLURS = [2, 2, 1]; // cells to each side over which means are taken, one after another
const SHARES = [0.25, 0.5, 0.75, 0.95];

/**
 * One contour for each share, the innermost first; none without images.
 *
 * @param {Columns} columns
 * @param {Uint8Array | null} mask - images with 0 do not count
 * @returns {Contour[]}
 */
export function contours({ x, y, n }, mask = null) {
  const box = bounds(x, y);
  const cell = Math.max(box.right - box.left, box.bottom - box.top, 1e-6) / SIDE;
  const width = SIDE + 2 * BORDER;
  const cells = new Float32Array(width * width);
  let total = 0;
  for (let i = 0; i < n; i++) {
    if (mask && !mask[i]) continue;
    const column = Math.min(SIDE - 1, Math.floor((x[i] - box.left) / cell)) + BORDER;
    const row = Math.min(SIDE - 1, Math.floor((y[i] - box.top) / cell)) + BORDER;
    cells[row * width + column]++;
    total++;
  }
  if (!total) return [];
  const density = BLURS.reduce((values, reach) => blurred(values, width, reach), cells);
  const place = (/** @type {number} */ at, /** @type {number} */ from) => from + (at - BORDER + 0.5) * cell;
  return levelsOf(density, cells, total).map((level, k) => ({
    share: SHARES[k],
    segments: isolines(density, width, level).map((value, at) => place(value, at % 2 ? box.top : box.left)),
  }));
}

/**
 * Densities that the shares of all images are above.
 *
 * @param {Float32Array} density @param {Float32Array} cells - images in each cell @param {number} total
 */
function levelsOf(density, cells, total) {
  const order = Uint32Array.from(cells.keys()).filter((at) => cells[at] > 0);
  order.sort((one, other) => density[other] - density[one]);
  const levels = [];
  let sum = 0;
  for (const at of order) {
    sum += cells[at];
    while (levels.length < SHARES.length && sum >= SHARES[levels.length] * total) levels.push(density[at]);
  }
  return levels;
}

/** Means over squares of cells: along rows, and then along columns. @param {Float32Array} values @param {number} width @param {number} reach */
function blurred(values, width, reach) {
  return alongRows(alongRows(values, width, reach), width, reach);
}

/** The result is turned, so that twice is both ways. @param {Float32Array} values @param {number} width @param {number} reach */
function alongRows(values, width, reach) {
  const found = new Float32Array(values.length);
  for (let row = 0; row < width; row++) {
    let sum = 0;
    for (let at = -reach; at < width; at++) {
      if (at + reach < width) sum += values[row * width + at + reach];
      if (at - reach > 0) sum -= values[row * width + at - reach - 1];
      if (at >= 0) found[at * width + row] = sum / (2 * reach + 1);
    }
  }
  return found;
}

/**
 * Marching squares: where the values of a grid cross a level, by straight lines between its points.
 *
 * @param {Float32Array} values - width x width, rows one after another @param {number} width @param {number} level
 * @returns {Float32Array} - column and row of both ends of each segment
 */
export function isolines(values, width, level) {
  /** @type {number[]} */
  const found = [];
  for (let row = 0; row + 1 < width; row++) {
    for (let column = 0; column + 1 < width; column++) {
      const at = row * width + column;
      // Corners around the cell; where one side of it is above and the next is below, a line crosses.
      const around = [values[at], values[at + 1], values[at + width + 1], values[at + width]];
      const ends = [];
      for (let k = 0; k < 4; k++) {
        const [one, next] = [around[k], around[(k + 1) % 4]];
        if (one >= level === next >= level) continue;
        const [cx, cy] = CORNERS[k];
        const [nx, ny] = CORNERS[(k + 1) % 4];
        const part = (level - one) / (next - one);
        ends.push(column + cx + part * (nx - cx), row + cy + part * (ny - cy));
      }
      found.push(...ends); // two ends, or four, which are paired as they come
    }
  }
  return Float32Array.from(found);
}

const CORNERS = [
  [0, 0],
  [1, 0],
  [1, 1],
  [0, 1],
];
