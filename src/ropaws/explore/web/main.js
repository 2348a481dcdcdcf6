/** The page of `ropaws explore`: builds the parts and gives them keys. */
import { Api, Away, Refused } from "./api.js";
import { ClassViews, ClusterList } from "./class_views.js";
import { DetailView } from "./detail.js";
import { find } from "./dom.js";
import { FilterForm } from "./filter_form.js";
import { OUT_OF_CLASS, SKIPPED, UNLABELED } from "./format.js";
import { Grid } from "./grid.js";
import { isTyping, openKeys, positionOf } from "./keys.js";
import { Labeling } from "./labeling.js";
import { PoolMap } from "./map.js";
import { attempt, say, setBanner } from "./messages.js";
import { Outbox, orphans, outboxKey, tabId } from "./outbox.js";
import { PanelView, writtenText } from "./panel.js";
import { Picker } from "./picker.js";
import { renewRest } from "./queue.js";
import { Store } from "./store.js";
import { Sync } from "./sync.js";
import { Tooltip } from "./tooltip.js";

/** The first state, which names the pool: without it there is nothing to show. @param {Api} api */
async function firstState(api) {
  for (;;) {
    try {
      return await api.state();
    } catch (error) {
      if (!(error instanceof Away || error instanceof Refused)) throw error;
      const unauthorized = error instanceof Refused && error.status === 401;
      setBanner(
        unauthorized
          ? "Not authorized: open the address that the terminal shows."
          : "The server does not answer, trying again.",
      );
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

/** @param {Store} store */
function followTheme(store) {
  const query = window.matchMedia("(prefers-color-scheme: dark)");
  store.dark = query.matches;
  query.addEventListener("change", () => {
    store.dark = query.matches;
    store.emit("theme");
  });
}

/**
 * Buttons that choose one part of the page: tabs on narrow windows, layouts on wide ones.
 *
 * @param {"tab" | "layout"} name
 * @param {Store} store
 */
function followChoice(name, store) {
  const buttons = [...document.querySelectorAll(`button[data-${name}]`)].filter(
    (node) => node instanceof HTMLButtonElement,
  );
  for (const node of buttons) {
    node.addEventListener("click", () => {
      document.body.dataset[name] = node.dataset[name];
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === node));
      store.emit("layout");
    });
  }
}

/** Says what happened in the background. @param {Store} store */
function followJobs(store) {
  /** @type {{job: string | null, error: string | null, failures: number, notice: string | null}} */
  let before = { job: null, error: null, failures: 0, notice: null };
  /** @type {Set<string> | null} */
  let known = null;
  store.on(["state"], () => {
    const { job, error, failures, notice, round, outputs } = /** @type {import("./api.js").State} */ (
      store.state
    );
    const written = outputs.written.map(writtenText);
    const fresh = written.find((text, k) => !outputs.written[k].stale && known && !known.has(text));
    known = new Set(written);
    const isNew = error !== before.error || failures !== before.failures;
    if (error && isNew) say(error, "error");
    else if (notice && notice !== before.notice) say(notice);
    else if (fresh) say(`Written: ${fresh}`);
    else if (before.job === "refit" && job?.kind !== "refit") say(`Refit done: round ${round}`);
    before = { job: job?.kind ?? null, error, failures, notice };
  });
}

async function main() {
  const store = new Store();
  followChoice("tab", store);
  followChoice("layout", store);
  followTheme(store);
  const client = await tabId();
  const api = new Api(client);
  const { title } = await firstState(api);
  const outbox = new Outbox(localStorage, outboxKey(title, client));
  for (const key of await orphans(title, client)) outbox.adopt(key);

  const sync = new Sync(api, store, outbox);
  const detail = new DetailView(api, store);
  const open = (/** @type {number} */ id) => void detail.show(id);
  const grid = new Grid(api, store, open);
  detail.grid = grid;
  const labeling = new Labeling(store, sync, grid, detail);
  const picker = new Picker(store, labeling);
  const classes = new ClassViews(store, labeling, () => picker.open());
  new FilterForm(store);
  new ClusterList(api, store, () => picker.open());
  new PanelView(store, labeling);
  const map = new PoolMap(store, new Tooltip(api, store), open, (ids) => {
    store.select(ids);
    if (ids.length)
      store.setFilter({ ids, view: "all", class: null, cluster: null, sort: "number", descending: false });
    say(ids.length ? `${ids.length} images selected` : "No image in the lasso");
  });
  followJobs(store);
  listenToButtons(store, labeling);
  followTileSize();
  listenToKeys({ store, labeling, picker, map, grid, detail });
  followRounds(store, grid);

  await sync.refresh();
  await grid.load(0);
  if (!store.classes.length && !store.readOnly) classes.openNaming();
}

/** Suggestions follow the model. @param {Store} store @param {Grid} grid */
function followRounds(store, grid) {
  let model = -1;
  store.on(["columns"], () => {
    const before = model;
    model = store.version?.model ?? -1;
    if (before < 0 || before === model) return;
    attempt(() => (grid.items.length ? renewRest(grid) : grid.load(0)));
  });
}

/** @param {Store} store @param {Labeling} labeling */
function listenToButtons(store, labeling) {
  find("undo", HTMLButtonElement).addEventListener("click", () => labeling.undo());
  find("show-keys", HTMLButtonElement).addEventListener("click", openKeys);
  find("clear-selection", HTMLButtonElement).addEventListener("click", () => clearSelection(store));
  const toggle = find("show-filters", HTMLButtonElement);
  toggle.addEventListener("click", () => {
    const isOpen = document.body.classList.toggle("filters-open");
    toggle.setAttribute("aria-expanded", String(isOpen));
  });
}

/** The size of the images in the grid, kept for the next visit. */
function followTileSize() {
  const choice = find("tile-size", HTMLSelectElement);
  const kept = localStorage.getItem("ropaws-tile-size");
  if ([...choice.options].some((option) => option.value === kept)) choice.value = kept ?? "";
  const apply = () => (document.body.dataset.tiles = choice.value);
  choice.addEventListener("change", () => {
    localStorage.setItem("ropaws-tile-size", choice.value);
    choice.blur();
    apply();
  });
  apply();
}

/** @param {Store} store */
function clearSelection(store) {
  store.select([]);
  if (store.filter.ids) store.setFilter({ ids: null });
}

const MOVES = /^(Arrow.*|Page.*|[-+=])$/;

/**
 * @param {{
 *   store: Store, labeling: Labeling, picker: Picker, map: PoolMap, grid: Grid, detail: DetailView,
 * }} parts
 */
function listenToKeys({ store, labeling, picker, map, grid, detail }) {
  const openCurrent = () => {
    if (grid.current) detail.show(grid.current.id);
  };
  /** @type {Record<string, () => unknown>} */
  const actions = {
    o: () => labeling.label(OUT_OF_CLASS),
    s: () => labeling.label(SKIPPED),
    z: () => labeling.undo(),
    y: () => labeling.confirm(),
    c: () => picker.open(),
    r: () => labeling.refit(),
    v: openCurrent,
    m: () => {
      const id = detail.id ?? grid.current?.id;
      if (id !== undefined) detail.showLike(id);
    },
    a: () => grid.selectPage(),
    l: () => map.setLassoMode(!map.lassoMode),
    d: () => map.toggleContours(),
    "+": () => map.zoom(1.5),
    "=": () => map.zoom(1.5),
    "-": () => map.zoom(1 / 1.5),
    "?": openKeys,
    "/": () => find("filter-text", HTMLInputElement).focus(),
    Backspace: () => labeling.label(UNLABELED),
    Escape: () => clearSelection(store),
    Enter: () => (store.filter.view === "label-errors" ? labeling.takeSuggestion() : openCurrent()),
  };
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.repeat && !MOVES.test(key)) return; // a key held down must not label a whole page
    if (
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      !(target instanceof HTMLElement) ||
      isTyping(target, key)
    )
      return;
    const dialog = document.querySelector("dialog[open]");
    if (dialog && dialog !== detail.dialog) return;
    if (dialog) {
      if (key === "ArrowLeft" || key === "ArrowRight") return detail.step(key === "ArrowLeft" ? -1 : 1);
      if (
        !/^[0-9oszycm]$|^Backspace$|^Enter$/.test(key) ||
        (key === "Enter" && store.filter.view !== "label-errors")
      )
        return;
    }
    const position = positionOf(key);
    if (position !== null) {
      const info = store.classes[position];
      if (info) labeling.label(info.id);
      else say(`There is no class ${key}: press c to make one`);
    } else if (!dialog && target === map.element && map.onKey(key)) {
      // the map's own
    } else if (Object.hasOwn(actions, key)) {
      actions[key]();
    } else if (dialog || !grid.onKey(key)) {
      return;
    }
    event.preventDefault();
  });
}

main();
