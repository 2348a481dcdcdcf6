/**
 * Which images the grid lists, and in which order.
 *
 * @import { Columns } from "./columns.js"
 * @typedef {"all" | "suggested" | "unlabeled" | "labeled" | "out-of-class" | "label-errors" | "duplicates"
 *   | "new-class" | "audit" | "skipped"} ViewName
 * @typedef {"suggested" | "confidence" | "in_domain" | "name" | "suspected" | "number"} SortName
 * @typedef {{
 *   view: ViewName, class: number | null, confidence: [number, number], inDomain: [number, number],
 *   text: string, ids: number[] | null, cluster: number | null,
 *   like: {id: number, name: string} | null, sort: SortName, descending: boolean,
 * }} Filter
 */
import { OUT_OF_CLASS, SKIPPED, UNLABELED, fileName, labelName, plural } from "./format.js";

export const PAGE = 60; // images of the grid at a time

/** @type {Record<ViewName, string>} */
export const VIEW_NAMES = {
  suggested: "Suggested next",
  all: "All images",
  unlabeled: "Unlabeled",
  labeled: "Labeled",
  "out-of-class": "Out-of-class",
  "label-errors": "Suspected label errors",
  duplicates: "Near duplicates",
  "new-class": "New classes",
  audit: "Audit sample",
  skipped: "Skipped",
};

/** @type {Record<SortName, string>} */
export const SORT_NAMES = {
  suggested: "view’s order",
  confidence: "confidence",
  in_domain: "in-domain probability",
  name: "file name",
  suspected: "most suspected",
  number: "image number",
};

/** Views from which an image goes away once it is answered. @type {ReadonlySet<ViewName>} */
export const SHRINKING = new Set(["suggested", "unlabeled", "label-errors", "new-class", "audit", "skipped"]);

/**
 * Views that are worked through: the cursor goes from one unlabeled image to the next.
 *
 * @type {ReadonlySet<ViewName>}
 */
export const QUEUES = new Set(["suggested", "unlabeled", "audit"]);

/** @param {ViewName} view @returns {Filter} */
export function filterOf(view) {
  /** @type {Partial<Record<ViewName, SortName>>} */
  const sorts = {
    suggested: "suggested",
    "label-errors": "suspected",
    duplicates: "suggested",
    "new-class": "suggested",
    audit: "suggested",
  };
  return {
    view,
    class: null,
    confidence: [0, 1],
    inDomain: [0, 1],
    text: "",
    ids: null,
    cluster: null,
    like: null,
    sort: sorts[view] ?? "number",
    descending: false,
  };
}

/** What the server is asked for. @param {Filter} filter @param {number} offset @param {number} limit */
export function queryOf(filter, offset, limit) {
  /** @type {Record<string, unknown>} */
  const query = { view: filter.view, sort: filter.sort, descending: filter.descending, offset, limit };
  if (filter.class !== null) query.class = filter.class;
  if (filter.cluster !== null) query.cluster = filter.cluster;
  if (filter.like !== null) query.like = filter.like.id;
  if (filter.ids !== null) query.ids = filter.ids;
  if (filter.text.trim()) query.text = filter.text.trim();
  if (!isWhole(filter.confidence)) query.confidence = filter.confidence;
  if (!isWhole(filter.inDomain)) query.in_domain = filter.inDomain;
  return query;
}

/** @param {[number, number]} range */
function isWhole(range) {
  return range[0] <= 0 && range[1] >= 1;
}

/**
 * The images that the filter keeps, as far as the columns tell; null if it keeps all of them.
 * The views that only the server knows (suggested, audit, new classes) and file names keep all here.
 *
 * @param {Filter} filter @param {Columns} columns @returns {Uint8Array | null}
 */
export function maskOf(filter, columns) {
  const tests = testsOf(filter, columns);
  if (!tests.length && !filter.ids) return null;
  const mask = new Uint8Array(columns.n).fill(filter.ids ? 0 : 1);
  for (const i of filter.ids ?? []) mask[i] = 1;
  for (const test of tests) for (let i = 0; i < columns.n; i++) if (mask[i] && !test(i)) mask[i] = 0;
  return mask;
}

/** @param {Filter} filter @param {Columns} columns @returns {((i: number) => boolean)[]} */
function testsOf(filter, columns) {
  const { label, predicted, confidence, inDomain, suspected, duplicate } = columns;
  /** @type {Partial<Record<ViewName, (i: number) => boolean>>} */
  const views = {
    unlabeled: (i) => label[i] === UNLABELED,
    labeled: (i) => label[i] >= 0,
    "out-of-class": (i) => label[i] === OUT_OF_CLASS || (label[i] < 0 && predicted[i] === OUT_OF_CLASS),
    skipped: (i) => label[i] === SKIPPED,
    "label-errors": (i) => suspected[i] === 1,
    duplicates: (i) => duplicate[i] === 1,
  };
  const tests = [];
  const ofView = views[filter.view];
  if (ofView) tests.push(ofView);
  if (filter.class !== null) tests.push((/** @type {number} */ i) => predicted[i] === filter.class);
  if (!isWhole(filter.confidence)) tests.push(within(confidence, filter.confidence));
  if (!isWhole(filter.inDomain)) tests.push(within(inDomain, filter.inDomain));
  return tests;
}

/** @param {Uint8Array} bytes @param {[number, number]} range @returns {(i: number) => boolean} */
function within(bytes, [low, high]) {
  const isInside = (/** @type {number} */ v) => v / 255 >= low - 0.002 && v / 255 <= high + 0.002;
  const kept = Uint8Array.from({ length: 256 }, (_, v) => Number(isInside(v))); // a byte is 0.004 wide
  return (i) => kept[bytes[i]] === 1;
}

/** @param {Filter} filter @param {{id: number, name: string}[]} classes */
export function describe(filter, classes) {
  if (filter.like) return `More like ${fileName(filter.like.name)}`;
  const parts = [filter.ids ? `Selection of ${plural(filter.ids.length, "image")}` : VIEW_NAMES[filter.view]];
  if (filter.class !== null) parts.push(`predicted ${labelName(filter.class, classes)}`);
  if (filter.cluster !== null) parts.push(`cluster ${filter.cluster + 1}`);
  if (!isWhole(filter.confidence)) parts.push(`confidence ${range(filter.confidence)}`);
  if (!isWhole(filter.inDomain)) parts.push(`in-domain ${range(filter.inDomain)}`);
  if (filter.text.trim()) parts.push(`name has “${filter.text.trim()}”`);
  return parts.join(", ");
}

/** @param {[number, number]} range */
function range([low, high]) {
  return `${Math.round(100 * low)} to ${Math.round(100 * high)}%`;
}
