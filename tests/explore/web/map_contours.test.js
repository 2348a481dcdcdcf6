import assert from "node:assert/strict";
import { test } from "node:test";
import { contours, isolines } from "../../../src/ropaws/explore/web/map_contours.js";
import { random } from "./random.js";

/** Two clouds, the second with a third of the images. @param {number} n */
function columns(n) {
  const draw = random(5);
  const normal = () => Math.sqrt(-2 * Math.log(1 - draw())) * Math.cos(2 * Math.PI * draw());
  const x = Float32Array.from({ length: n }, (_, i) => normal() + (i % 3 ? 0 : 12));
  const y = Float32Array.from({ length: n }, () => 0.5 * normal());
  return { n, x, y };
}

/** Inside by the even-odd rule: a ray to the right crosses the lines an odd number of times. */
function isInside(segments, x, y) {
  let odd = false;
  for (let at = 0; at < segments.length; at += 4) {
    const [x1, y1, x2, y2] = segments.subarray(at, at + 4);
    if (y1 > y !== y2 > y && x < x1 + ((y - y1) / (y2 - y1)) * (x2 - x1)) odd = !odd;
  }
  return odd;
}

test("a contour is around its share of the images", () => {
  const given = columns(4000);
  const found = contours(given);
  assert.deepEqual(
    found.map(({ share }) => share),
    [0.25, 0.5, 0.75, 0.95],
  );
  for (const { share, segments } of found) {
    let inside = 0;
    for (let i = 0; i < given.n; i++) inside += Number(isInside(segments, given.x[i], given.y[i]));
    assert.ok(Math.abs(inside / given.n - share) < 0.05, `${inside / given.n} instead of ${share}`);
  }
});

test("images that a filter leaves out do not count", () => {
  const given = columns(4000);
  const mask = Uint8Array.from({ length: given.n }, (_, i) => Number(i % 3 === 0));
  for (const { segments } of contours(given, mask)) {
    assert.ok(segments.length > 20);
    for (let at = 0; at < segments.length; at += 2) assert.ok(segments[at] > 6, `${segments[at]}`);
  }
  assert.deepEqual(contours(given, new Uint8Array(given.n)), []);
  assert.deepEqual(contours({ n: 0, x: new Float32Array(), y: new Float32Array() }), []);
});

test("a line of equal density goes straight between the points of the grid", () => {
  const slope = Float32Array.from({ length: 16 }, (_, at) => at % 4); // rises by 1 a column
  const found = isolines(slope, 4, 1.25);
  assert.equal(found.length, 4 * 3);
  for (let at = 0; at < found.length; at += 2) assert.equal(found[at], 1.25);
});
