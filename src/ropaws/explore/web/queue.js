/**
 * Working through the grid: from one image that wants an answer to the next.
 *
 * @import { Item } from "./api.js"
 * @import { Grid } from "./grid.js"
 */
import { PAGE, QUEUES, SHRINKING, queryOf } from "./filters.js";
import { UNLABELED } from "./format.js";

/**
 * The place of the next image that still wants an answer, from place k on.
 *
 * @param {Grid} grid
 * @param {number} k
 * @returns {number | null}
 */
export function nextOpen({ store, items, answered }, k) {
  const isQueue = QUEUES.has(store.filter.view);
  const isOpen = (/** @type {Item} */ item) =>
    !answered.has(item.id) && (!isQueue || store.labelOf(item.id, item.label) === UNLABELED);
  const found = items.findIndex((item, at) => at >= k && isOpen(item));
  return found < 0 ? null : found;
}

/** @param {Grid} grid @param {number[]} ids */
export function setAnswered(grid, ids) {
  for (const id of ids) grid.answered.add(id);
  grid.mark();
}

/**
 * Answers were taken back: the cursor returns to the first of them, which may have left the page.
 *
 * @param {Grid} grid
 * @param {number[]} ids
 */
export async function setOpenAgain(grid, ids) {
  for (const id of ids) grid.answered.delete(id);
  const find = () => grid.items.findIndex((item) => ids.includes(item.id));
  if (find() < 0 && SHRINKING.has(grid.store.filter.view)) await grid.load(grid.offset);
  if (find() >= 0) grid.moveTo(find());
  else grid.mark();
}

/**
 * Moves to the next image that wants an answer, on the next page if need be, and gives it.
 *
 * @param {Grid} grid
 * @param {() => Promise<void>} sent - resolves when the server has the answers
 * @returns {Promise<Item | null>}
 */
export async function advance(grid, sent) {
  const { view } = grid.store.filter;
  const next = nextOpen(grid, grid.cursor) ?? (QUEUES.has(view) ? nextOpen(grid, 0) : null);
  if (next !== null) {
    grid.moveTo(next);
    return grid.current;
  }
  grid.setLoading(true); // no answer goes to the last image again while this one is sent
  const { asked } = grid;
  await sent();
  const shrinks = SHRINKING.has(view);
  const isLast = grid.offset + grid.items.length >= grid.total;
  if (shrinks) await grid.load(grid.offset);
  if (!isLast && (!shrinks || nextOpen(grid, 0) === null)) await grid.load(grid.offset + PAGE);
  if (asked === grid.asked) grid.setLoading(false);
  grid.isDone = nextOpen(grid, grid.cursor) === null;
  grid.focusCursor();
  return grid.current;
}

/**
 * After many images were answered at once, the page stays where it is, to be looked over. False for a view that
 * they have left, so that it is empty.
 *
 * @param {Grid} grid
 */
export function stay(grid) {
  const { filter } = grid.store;
  const next = nextOpen(grid, grid.cursor) ?? nextOpen(grid, 0);
  if (next === null && SHRINKING.has(filter.view) && !filter.ids) return false;
  if (next === null) grid.isDone = true;
  else grid.cursor = next;
  grid.mark();
  grid.focusCursor({ preventScroll: true });
  return true;
}

/**
 * Takes what a new model suggests for the places behind the cursor. The image at the cursor, which the person
 * may be about to answer, stays where it is; what the old model noted of it goes.
 *
 * @param {Grid} grid
 */
export async function renewRest(grid) {
  const { filter, names } = grid.store;
  if (!SHRINKING.has(filter.view) || filter.ids || grid.offset > 0 || !grid.items.length) return;
  const { asked } = grid;
  const page = await grid.api.images(queryOf(filter, 0, PAGE));
  if (asked !== grid.asked) return;
  const fresh = new Map(page.items.map((item) => [item.id, item]));
  const kept = grid.items
    .slice(0, grid.cursor + 1)
    .map((item) => fresh.get(item.id) ?? { ...item, note: null, suggest: null });
  const known = new Set(kept.map((item) => item.id));
  grid.items = [...kept, ...page.items.filter((item) => !known.has(item.id))].slice(0, PAGE);
  grid.total = Math.max(page.total, grid.items.length);
  for (const item of grid.items) names.set(item.id, item.name);
  const hadFocus = grid.box.contains(document.activeElement);
  grid.draw();
  if (hadFocus) grid.focusCursor();
}
