import assert from "node:assert/strict";
import { test } from "node:test";
import { PointIndex } from "../../../src/ropaws/explore/web/geometry.js";
import { clusterNames, placed } from "../../../src/ropaws/explore/web/map_names.js";
import { roomFor } from "../../../src/ropaws/explore/web/map_thumbnails.js";
import { random } from "./random.js";

const CLASSES = [
  { id: 4, name: "cat" },
  { id: 7, name: "a name that is longer than what is shown" },
  { id: 9, name: "of no image" },
];

/** Class 4 around (0, 0), class 7 around (10, 5) with some far away. */
function columns() {
  const draw = random(3);
  const n = 300;
  const predicted = Int16Array.from({ length: n }, (_, i) => (i % 3 ? 4 : 7));
  const near = () => draw() - 0.5;
  const x = Float32Array.from(predicted, (id, i) => near() + (id === 4 ? 0 : i % 30 === 0 ? -9 : 10));
  const y = Float32Array.from(predicted, (id) => near() + (id === 4 ? 0 : 5));
  return { n, x, y, predicted, label: new Int16Array(n).fill(-1) };
}

test("a name stands where its class is densest, the larger class first", () => {
  const found = clusterNames(columns(), "predicted", CLASSES);
  assert.deepEqual(
    found.map(({ text, count }) => [text, count]),
    [
      ["cat", 200],
      ["a name that is longer t…", 100],
    ],
  );
  for (const [k, [x, y]] of [
    [0, 0],
    [10, 5],
  ].entries()) {
    assert.ok(Math.hypot(found[k].x - x, found[k].y - y) < 0.8, `${found[k].x} ${found[k].y}`);
  }
});

test("colors that say nothing of classes have no names, and filtered images do not count", () => {
  const all = columns();
  assert.deepEqual(clusterNames(all, "confidence", CLASSES), []);
  assert.deepEqual(clusterNames(all, "label", CLASSES), []);
  const mask = Uint8Array.from(all.predicted, (id) => Number(id === 7));
  assert.deepEqual(
    clusterNames(all, "predicted", CLASSES, mask).map(({ count }) => count),
    [100],
  );
});

test("no name lies over another, nor over the edge", () => {
  const view = { x: 0, y: 0, scale: 1 };
  const size = { width: 200, height: 100 };
  const names = [
    [0, 0],
    [5, 3],
    [0, 30],
    [95, 0],
  ].map(([x, y], k) => ({ text: `${k}`, x, y, count: 9 - k }));
  const found = placed(names, view, size, () => 20);
  assert.deepEqual(
    found.map(({ text }) => text),
    ["0", "2"],
  );
});

test("thumbnails have a square each, and none is shown where too many images are in view", () => {
  const draw = random(5);
  const xs = Float32Array.from({ length: 5000 }, () => draw());
  const ys = Float32Array.from({ length: 5000 }, () => draw());
  const index = new PointIndex(xs, ys);
  const size = { width: 440, height: 440 };
  assert.deepEqual(
    roomFor(index, { x: 0.5, y: 0.5, scale: 440 }, size, () => true),
    [],
  );
  const near = { x: 0.5, y: 0.5, scale: 2000 };
  const found = roomFor(index, near, size, (i) => i % 2 === 0);
  assert.ok(found.length > 20);
  assert.equal(new Set(found.map(({ x, y }) => `${x} ${y}`)).size, found.length);
  for (const { id, x, y } of found) {
    assert.equal(id % 2, 0);
    assert.ok(
      Math.abs((xs[id] - 0.5) * 2000 + 220 - x) <= 22.5 && Math.abs((ys[id] - 0.5) * 2000 + 220 - y) <= 22.5,
    );
  }
});

test("points of a box are those that a loop finds", () => {
  const draw = random(9);
  const xs = Float32Array.from({ length: 800 }, () => draw());
  const ys = Float32Array.from({ length: 800 }, () => 2 * draw());
  const index = new PointIndex(xs, ys);
  for (let k = 0; k < 30; k++) {
    const [left, top] = [1.2 * draw() - 0.1, 2.2 * draw() - 0.1];
    const box = { left, right: left + 0.4 * draw(), top, bottom: top + 0.5 * draw() };
    const slow = [...xs.keys()].filter(
      (i) => xs[i] >= box.left && xs[i] <= box.right && ys[i] >= box.top && ys[i] <= box.bottom,
    );
    assert.deepEqual(
      index.within(box, 1000)?.sort((a, b) => a - b),
      slow,
    );
    if (slow.length) assert.equal(index.within(box, slow.length - 1), null);
  }
});
