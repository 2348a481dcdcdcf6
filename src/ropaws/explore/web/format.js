/** Numbers and labels as text. */

export const UNLABELED = -1;
export const OUT_OF_CLASS = -2;
export const SKIPPED = -3;

const counts = new Intl.NumberFormat("en-US");

/** @param {number} value */
export function count(value) {
  return counts.format(value);
}

/** @param {number} n @param {string} noun @param {string} [plural] */
export function plural(n, noun, plural = `${noun}s`) {
  return `${count(n)} ${n === 1 ? noun : plural}`;
}

/** @param {number | null | undefined} share - 0 to 1 */
export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(100 * share)}%`;
}

/** @param {number | null | undefined} low @param {number | null | undefined} high */
export function interval(low, high) {
  if (low === null || low === undefined || high === null || high === undefined) return "";
  return `${Math.round(100 * low)} to ${Math.round(100 * high)}%`;
}

/**
 * The name of a label or prediction.
 *
 * @param {number} code - a class id or one of the codes above
 * @param {{id: number, name: string}[]} classes
 */
export function labelName(code, classes) {
  if (code === UNLABELED) return "unlabeled";
  if (code === OUT_OF_CLASS) return "out-of-class";
  if (code === SKIPPED) return "skipped";
  return classes.find((c) => c.id === code)?.name ?? `class ${code}`;
}

/** The key that labels with the class at this position, or "" beyond the tenth. @param {number} position */
export function digitOf(position) {
  return position < 10 ? String((position + 1) % 10) : "";
}

/** The last part of a path, which is what tells files apart. @param {string} path */
export function fileName(path) {
  return path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1) || path;
}

/** The lines of a text as class names: trimmed, without empty ones and repeats. @param {string} text */
export function namesOf(text) {
  return [
    ...new Set(
      text
        .split("\n")
        .map((line) => line.trim())
        .filter(Boolean),
    ),
  ];
}
