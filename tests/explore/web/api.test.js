import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { Api, Away } from "../../../src/ropaws/explore/web/api.js";

const real = globalThis.fetch;
afterEach(() => (globalThis.fetch = real));

/** A server that sends these parts of columns. @param {number[][]} parts @param {number} length */
function serve(parts, length) {
  globalThis.fetch = async () =>
    new Response(
      new ReadableStream({
        start(stream) {
          for (const part of parts) stream.enqueue(Uint8Array.from(part));
          stream.close();
        },
      }),
      { headers: { "X-Ropaws-Version": "abc-1-2-3", "Content-Length": String(length) } },
    );
}

test("columns come in parts, and the share that is here is said", async () => {
  serve([[1, 2, 3], [4], [5, 6, 7, 8]], 8);
  /** @type {number[]} */
  const shares = [];
  const { buffer, version } = await new Api("tab").columns((share) => shares.push(share));
  assert.deepEqual([...new Uint8Array(buffer)], [1, 2, 3, 4, 5, 6, 7, 8]);
  assert.equal(version, "abc-1-2-3");
  assert.deepEqual(shares, [3 / 8, 4 / 8, 1]);
});

test("columns that are cut, or longer than they said, are asked for again", async () => {
  for (const length of [9, 7]) {
    serve(
      [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
      ],
      length,
    );
    await assert.rejects(new Api("tab").columns(), Away);
  }
});
