import assert from "node:assert/strict";

/** Numbers from 0 to 1, the same in every run (mulberry32). */
export function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

export function near(found, wanted, tolerance) {
  assert.ok(Math.abs(found - wanted) <= tolerance, `${found} is not within ${tolerance} of ${wanted}`);
}

/** Columns of n images without labels or predictions. */
export function emptyColumns(n) {
  return {
    n,
    x: new Float32Array(n),
    y: new Float32Array(n),
    predicted: new Int16Array(n).fill(-1),
    label: new Int16Array(n).fill(-1),
    confidence: new Uint8Array(n),
    inDomain: new Uint8Array(n),
    suspected: new Uint8Array(n),
    duplicate: new Uint8Array(n),
  };
}
