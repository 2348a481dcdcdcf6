/**
 * Points written as pixels into a buffer. A canvas call per point would take most of a second for 100,000
 * points; writing pixels takes milliseconds, on machines without WebGL too.
 *
 * @typedef {import("./geometry.js").Size} Size
 * @typedef {import("./geometry.js").View} View
 * @typedef {{dx: Int32Array, dy: Int32Array, reach: number}} Disc - the pixels of a disc, around its center
 */

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
