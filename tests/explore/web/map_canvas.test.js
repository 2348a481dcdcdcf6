import assert from "node:assert/strict";
import { test } from "node:test";
import { disc, drawPoints, pointSize } from "../../../src/ropaws/explore/web/map_canvas.js";
import { random } from "./random.js";

const SIZE = { width: 40, height: 30 };
const VIEW = { x: 0, y: 0, scale: 1 };

/** Each pixel asks each point, from the last to the first. */
function drawSlowly(xs, ys, colors, shape) {
  const pixels = new Uint32Array(SIZE.width * SIZE.height);
  for (let y = 0; y < SIZE.height; y++) {
    for (let x = 0; x < SIZE.width; x++) {
      for (let i = xs.length - 1; i >= 0; i--) {
        const [dx, dy] = [x - Math.round(xs[i] + 20), y - Math.round(ys[i] + 15)];
        if (!shape.dx.some((sx, k) => sx === dx && shape.dy[k] === dy)) continue;
        pixels[y * SIZE.width + x] = colors[i];
        break;
      }
    }
  }
  return pixels;
}

test("pixels are those of the discs, also across the borders, and later points are on top", () => {
  const draw = random(7);
  for (const diameter of [1, 2, 3, 4, 7]) {
    const xs = Array.from({ length: 40 }, () => 60 * draw() - 30);
    const ys = Array.from({ length: 40 }, () => 50 * draw() - 25);
    const colors = xs.map((_, i) => i + 1);
    const pixels = new Uint32Array(SIZE.width * SIZE.height);
    drawPoints(pixels, SIZE, VIEW, xs, ys, colors, disc(diameter));
    assert.deepEqual(pixels, drawSlowly(xs, ys, colors, disc(diameter)));
  }
});

test("a disc is round, centered, and as wide as asked", () => {
  for (const diameter of [1, 2, 5, 8]) {
    const { dx, dy } = disc(diameter);
    assert.equal(Math.max(...dx) - Math.min(...dx) + 1, diameter);
    assert.equal(Math.max(...dy) - Math.min(...dy) + 1, diameter);
  }
  assert.ok(disc(8).dx.length < 64 && disc(8).dx.length > 64 * 0.7);
});

test("only the points asked for are drawn, in the order given, and in one color if that is a number", () => {
  const pixels = new Uint32Array(SIZE.width * SIZE.height);
  drawPoints(pixels, SIZE, VIEW, [0, 5, 0], [0, 0, 0], [1, 2, 3], disc(1), [2, 0]);
  assert.deepEqual([...pixels].filter(Boolean), [1]);
  drawPoints(pixels, SIZE, VIEW, [0, 5, 0], [0, 0, 0], 9, disc(1), [1]);
  assert.deepEqual([...pixels].filter(Boolean), [1, 9]);
});

test("points get smaller with their number and larger with the zoom", () => {
  assert.ok(pointSize(100_000, 1) < pointSize(20_000, 1));
  assert.ok(pointSize(20_000, 1) < pointSize(20_000, 30));
  assert.ok(pointSize(10, 1e6) <= 12);
});
