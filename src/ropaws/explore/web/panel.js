/**
 * What the labels bought: the estimate over rounds, what is missing, the audit, and what comes out.
 *
 * @import { Estimate, Frequency, Panel, Round, State } from "./api.js"
 * @import { Store } from "./store.js"
 * @import { Labeling } from "./labeling.js"
 */
import { button, element, fill, find, setText, svg } from "./dom.js";
import { filterOf } from "./filters.js";
import { count, interval, percent, plural } from "./format.js";

const FORMATS = ["csv", "parquet", "jsonl", "label-studio", "fiftyone", "coco"]; // of predictions
const WIDTH = 270;
const HEIGHT = 130;
const PLOT = { left: 34, right: WIDTH - 8, top: 8, bottom: HEIGHT - 30 };

export class PanelView {
  /** @param {Store} store @param {Labeling} labeling */
  constructor(store, labeling) {
    this.store = store;
    this.labeling = labeling;
    this.format = FORMATS[0];
    this.auto = find("auto-refit", HTMLInputElement);
    this.refit = find("refit", HTMLButtonElement);
    this.refit.addEventListener("click", () => labeling.refit());
    this.auto.addEventListener("change", () => labeling.ask("/api/auto-refit", { on: this.auto.checked }));
    find("job-cancel", HTMLButtonElement).addEventListener("click", () => labeling.ask("/api/cancel"));
    store.on(["state"], () => store.state && this.draw(store.state));
    store.on(["state", "labels"], () => this.drawUndo());
  }

  /** @param {State} state */
  draw(state) {
    this.drawTop(state);
    this.drawModel(state);
    this.drawEstimate(state);
    this.drawFacts(state);
    this.drawAudit(state);
    this.drawOutputs(state);
  }

  /** @param {State} state */
  drawTop({ title, read_only, counts, images, job }) {
    setText("title", title);
    document.title = `${title} – ropaws explore`;
    document.body.classList.toggle("read-only", read_only);
    const parts = [
      plural(images, "image"),
      `${count(counts.labeled)} labeled`,
      `${count(counts.out_of_class)} out-of-class`,
    ];
    if (counts.skipped) parts.push(`${count(counts.skipped)} skipped`);
    if (read_only) parts.push("read-only");
    setText("counts", parts.join(" · "));
    find("job", HTMLElement).hidden = !job;
    if (job) {
      setText("job-text", job.text);
      const bar = find("job-progress", HTMLProgressElement);
      if (job.fraction === null) bar.removeAttribute("value");
      else bar.value = job.fraction;
      find("job-cancel", HTMLButtonElement).hidden = !job.cancellable;
    }
  }

  drawUndo() {
    const waiting = this.labeling.sync.outbox.answers;
    const text = waiting[waiting.length - 1]?.text ?? this.store.state?.undo;
    const node = find("undo", HTMLButtonElement);
    node.disabled = !text;
    node.title = text ? `Undo: ${text} (z)` : "Nothing to undo";
  }

  /** @param {State} state */
  drawModel({ round, job, pending, auto_refit, error, notice }) {
    const model = modelText(round, pending, job?.kind === "refit");
    fill(find("model-state", HTMLElement), [model, error, notice], () => [
      element("p", {}, model),
      error && element("p", { className: "error" }, error),
      notice && element("p", { className: "notice" }, notice),
    ]);
    this.auto.checked = auto_refit;
    this.refit.disabled = job?.kind === "refit";
  }

  /** @param {State} state */
  drawEstimate({ panel }) {
    const { estimate, rounds } = panel;
    fill(find("estimate", HTMLElement), [estimate, rounds], () => [
      ...(estimate ? estimateLines(estimate) : []),
      accuracyChart(rounds),
    ]);
  }

