import assert from "node:assert/strict";
import { test } from "node:test";
import { decodeColumns, parseVersion } from "../../../src/ropaws/explore/web/columns.js";
import {
  digitOf,
  fileName,
  interval,
  labelName,
  namesOf,
  percent,
  plural,
} from "../../../src/ropaws/explore/web/format.js";
import { isTyping, positionOf } from "../../../src/ropaws/explore/web/keys.js";
import { factsOf, limitsOf, pointsOf } from "../../../src/ropaws/explore/web/panel.js";
import { choicesOf } from "../../../src/ropaws/explore/web/picker.js";

test("digits and classes belong to each other: 1 is the first, 0 the tenth", () => {
  for (let k = 0; k < 10; k++) assert.equal(positionOf(digitOf(k)), k);
  assert.equal(digitOf(9), "0");
  assert.equal(digitOf(10), "");
  assert.equal(positionOf("x"), null);
  assert.equal(positionOf("12"), null);
});

test("keys belong to what is typed in, not to the page", () => {
  assert.ok(isTyping({ tagName: "INPUT", type: "search" }, "1"));
  assert.ok(isTyping({ tagName: "TEXTAREA" }, "o"));
  assert.ok(isTyping({ tagName: "SELECT" }, "c"));
  assert.ok(isTyping({ tagName: "BUTTON" }, "Enter"));
  assert.ok(isTyping({ tagName: "INPUT", type: "range" }, "ArrowLeft"));
  assert.ok(!isTyping({ tagName: "BUTTON" }, "1"));
  assert.ok(!isTyping({ tagName: "INPUT", type: "checkbox" }, "1"));
  assert.ok(!isTyping({ tagName: "BODY" }, "Enter"));
});

test("names of labels, files and numbers", () => {
  const classes = [{ id: 4, name: "cat" }];
  assert.deepEqual(
    [4, -1, -2, -3, 9].map((code) => labelName(code, classes)),
    ["cat", "unlabeled", "out-of-class", "skipped", "class 9"],
  );
  assert.equal(fileName("a/b c/d.jpg"), "d.jpg");
  assert.equal(fileName("a\\d.jpg"), "d.jpg");
  assert.equal(fileName("d.jpg"), "d.jpg");
  assert.equal(plural(1, "image"), "1 image");
  assert.equal(plural(12345, "image"), "12,345 images");
  assert.equal(percent(0.876), "88%");
  assert.equal(percent(null), "–");
  assert.equal(interval(0.701, 0.9), "70 to 90%");
  assert.equal(interval(null, 0.9), "");
  assert.deepEqual(namesOf(" cat \n\ndog\ncat\n"), ["cat", "dog"]);
});

test("the picker finds classes by any part of the name, and offers a new one", () => {
  const classes = ["tabby cat", "cat", "dog"].map((name, id) => ({ id, name }));
  assert.deepEqual(
    choicesOf("CAT", classes).map((c) => c.name),
    ["cat", "tabby cat"],
  );
  assert.deepEqual(choicesOf(" owl ", classes), [{ id: -1, name: "owl", isNew: true }]);
  assert.equal(choicesOf("", classes).length, 4); // with out-of-class
  assert.deepEqual(choicesOf("out", classes)[0], { id: -2, name: "out-of-class", isNew: false });
});

test("columns are read as the server writes them", () => {
  const n = 3;
  const buffer = new ArrayBuffer(16 * n);
  const view = new DataView(buffer);
  view.setFloat32(4 * 2, 1.5, true);
  view.setFloat32(4 * n, -2, true);
  view.setInt16(8 * n + 2, -2, true);
  view.setInt16(10 * n, 300, true);
  view.setUint8(12 * n, 255);
  view.setUint8(16 * n - 1, 1);
  const columns = decodeColumns(buffer);
  assert.deepEqual(
    [
      columns.x[2],
      columns.y[0],
      columns.predicted[1],
      columns.label[0],
      columns.confidence[0],
      columns.duplicate[2],
    ],
    [1.5, -2, -2, 300, 255, 1],
  );
  assert.throws(() => decodeColumns(new ArrayBuffer(17)), /17 bytes/);
});

test("a version may have dashes in its session", () => {
  assert.deepEqual(parseVersion("a-b-3-12-0"), { session: "a-b", revision: 3, model: 12, map: 0 });
  assert.throws(() => parseVersion("nonsense"), /not a version/);
});

const ROUND = {
  round: 1,
  labels: 4,
  accuracy: null,
  low: null,
  high: null,
  in_class: null,
  right: 0,
  answered: 0,
};

test("the chart leaves out rounds without an estimate, and its axis holds all intervals", () => {
  const points = pointsOf([ROUND, { ...ROUND, answers: 9, accuracy: 0.62, low: 0.41, high: 0.77 }]);
  assert.deepEqual(points, [{ answers: 9, accuracy: 0.62, low: 0.41, high: 0.77 }]);
  const [low, high] = limitsOf(points);
  assert.ok(low <= 0.41 && high >= 0.77);
  const flat = limitsOf([{ answers: 1, accuracy: 1, low: 1, high: 1 }]);
  assert.ok(flat[0] < flat[1] && flat[1] <= 1, String(flat));
});

test("the panel says what is known, and nothing else", () => {
  const panel = {
    rounds: [ROUND],
    few: [],
    estimate: null,
    audit: null,
    audit_offer: null,
    expected_in_class: null,
    frequencies: [],
  };
  assert.deepEqual(factsOf(panel), []);
  const last = { ...ROUND, in_class: 0.6, in_class_low: 0.5, in_class_high: 0.7, right: 14, answered: 20 };
  assert.deepEqual(factsOf({ ...panel, rounds: [ROUND, last], expected_in_class: 14.2 }), [
    ["In-class share", "60% (50 to 70%)"],
    ["Last round right", "14 of 20"],
    ["Suggested in-class", "about 14"],
  ]);
});
