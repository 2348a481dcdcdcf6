import assert from "node:assert/strict";
import { test } from "node:test";
import {
  PointIndex,
  bounds,
  fit,
  insideOf,
  lassoed,
  pan,
  toPixels,
  toPosition,
  zoomAt,
} from "../../../src/ropaws/explore/web/geometry.js";
import { near, random } from "./random.js";

const SIZE = { width: 640, height: 400 };
const LIMITS = { least: 1e-3, most: 1e6 };

/** Distance of each point, one after another: the slow way. */
function nearestSlowly(xs, ys, x, y, reach, wanted = () => true) {
  const far = xs.map((_, i) => (wanted(i) ? Math.hypot(xs[i] - x, ys[i] - y) : Infinity));
  const least = Math.min(...far);
  return least <= reach ? least : null;
}

/** Whether a point is inside, by the angles under which it sees the corners. */
function windsAround(polygon, x, y) {
  let turn = 0;
  for (const [k, [ax, ay]] of polygon.entries()) {
    const [bx, by] = polygon[(k + 1) % polygon.length];
    const angle = Math.atan2(by - y, bx - x) - Math.atan2(ay - y, ax - x);
    turn += Math.atan2(Math.sin(angle), Math.cos(angle));
  }
  return Math.abs(turn) > Math.PI;
}

test("a pixel and its position belong to each other, wherever the view is", () => {
  const draw = random(1);
  for (let k = 0; k < 200; k++) {
    const view = { x: draw() * 10 - 5, y: draw() * 10 - 5, scale: 1 + 500 * draw() };
    const [px, py] = [draw() * 640, draw() * 400];
    const back = toPixels(view, SIZE, ...toPosition(view, SIZE, px, py));
    near(back[0], px, 1e-6);
    near(back[1], py, 1e-6);
  }
});

test("zooming keeps the position under the pointer, and its scale within the limits", () => {
  const draw = random(2);
  for (let k = 0; k < 200; k++) {
    const view = { x: draw(), y: draw(), scale: 10 + 90 * draw() };
    const [px, py] = [draw() * 640, draw() * 400];
    const before = toPosition(view, SIZE, px, py);
    const after = toPosition(zoomAt(view, SIZE, px, py, 0.2 + 4 * draw(), LIMITS), SIZE, px, py);
    near(after[0], before[0], 1e-9);
    near(after[1], before[1], 1e-9);
  }
  assert.equal(zoomAt({ x: 0, y: 0, scale: 50 }, SIZE, 0, 0, 1e9, { least: 1, most: 80 }).scale, 80);
  assert.equal(zoomAt({ x: 0, y: 0, scale: 50 }, SIZE, 0, 0, 1e-9, { least: 7, most: 80 }).scale, 7);
});

test("panning moves every point by the same pixels", () => {
  const view = { x: 1, y: 2, scale: 30 };
  const [ax, ay] = toPixels(view, SIZE, 3, 4);
  const [bx, by] = toPixels(pan(view, 25, -40), SIZE, 3, 4);
  near(bx - ax, 25, 1e-9);
  near(by - ay, -40, 1e-9);
});

test("the fitted view shows all points inside the margin", () => {
  const draw = random(3);
  const xs = Array.from({ length: 50 }, () => 100 * draw() - 30);
  const ys = Array.from({ length: 50 }, () => 7 * draw());
  const view = fit(bounds(xs, ys), SIZE, 16);
  const pixels = xs.map((x, i) => toPixels(view, SIZE, x, ys[i]));
  for (const [px, py] of pixels) assert.ok(px >= 15.99 && px <= 624.01 && py >= 15.99 && py <= 384.01);
  near(Math.min(...pixels.map((p) => p[0])), 16, 1e-6); // as large as it can be
});

test("a view of one point, or of none, is finite", () => {
  for (const xs of [[2], []]) {
    const view = fit(bounds(xs, xs), SIZE);
    assert.ok(Object.values(view).every(Number.isFinite));
  }
});

test("the index finds the nearest point that a search of all points finds", () => {
  const draw = random(4);
  for (const n of [1, 2, 17, 500]) {
    const xs = Array.from({ length: n }, () => 4 * draw() ** 3 - 2);
    const ys = Array.from({ length: n }, () => 3 * draw());
    const index = new PointIndex(xs, ys);
    for (let k = 0; k < 200; k++) {
      const [x, y, reach] = [6 * draw() - 3, 5 * draw() - 1, draw()];
      const wanted = (i) => i % 3 !== 1;
      const found = index.nearest(x, y, reach, wanted);
      const least = nearestSlowly(xs, ys, x, y, reach, wanted);
      assert.equal(found === null, least === null);
      if (found !== null) near(Math.hypot(xs[found] - x, ys[found] - y), least, 1e-12);
    }
  }
});

test("points on top of each other are found", () => {
  const index = new PointIndex([1, 1, 1], [5, 5, 5]);
  assert.equal(
    index.nearest(1, 5, 0.1, (i) => i === 2),
    2,
  );
  assert.equal(index.nearest(1, 6, 0.1), null);
});

test("inside agrees with the winding angle on polygons that do not cross themselves", () => {
  const draw = random(5);
  for (let k = 0; k < 100; k++) {
    const corners = 3 + Math.floor(8 * draw());
    const star = Array.from({ length: corners }, (_, c) => {
      const angle = (2 * Math.PI * c) / corners;
      const radius = 0.3 + draw();
      return [radius * Math.cos(angle), radius * Math.sin(angle)];
    });
    for (let p = 0; p < 30; p++) {
      const [x, y] = [2.6 * draw() - 1.3, 2.6 * draw() - 1.3];
      assert.equal(insideOf(star)(x, y), windsAround(star, x, y));
    }
  }
});

test("a lasso takes the wanted points inside it", () => {
  const square = [
    [0, 0],
    [2, 0],
    [2, 2],
    [0, 2],
  ];
  const [xs, ys] = [
    [1, 1.5, 3, -1, 0.5],
    [1, 0.5, 1, 1, 1.9],
  ];
  assert.deepEqual(lassoed(square, xs, ys), [0, 1, 4]);
  assert.deepEqual(
    lassoed(square, xs, ys, (i) => i !== 1),
    [0, 4],
  );
  assert.deepEqual(lassoed(square.slice(0, 2), xs, ys), []);
});