  /** @param {State} state */
  drawFacts({ panel }) {
    const shown = [panel.rounds, panel.few, panel.expected_in_class, panel.frequencies];
    fill(find("progress-facts", HTMLElement), shown, () => [
      element(
        "dl",
        {},
        ...factsOf(panel).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]),
      ),
      panel.frequencies.length > 0 && element("h3", {}, "How frequent the classes are"),
      panel.frequencies.length > 0 &&
        element(
          "ul",
          { className: "frequencies", title: "Estimated shares of the in-class images, with 90% intervals" },
          ...panel.frequencies.map((each) => this.frequency(each)),
        ),
      panel.few.length > 0 && element("h3", {}, "Classes without enough labels"),
      panel.few.length > 0 &&
        element(
          "ul",
          { className: "few" },
          ...panel.few.map((c) =>
            element(
              "li",
              { color: this.store.colorOf(c.id) },
              element("span", { className: "dot" }),
              `${c.name}: ${c.labels} of ${c.wanted}`,
            ),
          ),
        ),
    ]);
  }

  /** A class with its share of the in-class images as a bar, and the interval as a line. @param {Frequency} each */
  frequency({ id, name, estimate, low, high }) {
    const bar = element("span", { className: "bar" });
    bar.style.setProperty("--share", String(estimate));
    bar.style.setProperty("--low", String(low));
    bar.style.setProperty("--high", String(high));
    return element(
      "li",
      { color: this.store.colorOf(id) },
      element("span", { className: "name", title: name }, name),
      bar,
      element("span", {}, `${percent(estimate)} (${interval(low, high)})`),
    );
  }

  /** @param {State} state */
  drawAudit({ panel, read_only, classes }) {
    const { audit, audit_offer: offer } = panel;
    fill(find("audit", HTMLElement), [audit, offer, read_only, classes.length], () => {
      if (audit && audit.answered < audit.of) {
        return [
          element("h3", {}, "Audit"),
          element(
            "p",
            {},
            `${audit.answered} of ${audit.of} answered, for an accuracy to within ${points(audit.within)}.`,
          ),
          element("progress", { max: audit.of, value: audit.answered, "aria-label": "Audit" }),
          button("Continue the audit", () => this.showAudit()),
          blindBox(this.store),
        ];
      }
      const found = audit ? element("p", {}, auditText(audit)) : null;
      if (!offer || read_only || !classes.length) return [found];
      return [
        element("h3", {}, "Audit"),
        found,
        element(
          "p",
          {},
          `Label ${offer.images} random images to know your accuracy to within ${points(offer.within)}.`,
        ),
        button(`Label ${offer.images} images`, () => this.startAudit(offer.images), { className: "write" }),
        blindBox(this.store),
      ];
    });
  }

  showAudit() {
    this.store.setFilter(filterOf("audit"));
  }

  /** @param {number} n */
  async startAudit(n) {
    await this.labeling.ask("/api/audit", { n });
    this.showAudit();
  }

  /** The format of the predictions; stays as it was chosen. */
  formatChoice() {
    const options = FORMATS.map((name) => element("option", { value: name }, name));
    const choice = element("select", { ariaLabel: "Format of the predictions" }, ...options);
    choice.value = this.format;
    choice.addEventListener("change", () => (this.format = choice.value));
    return choice;
  }

  /** @param {State} state */
  drawOutputs({ outputs, read_only, job }) {
    const isBusy = job?.kind === "export" || job?.kind === "train";
    const ask = (/** @type {string} */ kind) => () => this.labeling.ask("/api/export", { kind }, "Started");
    fill(find("outputs", HTMLElement), [outputs, read_only, isBusy], () => [
      element(
        "dl",
        {},
        element("dt", {}, "Labels"),
        element("dd", { className: "path" }, outputs.labels_csv),
        element("dt", {}, "Folder"),
        element("dd", { className: "path" }, outputs.folder),
        ...(outputs.run ? [element("dt", {}, "Run"), element("dd", { className: "path" }, outputs.run)] : []),
        ...outputs.written.flatMap((each) => [
          element("dt", {}, "Written"),
          element("dd", { className: "path" }, writtenText(each) + (each.stale ? " (stale)" : "")),
        ]),
      ),
      outputs.report &&
        element(
          "p",
          {},
          element("a", { href: "/report", target: "_blank", rel: "noopener" }, "Open the report of the run"),
        ),
      !read_only &&
        element(
          "div",
          { className: "row wrap" },
          button(
            "Predictions",
            () => this.labeling.ask("/api/export", { kind: "predictions", format: this.format }, "Started"),
            { disabled: isBusy, title: "Write the predictions of all images in this format" },
          ),
          this.formatChoice(),
          button("Sorted folders", ask("folders"), {
            disabled: isBusy,
            title: "Copy the images into a folder per class",
          }),
          button("Train a run", ask("run"), {
            disabled: isBusy,
            title: "Train on the features, with a report",
          }),
          button("Fine-tune", ask("finetune"), {
            disabled: isBusy,
            title: "Train the whole network: takes long",
          }),
        ),
    ]);
  }
}

/**
 * What the model was fitted to.
 *
 * @param {number} round @param {number} pending - images whose answer it does not know @param {boolean} isRefitting
 */
function modelText(round, pending, isRefitting) {
  const changed = `${plural(pending, "image")} answered or changed since`;
  if (!round)
    return isRefitting
      ? "The model is being fitted."
      : "No model yet: label a few images of two classes, then refit.";
  return pending ? `Round ${round}, stale: ${changed}.` : `Round ${round}.`;
}

