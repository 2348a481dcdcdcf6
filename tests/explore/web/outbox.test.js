import assert from "node:assert/strict";
import { test } from "node:test";
import { Away, Refused } from "../../../src/ropaws/explore/web/api.js";
import { Outbox, apply, bodyOf, renumbered, takeBack } from "../../../src/ropaws/explore/web/outbox.js";
import { emptyColumns, random } from "./random.js";

function storage(content = {}) {
  return {
    content,
    getItem: (key) => content[key] ?? null,
    setItem: (key, text) => (content[key] = text),
    removeItem: (key) => delete content[key],
  };
}

function answer(ids, label, columns, more = {}) {
  const names = ids.map((id) => `${id}.jpg`);
  const before = ids.map((id) => columns?.label[id] ?? -1);
  const path = label === null ? "/api/confirm" : "/api/labels";
  return { path, ids, label, why: "grid", text: "t", names, session: "s1", pool: null, before, ...more };
}

const never = () => assert.fail("nothing was to be refused");

test("answers are sent in order, each once, and the store is then empty", async () => {
  const kept = storage();
  const outbox = new Outbox(kept, "k");
  for (const id of [3, 1, 2]) outbox.add(answer([id], 0));
  const sent = [];
  assert.equal(await outbox.flush(async (a) => void sent.push(a.ids[0]), never), null);
  assert.deepEqual(sent, [3, 1, 2]);
  assert.deepEqual(kept.content, {});
});

test("an answer given while another is on its way is sent by the same flush", async () => {
  const outbox = new Outbox(storage(), "k");
  outbox.add(answer([1], 0));
  const sent = [];
  await outbox.flush(async (a) => {
    sent.push(a.ids[0]);
    if (a.ids[0] === 1) {
      outbox.add(answer([2], 0));
      await outbox.flush(never, never); // a second flush does not send it twice
    }
  }, never);
  assert.deepEqual(sent, [1, 2]);
});

test("while the server is away answers wait, also over a reload", async () => {
  const kept = storage();
  const outbox = new Outbox(kept, "k");
  outbox.add(answer([1], 4));
  outbox.add(answer([2], 5));
  const reason = await outbox.flush(async () => {
    throw new Away("gone");
  }, never);
  assert.ok(reason instanceof Away);
  const reloaded = new Outbox(kept, "k");
  const sent = [];
  await reloaded.flush(async (a) => void sent.push([a.ids[0], a.label]), never);
  assert.deepEqual(sent, [[1, 4], [2, 5]]); // prettier-ignore
});

for (const status of [401, 503, 507]) {
  test(`status ${status} keeps the answer for later`, async () => {
    const outbox = new Outbox(storage(), "k");
    outbox.add(answer([1], 0));
    const reason = await outbox.flush(async () => {
      throw new Refused(status, "not now");
    }, never);
    assert.equal(reason?.status, status);
    assert.equal(outbox.answers.length, 1);
  });
}

test("a refused answer leaves the outbox, and the later ones are still sent", async () => {
  const outbox = new Outbox(storage(), "k");
  for (const id of [1, 2, 3]) outbox.add(answer([id], 0));
  const [sent, refused] = [[], []];
  await outbox.flush(
    async (a) => {
      if (a.ids[0] === 2) throw new Refused(409, "read-only");
      sent.push(a.ids[0]);
    },
    (a, error) => refused.push([a.ids[0], error.message]),
  );
  assert.deepEqual(sent, [1, 3]);
  assert.deepEqual(refused, [[2, "read-only"]]);
});

test("a mistake in the page is not hidden as an answer that waits", async () => {
  const outbox = new Outbox(storage(), "k");
  outbox.add(answer([1], 0));
  const broken = async () => {
    throw new TypeError("a bug");
  };
  await assert.rejects(outbox.flush(broken, never), TypeError);
  assert.equal(outbox.sending, false);
});

test("undo takes back the last answer that waits, never the one that is being sent", async () => {
  const outbox = new Outbox(storage(), "k");
  assert.equal(outbox.dropLast(), null);
  outbox.add(answer([1], 0));
  outbox.add(answer([2], 0));
  await outbox.flush(async () => {
    if (outbox.answers.length === 2) assert.deepEqual(outbox.dropLast()?.ids, [2]);
    assert.equal(outbox.dropLast(), null);
  }, never);
  outbox.add(answer([3], 0));
  assert.deepEqual(outbox.dropLast()?.ids, [3]);
});

test("answers of a closed tab are adopted, before the own ones", () => {
  const kept = storage();
  new Outbox(kept, "other").add(answer([7], 0));
  const outbox = new Outbox(kept, "own");
  outbox.add(answer([8], 0));
  outbox.adopt("other");
  assert.deepEqual(outbox.answers.map((a) => a.ids[0]), [7, 8]); // prettier-ignore
  assert.deepEqual(Object.keys(kept.content), ["own"]);
});

test("without room in the browser answers live on in the page, which says so", () => {
  const full = storage();
  full.setItem = () => {
    throw new Error("quota exceeded");
  };
  const outbox = new Outbox(full, "k");
  outbox.add(answer([1], 0));
  assert.equal(outbox.kept, false);
  assert.equal(outbox.answers.length, 1);
});

test("taking back any answer leaves the labels as if it had never been given", () => {
  const draw = random(6);
  const pick = (n) => Math.floor(draw() * n);
  for (let k = 0; k < 100; k++) {
    const columns = emptyColumns(6);
    const given = [];
    for (let a = 0; a < 5; a++) {
      const ids = [...new Set([pick(6), pick(6)])];
      given.push(answer(ids, pick(4) - 2, columns));
      apply(columns, given[a]);
    }
    const gone = pick(5);
    takeBack(columns, given[gone], given.slice(gone + 1));
    const wanted = emptyColumns(6);
    given.forEach((a, place) => place === gone || apply(wanted, a));
    assert.deepEqual([...columns.label], [...wanted.label]);
  }
});

test("a confirmed label keeps its class and is suspected no more", () => {
  const columns = emptyColumns(2);
  columns.label.set([3, 3]);
  columns.suspected.set([1, 1]);
  apply(columns, answer([0], null, columns));
  assert.deepEqual([...columns.label], [3, 3]);
  assert.deepEqual([...columns.suspected], [0, 1]);
  assert.deepEqual(bodyOf(answer([0], null)), { ids: [0] });
  assert.deepEqual(bodyOf(answer([0], -3)), { ids: [0], label: -3, why: "grid" });
});

test("in the same session, or over the same pool, numbers stay", async () => {
  const lookUp = () => assert.fail("no name was to be looked up");
  const same = answer([4], 1);
  assert.deepEqual(await renumbered(same, { session: "s1" }, lookUp), { answer: same, lost: 0 });
  const pooled = answer([4], 1, undefined, { pool: "p" });
  assert.deepEqual(await renumbered(pooled, { session: "s2", pool: "p" }, lookUp), {
    answer: pooled,
    lost: 0,
  });
});

test("in another session images are found by name, and those that are gone are counted", async () => {
  const now = { "4.jpg": 40, "6.jpg": 60 };
  const old = answer([4, 5, 6], 1, undefined, { names: ["4.jpg", null, "6.jpg"], before: [7, 8, 9] });
  const { answer: found, lost } = await renumbered(old, { session: "s2" }, async (name) => now[name] ?? null);
  assert.deepEqual(found.ids, [40, 60]);
  assert.deepEqual(found.before, [7, 9]);
  assert.equal(found.session, "s2");
  assert.equal(lost, 1);
});
