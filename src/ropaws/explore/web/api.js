/**
 * What the server says and is told: one function per kind of request, and the shapes of the answers.
 *
 * @typedef {{id: number, name: string, labels: number, predicted: number}} ClassInfo
 * @typedef {"features" | "refit" | "map" | "export" | "train"} JobKind
 * @typedef {{kind: JobKind, text: string, fraction: number | null, cancellable: boolean}} Job
 * @typedef {{
 *   round: number, answers?: number, labels: number, accuracy: number | null, low: number | null, high: number | null,
 *   kind: string | null, in_class: number | null, in_class_low: number | null, in_class_high: number | null,
 *   right: number | null, answered: number | null, seconds: number,
 * }} Round
 * @typedef {{
 *   accuracy: number | null, low: number | null, high: number | null, labels: number, kind: string,
 *   overall: number | null, overall_low: number | null, overall_high: number | null,
 *   overall_labels: number | null, overall_kind: string | null,
 * }} Estimate
 * @typedef {{
 *   rounds: Round[],
 *   few: {id: number, name: string, labels: number, wanted: number}[],
 *   estimate: Estimate | null,
 *   audit: {answered: number, of: number, within: number, right: number, predicted: number} | null,
 *   audit_offer: {images: number, within: number} | null,
 *   expected_in_class: number | null,
 *   frequencies: Frequency[],
 * }} Panel
 * @typedef {{id: number, name: string, estimate: number, low: number, high: number}} Frequency - of a class
 * @typedef {{
 *   labeled: number, out_of_class: number, outside: number, skipped: number, unlabeled: number,
 *   suspected: number, duplicates: number, suggested: number, audit: number,
 * }} Counts
 * @typedef {{name: string, round: number, pending: number, stale: boolean}} Written - an export
 * @typedef {{
 *   session: string, title: string, read_only: boolean, images: number,
 *   revision: number, round: number, model_version: number, map_version: number, pool?: string,
 *   classes: ClassInfo[], counts: Counts, job: Job | null,
 *   error: string | null, failures: number, notice: string | null, undo: string | null,
 *   auto_refit: boolean, pending: number, panel: Panel,
 *   outputs: {labels_csv: string, folder: string, run: string | null, report: boolean, written: Written[]},
 * }} State
 * @typedef {{
 *   id: number, name: string, label: number, predicted: number, confidence: number, in_domain: number,
 *   note: string | null, group: number | null, suggest?: number | null,
 * }} Item
 * @typedef {{total: number, offset: number, items: Item[]}} Page
 * @typedef {{
 *   id: number, name: string, label: number, width: number, height: number,
 *   probs: {id: number, name: string, p: number}[], in_domain: number,
 *   nearest: {id: number, name: string, label: number, similarity: number}[], note: string | null,
 * }} Detail
 * @typedef {{cluster: number, size: number, typical: number[]}} Cluster
 */

const PATIENCE_MS = 60_000;

/** A request that the server refused, with its reason in one line. */
export class Refused extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A request that never reached the server. */
export class Away extends Error {}

/** @param {Response} response @returns {Promise<Refused>} */
async function refusal(response) {
  const fallback = `the server answered with status ${response.status}`;
  const body = await response.json().catch(() => ({}));
  return new Refused(response.status, typeof body.error === "string" ? body.error : fallback);
}

export class Api {
  /** @param {string} client - the id of this tab: undo is per tab */
  constructor(client) {
    this.client = client;
  }

  /** @param {string} path @param {RequestInit} [options] @returns {Promise<Response>} */
  async request(path, options = {}) {
    let response;
    try {
      response = await fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), ...options });
    } catch (error) {
      throw new Away(String(error));
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /** @param {string} path @returns {Promise<any>} */
  async get(path) {
    return (await this.request(path)).json();
  }

  /** @param {string} path @param {object} [body] @returns {Promise<any>} */
  async post(path, body = {}) {
    const headers = { "Content-Type": "application/json", "X-Ropaws-Client": this.client };
    return (await this.request(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  /** @returns {Promise<State>} */
  state() {
    return this.get(`/api/state?client=${encodeURIComponent(this.client)}`);
  }

  /** @param {object} query @returns {Promise<Page>} */
  images(query) {
    return this.post("/api/images", query);
  }

  /** @param {number} id @returns {Promise<Detail>} */
  image(id) {
    return this.get(`/api/images/${id}`);
  }

  /** @returns {Promise<Cluster[]>} */
  newClasses() {
    return this.get("/api/new-classes");
  }

  /**
   * Sixteen bytes for each image, as they come.
   *
   * @param {(share: number) => void} progress - told what share of them is here
   * @returns {Promise<{buffer: ArrayBuffer, version: string}>}
   */
  async columns(progress = () => {}) {
    const stop = new AbortController();
    let timer = setTimeout(() => stop.abort(), PATIENCE_MS); // for each part, however many there are
    const response = await this.request("/api/columns", { signal: stop.signal });
    const version = response.headers.get("X-Ropaws-Version") ?? "";
    const bytes = new Uint8Array(Number(response.headers.get("Content-Length")));
    const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
    for (let at = 0; ; ) {
      const { done, value } = await reader.read().catch((error) => {
        throw new Away(String(error));
      });
      clearTimeout(timer);
      if (!done && at + value.length <= bytes.length) bytes.set(value, at);
      at += value?.length ?? 0;
      if (done && at !== bytes.length) throw new Away(`${at} of ${bytes.length} bytes came`);
      if (done) return { buffer: bytes.buffer, version };
      timer = setTimeout(() => stop.abort(), PATIENCE_MS);
      progress(at / bytes.length);
    }
  }
}
