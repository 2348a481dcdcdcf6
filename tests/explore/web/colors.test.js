import assert from "node:assert/strict";
import { test } from "node:test";
import {
  BACKGROUNDS,
  PALETTES,
  channels,
  classColor,
  labelColor,
  legend,
  mix,
  packed,
  pointColors,
  scaleColor,
} from "../../../src/ropaws/explore/web/colors.js";
import { emptyColumns } from "./random.js";

/** Simulations of the two common color vision deficiencies (Machado et al., 2009), on linear light. */
const SEEN_BY = {
  everyone: [
    [1, 0, 0],
    [0, 1, 0],
    [0, 0, 1],
  ],
  deuteranopes: [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.01182, 0.04294, 0.968881],
  ],
  protanopes: [
    [0.152286, 1.052583, -0.204868],
    [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
  ],
};

const times = (matrix, v) => matrix.map((row) => row.reduce((sum, m, k) => sum + m * v[k], 0));
const linear = (hex) =>
  channels(hex).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));

/** Lightness and hue in OKLab, in which distances are about those that people see. */
function oklab(light) {
  const cones = times(
    [
      [0.4122214708, 0.5363325363, 0.0514459929],
      [0.2119034982, 0.6806995451, 0.1073969566],
      [0.0883024619, 0.2817188376, 0.6299787005],
    ],
    light.map((v) => Math.min(1, Math.max(0, v))),
  ).map(Math.cbrt);
  return times(
    [
      [0.2104542553, 0.793617785, -0.0040720468],
      [1.9779984951, -2.428592205, 0.4505937099],
      [0.0259040371, 0.7827717662, -0.808675766],
    ],
    cones,
  );
}

function contrast(a, b) {
  const [low, high] = [a, b]
    .map((hex) => times([[0.2126, 0.7152, 0.0722]], linear(hex))[0])
    .sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}

for (const theme of ["light", "dark"]) {
  for (const [who, matrix] of Object.entries(SEEN_BY)) {
    test(`the ten ${theme} class colors are apart for ${who}`, () => {
      const seen = PALETTES[theme].map((hex) => oklab(times(matrix, linear(hex))));
      seen.forEach((a, i) =>
        seen.slice(i + 1).forEach((b) => assert.ok(Math.hypot(...a.map((v, k) => v - b[k])) > 0.09)),
      );
    });
  }

  test(`${theme} class colors, in both rings, stand out from the page`, () => {
    for (let k = 0; k < 20; k++)
      assert.ok(contrast(classColor(k, theme === "dark"), BACKGROUNDS[theme]) >= 3);
  });

  test(`the ${theme} scale gets steadily lighter or darker, for everyone`, () => {
    for (const matrix of Object.values(SEEN_BY)) {
      const lightness = [0, 0.1, 0.3, 0.5, 0.7, 0.9, 1].map(
        (v) => oklab(times(matrix, linear(scaleColor(v, theme === "dark"))))[0],
      );
      const steps = lightness.slice(1).map((v, k) => v - lightness[k]);
      assert.equal(new Set(steps.map(Math.sign)).size, 1);
    }
  });
}

test("the first twenty classes have twenty colors", () => {
  assert.equal(new Set(Array.from({ length: 20 }, (_, k) => classColor(k, false))).size, 20);
});

test("a class keeps its color in the map, the legend and the grid, whatever its id", () => {
  const classes = [
    { id: 12, name: "a" },
    { id: 3, name: "b" },
  ];
  const columns = emptyColumns(3);
  columns.predicted.set([3, 12, 99]);
  const colors = pointColors(columns, "predicted", classes, false);
  assert.equal(colors[0], packed(labelColor(3, classes, false)));
  assert.equal(colors[1], packed(classColor(0, false)));
  assert.equal(legend("predicted", classes, false)[1].color, labelColor(3, classes, false));
  assert.equal(colors[2], packed(labelColor(-1, classes, false))); // a merged class is no prediction
});

test("a packed color has its bytes in the order of an ImageData", () => {
  assert.deepEqual([...new Uint8Array(Uint32Array.of(packed("#0a97ff")).buffer)], [0x0a, 0x97, 0xff, 255]);
  assert.equal(mix("#000000", "#ff8000", 0.5), "#804000");
});

test("each mode colors by its own column, and the mask makes points faint", () => {
  const columns = emptyColumns(2);
  columns.suspected[1] = columns.duplicate[1] = 1;
  columns.confidence[1] = columns.inDomain[1] = 255;
  columns.label[1] = 0;
  const classes = [{ id: 0 }];
  for (const mode of ["suspected", "duplicate", "confidence", "in_domain", "label"]) {
    const [a, b] = pointColors(columns, mode, classes, true);
    assert.notEqual(a, b, mode);
    const masked = pointColors(columns, mode, classes, true, Uint8Array.of(1, 0));
    assert.equal(masked[0], a);
    assert.notEqual(masked[1], b);
  }
});
