/**
 * A few numbers for every image, in typed arrays: what the map draws, and what labels are known.
 *
 * @typedef {{
 *   n: number, x: Float32Array, y: Float32Array, predicted: Int16Array, label: Int16Array,
 *   confidence: Uint8Array, inDomain: Uint8Array, suspected: Uint8Array, duplicate: Uint8Array,
 * }} Columns
 * @typedef {{session: string, revision: number, model: number, map: number}} Version
 */

const BYTES = 4 + 4 + 2 + 2 + 1 + 1 + 1 + 1;

/** @param {ArrayBuffer} buffer - little endian, as the machines that run browsers are @returns {Columns} */
export function decodeColumns(buffer) {
  const n = buffer.byteLength / BYTES;
  if (!Number.isInteger(n))
    throw new Error(`columns of ${buffer.byteLength} bytes are not ${BYTES} per image`);
  return {
    n,
    x: new Float32Array(buffer, 0, n),
    y: new Float32Array(buffer, 4 * n, n),
    predicted: new Int16Array(buffer, 8 * n, n),
    label: new Int16Array(buffer, 10 * n, n),
    confidence: new Uint8Array(buffer, 12 * n, n),
    inDomain: new Uint8Array(buffer, 13 * n, n),
    suspected: new Uint8Array(buffer, 14 * n, n),
    duplicate: new Uint8Array(buffer, 15 * n, n),
  };
}

/**
 * @param {string} text - "session-revision-model-map", where the session may have dashes
 * @returns {Version}
 */
export function parseVersion(text) {
  const parts = /^(.*)-(\d+)-(\d+)-(\d+)$/.exec(text);
  if (!parts) throw new Error(`"${text}" is not a version of columns`);
  return { session: parts[1], revision: Number(parts[2]), model: Number(parts[3]), map: Number(parts[4]) };
}
