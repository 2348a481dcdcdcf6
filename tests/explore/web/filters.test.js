import assert from "node:assert/strict";
import { test } from "node:test";
import { describe, filterOf, maskOf, queryOf } from "../../../src/ropaws/explore/web/filters.js";
import { emptyColumns } from "./random.js";

const CLASSES = [{ id: 7, name: "<b>coat</b>" }];

test("a query has only what narrows it", () => {
  assert.deepEqual(queryOf(filterOf("suggested"), 60, 60), {
    view: "suggested",
    sort: "suggested",
    descending: false,
    offset: 60,
    limit: 60,
  });
  const filter = { ...filterOf("all"), class: 0, text: "  a b ", cluster: 0, ids: [], inDomain: [0.2, 1] };
  const query = queryOf(filter, 0, 10);
  assert.equal(query.class, 0);
  assert.equal(query.cluster, 0);
  assert.deepEqual(query.ids, []); // an empty selection is not all images
  assert.equal(query.text, "a b");
  assert.deepEqual(query.in_domain, [0.2, 1]);
  assert.ok(!("confidence" in query));
});

test("a view that orders its images itself is asked for in that order", () => {
  for (const view of ["suggested", "duplicates", "new-class", "audit"])
    assert.equal(filterOf(view).sort, "suggested");
  assert.equal(filterOf("label-errors").sort, "suspected");
});

test("the mask follows each view and range, and their combination", () => {
  const columns = emptyColumns(5);
  columns.label.set([7, -2, -3, -1, -1]);
  columns.predicted.set([7, 7, 7, 7, -2]);
  columns.confidence.set([255, 128, 0, 255, 255]);
  columns.inDomain.set([255, 255, 255, 26, 0]);
  columns.suspected[0] = 1;
  columns.duplicate[3] = 1;
  const kept = (change) => {
    const mask = maskOf({ ...filterOf("all"), ...change }, columns);
    return mask && [...mask].flatMap((on, i) => (on ? [i] : []));
  };
  assert.equal(kept({}), null);
  assert.equal(kept({ view: "suggested" }), null);
  assert.deepEqual(kept({ view: "labeled" }), [0]);
  assert.deepEqual(kept({ view: "out-of-class" }), [1, 4]);
  assert.deepEqual(kept({ view: "skipped" }), [2]);
  assert.deepEqual(kept({ view: "unlabeled" }), [3, 4]);
  assert.deepEqual(kept({ view: "label-errors" }), [0]);
  assert.deepEqual(kept({ view: "duplicates" }), [3]);
  assert.deepEqual(kept({ class: -2 }), [4]);
  assert.deepEqual(kept({ class: 7, confidence: [0.9, 1] }), [0, 3]);
  assert.deepEqual(kept({ confidence: [0.5, 0.5] }), [1]); // 128 of 255 is a half, up to rounding
  assert.deepEqual(kept({ inDomain: [0, 0.1] }), [3, 4]);
  assert.deepEqual(kept({ ids: [4, 1] }), [1, 4]);
  assert.deepEqual(kept({ ids: [] }), []);
});

test("a filter is described in words", () => {
  const filter = { ...filterOf("all"), class: 7, confidence: [0.5, 1], text: "x" };
  assert.equal(
    describe(filter, CLASSES),
    "All images, predicted <b>coat</b>, confidence 50 to 100%, name has “x”",
  );
  assert.equal(describe({ ...filterOf("all"), ids: [1] }, CLASSES), "Selection of 1 image");
});
