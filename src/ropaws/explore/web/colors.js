/**
 * Colors of classes, labels and shares, for light and dark pages.
 *
 * The ten class colors of a theme are far apart for people with and without a color vision deficiency, and
 * have a contrast of 3 to the page; tests/explore/web/colors.test.js measures both.
 *
 * @import { Columns } from "./columns.js"
 */
import { OUT_OF_CLASS, SKIPPED } from "./format.js";

/** @typedef {"predicted" | "label" | "in_domain" | "confidence" | "suspected" | "duplicate"} ColorMode */

/** @type {Record<"light" | "dark", string[]>} */
export const PALETTES = {
  light: [
    "#216795",
    "#f06e00",
    "#2ba576",
    "#ba056a",
    "#8b6400",
    "#1315b7",
    "#0a97ff",
    "#620167",
    "#005200",
    "#ff2cd3",
  ],
  dark: [
    "#2382ff",
    "#e99883",
    "#02f89c",
    "#abafff",
    "#feff07",
    "#9550bd",
    "#00908b",
    "#ff2188",
    "#22b600",
    "#b25405",
  ],
};
export const BACKGROUNDS = { light: "#ffffff", dark: "#16181c" };
const NEUTRAL = {
  light: { none: "#b8bdc5", out: "#1c2024", faint: "#e9ebee", alarm: "#d1004b" },
  dark: { none: "#4b515c", out: "#e8eaed", faint: "#25282e", alarm: "#ff6b8e" },
};
/** From 0 to 1; lightness changes steadily and the hue from orange to blue, so both ends stay apart. */
const SCALES = {
  light: ["#f2a33a", "#c4837c", "#7f68a5", "#3c4fa0", "#0a2a6e"],
  dark: ["#3f5bd0", "#6f6fc9", "#a58ab5", "#d9ac8e", "#ffe08a"],
};

/** @param {boolean} dark @returns {"light" | "dark"} */
function theme(dark) {
  return dark ? "dark" : "light";
}

/** Red, green and blue, 0 to 255. @param {string} hex */
export function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** @param {string} a @param {string} b @param {number} share - of b */
export function mix(a, b, share) {
  const [from, to] = [channels(a), channels(b)];
  return `#${from
    .map((v, k) =>
      Math.round(v + (to[k] - v) * share)
        .toString(16)
        .padStart(2, "0"),
    )
    .join("")}`;
}

/** A color as one number in an ImageData's buffer (little endian). @param {string} hex */
export function packed(hex) {
  const [r, g, b] = channels(hex);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** The color of such a number. @param {number} color */
export function unpacked(color) {
  return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
}

/**
 * The color of the class at a position; the second ten are the first, nearer to the page.
 *
 * @param {number} position
 * @param {boolean} dark
 */
export function classColor(position, dark) {
  const palette = PALETTES[theme(dark)];
  const color = palette[position % palette.length];
  const ring = Math.floor(position / palette.length) % 2;
  return ring ? mix(color, dark ? "#ffffff" : "#000000", 0.45) : color;
}

/**
 * The color of a label or prediction.
 *
 * @param {number} code @param {{id: number}[]} classes @param {boolean} dark
 */
export function labelColor(code, classes, dark) {
  if (code === OUT_OF_CLASS) return NEUTRAL[theme(dark)].out;
  const position = classes.findIndex((c) => c.id === code);
  return position < 0 ? NEUTRAL[theme(dark)].none : classColor(position, dark);
}

/** @param {number} share - 0 to 1 @param {boolean} dark */
export function scaleColor(share, dark) {
  const stops = SCALES[theme(dark)];
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const k = Math.min(stops.length - 2, Math.floor(at));
  return mix(stops[k], stops[k + 1], at - k);
}

/**
 * What each color of a mode means, for the legend.
 *
 * @param {ColorMode} mode @param {{id: number, name: string}[]} classes @param {boolean} dark
 * @returns {{color: string, text: string}[]}
 */
export function legend(mode, classes, dark) {
  const neutral = NEUTRAL[theme(dark)];
  if (mode === "predicted" || mode === "label") {
    return [
      ...classes.map((c) => ({ color: labelColor(c.id, classes, dark), text: c.name })),
      { color: neutral.out, text: "out-of-class" },
      { color: neutral.none, text: mode === "label" ? "unlabeled" : "no prediction" },
    ];
  }
  if (mode === "suspected") return flags(neutral, "suspected label error");
  if (mode === "duplicate") return flags(neutral, "near duplicate");
  return [0, 0.25, 0.5, 0.75, 1].map((v) => ({ color: scaleColor(v, dark), text: `${100 * v}%` }));
}

/** @param {{alarm: string, none: string}} neutral @param {string} text */
function flags(neutral, text) {
  return [
    { color: neutral.alarm, text },
    { color: neutral.none, text: "other" },
  ];
}

/**
 * A packed color per image.
 *
 * @param {Columns} columns @param {ColorMode} mode @param {{id: number}[]} classes @param {boolean} dark
 * @param {Uint8Array | null} mask - images with 0 are faint
 */
export function pointColors(columns, mode, classes, dark, mask = null) {
  const colors = new Uint32Array(columns.n);
  const neutral = NEUTRAL[theme(dark)];
  const [faint, none, alarm] = [neutral.faint, neutral.none, neutral.alarm].map(packed);
  if (mode === "in_domain" || mode === "confidence") {
    const ramp = Uint32Array.from({ length: 256 }, (_, v) => packed(scaleColor(v / 255, dark)));
    const values = mode === "confidence" ? columns.confidence : columns.inDomain;
    for (let i = 0; i < colors.length; i++) colors[i] = ramp[values[i]];
  } else if (mode === "suspected" || mode === "duplicate") {
    const values = mode === "suspected" ? columns.suspected : columns.duplicate;
    for (let i = 0; i < colors.length; i++) colors[i] = values[i] ? alarm : none;
  } else {
    const known = new Map(classes.map((c) => [c.id, packed(labelColor(c.id, classes, dark))]));
    known.set(OUT_OF_CLASS, packed(neutral.out)).set(SKIPPED, none);
    const values = mode === "label" ? columns.label : columns.predicted;
    const byCode = new Uint32Array(1 << 16).fill(none); // asked a million times, a table answers sooner
    for (const [code, color] of known) byCode[code & 0xffff] = color;
    for (let i = 0; i < colors.length; i++) colors[i] = byCode[values[i] & 0xffff];
  }
  if (mask) for (let i = 0; i < colors.length; i++) if (!mask[i]) colors[i] = faint;
  return colors;
}
