/**
 * What the labels bought: the estimate over rounds, what is missing, the audit, and what comes out.
 *
 * @import { Estimate, Panel, State } from "./api.js"
 * @import { Store } from "./store.js"
 * @import { Labeling } from "./labeling.js"
 */
import { accuracyChart } from "./chart.js";
import { button, element, fill, find, setText } from "./dom.js";
import { filterOf } from "./filters.js";
import { count, interval, percent, plural } from "./format.js";

export class PanelView {
  /** @param {Store} store @param {Labeling} labeling */
  constructor(store, labeling) {
    this.store = store;
    this.labeling = labeling;
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
  drawModel({ round, job, answers_since_refit, auto_refit, error, notice }) {
    const model = round ? `Round ${round}.` : "No model yet: label a few images of two classes, then refit.";
    const since = answers_since_refit ? ` ${plural(answers_since_refit, "answer")} since.` : "";
    fill(find("model-state", HTMLElement), [model, since, error, notice], () => [
      element("p", {}, model + since),
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
    fill(find("progress-facts", HTMLElement), [panel.rounds, panel.few, panel.expected_in_class], () => [
      element(
        "dl",
        {},
        ...factsOf(panel).flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]),
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
        ];
      }
      if (!offer || read_only || !classes.length) return [];
      return [
        element("h3", {}, "Audit"),
        element(
          "p",
          {},
          `Label ${offer.images} random images to know your accuracy to within ${points(offer.within)}.`,
        ),
        button(`Label ${offer.images} images`, () => this.startAudit(offer.images), { className: "write" }),
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

  /** @param {State} state */
  drawOutputs({ outputs, read_only, job }) {
    const isBusy = job !== null && job.kind !== "map";
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
          button("Predictions", ask("predictions"), {
            disabled: isBusy,
            title: "Write a table of the predictions",
          }),
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
