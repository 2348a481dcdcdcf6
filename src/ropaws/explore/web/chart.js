/** Estimated accuracy over the rounds, as a line with its interval. @import { Round } from "./api.js" */
import { svg } from "./dom.js";
import { count, interval, percent, plural } from "./format.js";

const WIDTH = 270;
const HEIGHT = 130;
const PLOT = { left: 34, right: WIDTH - 8, top: 8, bottom: HEIGHT - 30 };

/** @typedef {{labels: number, accuracy: number, low: number, high: number}} Point */

/** The rounds that have an estimate. @param {Round[]} rounds @returns {Point[]} */
export function pointsOf(rounds) {
  return rounds.flatMap(({ labels, accuracy, low, high }) =>
    accuracy === null ? [] : [{ labels, accuracy, low: low ?? accuracy, high: high ?? accuracy }],
  );
}

/**
 * Rounded limits around the intervals: an axis from 0 would hide the change.
 *
 * @param {Point[]} points
 * @returns {[number, number]}
 */
export function limitsOf(points) {
  const high = Math.min(1, Math.ceil(10 * Math.max(...points.map((p) => p.high))) / 10);
  const low = Math.max(0, Math.floor(10 * Math.min(...points.map((p) => p.low))) / 10);
  return low < high ? [low, high] : low > 0 ? [low - 0.1, high] : [0, 0.1];
}

/** @param {Round[]} rounds @returns {SVGElement | null} */
export function accuracyChart(rounds) {
  const points = pointsOf(rounds);
  if (!points.length) return null;
  const [low, high] = limitsOf(points);
  const most = Math.max(...points.map((p) => p.labels));
  const x = (/** @type {Point} */ p) => PLOT.left + ((PLOT.right - PLOT.left) * p.labels) / Math.max(1, most);
  const y = (/** @type {number} */ share) =>
    PLOT.bottom - ((PLOT.bottom - PLOT.top) * (share - low)) / (high - low);
  const path = (/** @type {[number, number][]} */ at) =>
    at.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ");
  const upper = points.map((p) => /** @type {[number, number]} */ ([x(p), y(p.high)]));
  const lower = points.map((p) => /** @type {[number, number]} */ ([x(p), y(p.low)])).reverse();
  const last = points[points.length - 1];
  const now = `${percent(last.accuracy)}, ${interval(last.low, last.high)}`;
  const spoken = `Estimated accuracy over rounds: now ${now}, with ${plural(last.labels, "label")}`;
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": spoken },
    ...[low, (low + high) / 2, high].flatMap((share) => [
      svg("line", { x1: PLOT.left, x2: PLOT.right, y1: y(share), y2: y(share), class: "rule" }),
      svg("text", { x: PLOT.left - 5, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
    ]),
    points.length > 1 ? svg("polygon", { points: path([...upper, ...lower]), class: "band" }) : null,
    points.length > 1
      ? svg("polyline", { points: path(points.map((p) => [x(p), y(p.accuracy)])), class: "line" })
      : null,
    ...points.map((p) => svg("line", { x1: x(p), x2: x(p), y1: y(p.low), y2: y(p.high), class: "whisker" })),
    ...points.map((p) => svg("circle", { cx: x(p), cy: y(p.accuracy), r: 3, class: "point" })),
    svg("text", { x: PLOT.left, y: HEIGHT - 14, "text-anchor": "middle" }, "0"),
    svg("text", { x: PLOT.right, y: HEIGHT - 14, "text-anchor": "end" }, count(most)),
    svg("text", { x: (PLOT.left + PLOT.right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "labels"),
  );
}
