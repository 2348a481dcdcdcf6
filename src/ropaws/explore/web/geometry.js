/**
 * The map's geometry: from positions to pixels and back, nearest points, and points inside a lasso.
 *
 * @typedef {{x: number, y: number, scale: number}} View - the position at the center, pixels per unit
 * @typedef {{width: number, height: number}} Size
 * @typedef {{left: number, right: number, top: number, bottom: number}} Box
 * @typedef {ArrayLike<number>} Values
 */

/** @param {Values} xs @param {Values} ys @returns {Box} */
export function bounds(xs, ys) {
  const box = { left: Infinity, right: -Infinity, top: Infinity, bottom: -Infinity };
  for (let i = 0; i < xs.length; i++) {
    if (xs[i] < box.left) box.left = xs[i];
    if (xs[i] > box.right) box.right = xs[i];
    if (ys[i] < box.top) box.top = ys[i];
    if (ys[i] > box.bottom) box.bottom = ys[i];
  }
  return xs.length ? box : { left: -1, right: 1, top: -1, bottom: 1 };
}

/**
 * The view that shows the whole box.
 *
 * @param {Box} box
 * @param {Size} size
 * @param {number} margin
 * @returns {View}
 */
export function fit(box, size, margin = 16) {
  const wide = Math.max(box.right - box.left, 1e-6);
  const high = Math.max(box.bottom - box.top, 1e-6);
  const scale = Math.min(
    Math.max(size.width - 2 * margin, 1) / wide,
    Math.max(size.height - 2 * margin, 1) / high,
  );
  return { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2, scale };
}

/** @param {View} view @param {Size} size @param {number} x @param {number} y @returns {[number, number]} */
export function toPixels(view, size, x, y) {
  return [(x - view.x) * view.scale + size.width / 2, (y - view.y) * view.scale + size.height / 2];
}

/** @param {View} view @param {Size} size @param {number} px @param {number} py @returns {[number, number]} */
export function toPosition(view, size, px, py) {
  return [(px - size.width / 2) / view.scale + view.x, (py - size.height / 2) / view.scale + view.y];
}

/**
 * The view zoomed by a factor around a pixel, which keeps its position.
 *
 * @param {View} view @param {Size} size @param {number} px @param {number} py @param {number} factor
 * @param {{least: number, most: number}} limits - of the scale
 * @returns {View}
 */
export function zoomAt(view, size, px, py, factor, limits) {
  const [x, y] = toPosition(view, size, px, py);
  const scale = Math.min(limits.most, Math.max(limits.least, view.scale * factor));
  return { x: x - (px - size.width / 2) / scale, y: y - (py - size.height / 2) / scale, scale };
}

/** @param {View} view @param {number} dx - pixels @param {number} dy @returns {View} */
export function pan(view, dx, dy) {
  return { x: view.x - dx / view.scale, y: view.y - dy / view.scale, scale: view.scale };
}

/**
 * A test whether a point is inside a polygon, by the even-odd rule.
 *
 * @param {[number, number][]} polygon
 * @returns {(x: number, y: number) => boolean}
 */
export function insideOf(polygon) {
  const [xs, ys] = [0, 1].map((k) => Float64Array.from(polygon, (corner) => corner[k]));
  return (x, y) => {
    let odd = false;
    for (let i = 0, j = xs.length - 1; i < xs.length; j = i++) {
      if (ys[i] > y !== ys[j] > y && x < ((xs[j] - xs[i]) * (y - ys[i])) / (ys[j] - ys[i]) + xs[i])
        odd = !odd;
    }
    return odd;
  };
}

/**
 * The points inside a lasso.
 *
 * @param {[number, number][]} polygon @param {Values} xs @param {Values} ys
 * @param {(i: number) => boolean} wanted - asked of the points inside only
 * @returns {number[]}
 */
export function lassoed(polygon, xs, ys, wanted = () => true) {
  if (polygon.length < 3) return [];
  const box = bounds(
    polygon.map((corner) => corner[0]),
    polygon.map((corner) => corner[1]),
  );
  const isInside = insideOf(polygon);
  const found = [];
  for (let i = 0; i < xs.length; i++) {
    if (xs[i] < box.left || xs[i] > box.right || ys[i] < box.top || ys[i] > box.bottom) continue;
    if (isInside(xs[i], ys[i]) && wanted(i)) found.push(i);
  }
  return found;
}

/** Points sorted into the cells of a square grid: the nearest to a position is found without asking all. */
export class PointIndex {
  /** @param {Values} xs @param {Values} ys */
  constructor(xs, ys) {
    this.xs = xs;
    this.ys = ys;
    this.box = bounds(xs, ys);
    this.side = Math.max(1, Math.ceil(Math.sqrt(xs.length / 4)));
    this.cell = Math.max(this.box.right - this.box.left, this.box.bottom - this.box.top, 1e-6) / this.side;
    this.starts = new Int32Array(this.side * this.side + 1);
    this.order = new Int32Array(xs.length);
    this.sort();
  }

  /** @param {number} value @param {number} least */
  column(value, least) {
    return Math.min(this.side - 1, Math.max(0, Math.floor((value - least) / this.cell)));
  }

  /** @param {number} i */
  cellOf(i) {
    return this.column(this.ys[i], this.box.top) * this.side + this.column(this.xs[i], this.box.left);
  }

  sort() {
    for (let i = 0; i < this.order.length; i++) this.starts[this.cellOf(i) + 1]++;
    for (let c = 1; c < this.starts.length; c++) this.starts[c] += this.starts[c - 1];
    const next = this.starts.slice();
    for (let i = 0; i < this.order.length; i++) this.order[next[this.cellOf(i)]++] = i;
  }

  /** The points of a box; null if there are more than `most`. @param {Box} box @param {number} most */
  within(box, most) {
    const found = [];
    const [first, last] = [this.column(box.left, this.box.left), this.column(box.right, this.box.left)];
    const bottom = this.column(box.bottom, this.box.top);
    for (let row = this.column(box.top, this.box.top); row <= bottom; row++) {
      const [from, to] = [this.starts[row * this.side + first], this.starts[row * this.side + last + 1]];
      for (let k = from; k < to; k++) {
        const [x, y] = [this.xs[this.order[k]], this.ys[this.order[k]]];
        if (x < box.left || x > box.right || y < box.top || y > box.bottom) continue;
        if (found.length === most) return null;
        found.push(this.order[k]);
      }
    }
    return found;
  }

  /**
   * The wanted point nearest to a position, at most `reach` away, or null.
   *
   * @param {number} x @param {number} y @param {number} reach @param {(i: number) => boolean} wanted
   * @returns {number | null}
   */
  nearest(x, y, reach, wanted = () => true) {
    let best = null;
    let least = reach * reach;
    const right = this.column(x + reach, this.box.left);
    const bottom = this.column(y + reach, this.box.top);
    for (let row = this.column(y - reach, this.box.top); row <= bottom; row++) {
      for (let col = this.column(x - reach, this.box.left); col <= right; col++) {
        const c = row * this.side + col;
        for (let k = this.starts[c]; k < this.starts[c + 1]; k++) {
          const i = this.order[k];
          const distance = (this.xs[i] - x) ** 2 + (this.ys[i] - y) ** 2;
          if (distance <= least && wanted(i)) [best, least] = [i, distance];
        }
      }
    }
    return best;
  }
}