/** What an export was made from. @param {import("./api.js").Written} written */
export function writtenText({ name, round, pending }) {
  if (!round) return `${name}, before the first round`;
  const behind = pending ? `, without ${plural(pending, "newer answer")}` : "";
  return `${name}, from round ${round}${behind}`;
}

/** What a finished audit found. @param {NonNullable<Panel["audit"]>} audit */
export function auditText({ of, right, predicted }) {
  const found = predicted
    ? `${right} of ${plural(predicted, "prediction")} were right`
    : "there were no predictions yet";
  return `The audit of ${plural(of, "image")} is done: ${found}.`;
}

/** Whether an audit shows no predictions: a person may be led by them. @param {Store} store */
function blindBox(store) {
  const box = element("input", {
    type: "checkbox",
    checked: store.isBlind,
    on: { change: () => store.setBlind(box.checked) },
  });
  return element("label", { className: "check" }, box, "hide predictions in the audit");
}

/** @param {Estimate} estimate @returns {HTMLElement[]} */
function estimateLines(estimate) {
  const { accuracy, low, high, overall, overall_low, overall_high } = estimate;
  /** @param {number} share @param {string} range @param {string} text @param {string} source */
  const figure = (share, range, text, source) => [
    element("p", { className: "figure" }, element("strong", {}, percent(share)), range),
    element("p", {}, text),
    element("p", { className: "dim" }, source),
  ];
  const source = (/** @type {string | null} */ kind, /** @type {number | null} */ labels) =>
    `${kind}, ${plural(labels ?? 0, "label")}`;
  const inside = source(estimate.kind, estimate.labels);
  const all = source(estimate.overall_kind, estimate.overall_labels);
  const right = "estimated: in-class images whose likeliest class is right";
  const known = "estimated: all images whose class, or out-of-class, is right";
  return [
    ...(accuracy === null ? [] : figure(accuracy, interval(low, high), right, inside)),
    ...(overall === null ? [] : figure(overall, interval(overall_low, overall_high), known, all)),
  ];
}

/** @param {number} within - half the width of the interval, in points */
function points(within) {
  return plural(Math.round(within), "point");
}

/** @param {Panel} panel @returns {[string, string][]} */
export function factsOf(panel) {
  /** @type {[string, string][]} */
  const facts = [];
  const last = panel.rounds[panel.rounds.length - 1];
  if (last && last.in_class !== null) {
    const range = interval(last.in_class_low, last.in_class_high);
    facts.push(["In-class share", percent(last.in_class) + (range && ` (${range})`)]);
  }
  if (last && last.answered) facts.push(["Last round right", `${last.right} of ${last.answered}`]);
  if (panel.expected_in_class !== null)
    facts.push(["Suggested in-class", `about ${Math.round(panel.expected_in_class)}`]);
  return facts;
}

// Estimated accuracy over the rounds, as a line with its interval

/** @typedef {{answers: number, accuracy: number, low: number, high: number}} Point */

/** The rounds that have an estimate, over the answers given: labels may become fewer. @param {Round[]} rounds @returns {Point[]} */
export function pointsOf(rounds) {
  return rounds.flatMap(({ answers, accuracy, low, high }) =>
    accuracy === null || answers === undefined
      ? []
      : [{ answers, accuracy, low: low ?? accuracy, high: high ?? accuracy }],
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
function accuracyChart(rounds) {
  const points = pointsOf(rounds);
  if (!points.length) return null;
  const [low, high] = limitsOf(points);
  const most = Math.max(...points.map((p) => p.answers));
  const x = (/** @type {Point} */ p) =>
    PLOT.left + ((PLOT.right - PLOT.left) * p.answers) / Math.max(1, most);
  const y = (/** @type {number} */ share) =>
    PLOT.bottom - ((PLOT.bottom - PLOT.top) * (share - low)) / (high - low);
  const path = (/** @type {[number, number][]} */ at) =>
    at.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ");
  const upper = points.map((p) => /** @type {[number, number]} */ ([x(p), y(p.high)]));
  const lower = points.map((p) => /** @type {[number, number]} */ ([x(p), y(p.low)])).reverse();
  const last = points[points.length - 1];
  const now = `${percent(last.accuracy)}, ${interval(last.low, last.high)}`;
  const spoken = `Estimated accuracy over rounds: now ${now}, with ${plural(last.answers, "answer")}`;
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
    svg("text", { x: (PLOT.left + PLOT.right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "answers"),
  );
}
