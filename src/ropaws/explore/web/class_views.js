/**
 * The classes: their list, the buttons that label, the dialogs that name, rename, merge and delete them, and
 * clusters of images that may be new ones.
 *
 * @import { Api, ClassInfo, Cluster } from "./api.js"
 * @import { Store } from "./store.js"
 * @import { Labeling } from "./labeling.js"
 */
import { button, element, fill, find, setText } from "./dom.js";
import { filterOf } from "./filters.js";
import { OUT_OF_CLASS, SKIPPED, count, digitOf, namesOf, plural } from "./format.js";
import { ask, attempt } from "./messages.js";

const MOST_SHOWN = 12; // selected images beside the map

export class ClassViews {
  /** @param {Store} store @param {Labeling} labeling @param {() => void} pick - opens the class picker */
  constructor(store, labeling, pick) {
    this.store = store;
    this.labeling = labeling;
    this.pick = pick;
    this.naming = find("name-classes", HTMLDialogElement);
    this.editing = find("edit-class", HTMLDialogElement);
    /** @type {ClassInfo | null} */
    this.edited = null;
    find("add-classes", HTMLButtonElement).addEventListener("click", () => this.openNaming());
    this.naming.addEventListener("close", () => this.onNamed());
    this.editing.addEventListener("close", () => this.onEdited());
    store.on(["state", "theme", "filter"], () => this.draw());
    store.on(["state", "selection", "filter", "layout", "session"], () => this.drawTarget());
  }

  draw() {
    const { classes, dark, filter, readOnly } = this.store;
    fill(find("class-list", HTMLElement), [classes, dark, filter.class, readOnly], () =>
      classes.length
        ? classes.map((info, k) => this.row(info, k))
        : [element("li", { className: "empty" }, "No classes yet.")],
    );
    const names = classes.map((c) => [c.id, c.name]);
    for (const id of ["label-buttons", "detail-labels"]) {
      fill(find(id, HTMLElement), [names, dark, filter.view], () => this.labelButtons());
    }
  }

  /** @param {ClassInfo} info @param {number} k */
  row(info, k) {
    const show = button("", () => (show.blur(), this.showPredicted(info.id)), {
      className: "class",
      title: `Show the images predicted ${info.name}`,
      "aria-pressed": String(this.store.filter.class === info.id),
    });
    const numbers = `${plural(info.labels, "label")} · ${count(info.predicted)} predicted`;
    show.append(
      element("span", { className: "dot" }),
      element("kbd", {}, digitOf(k)),
      element("span", { className: "name" }, info.name),
      element("span", { className: "value" }, numbers),
    );
    const edit = button("Edit", () => this.openEditing(info), {
      className: "quiet write",
      "aria-label": `Edit ${info.name}`,
      title: "Rename, merge or delete",
    });
    return element("li", { color: this.store.colorOf(info.id) }, show, edit);
  }

  /**
   * Lists the images predicted as a class, the most confident first; a second click ends it.
   *
   * @param {number} id
   */
  showPredicted(id) {
    const { filter } = this.store;
    if (filter.class === id) this.store.setFilter({ class: null });
    else this.store.setFilter({ ...filterOf("all"), class: id, sort: "confidence", descending: true });
  }

  labelButtons() {
    const { classes, filter } = this.store;
    const isErrors = filter.view === "label-errors";
    return [
      isErrors && this.actButton("y", "label is right", () => this.labeling.confirm()),
      isErrors && this.actButton("⏎", "suggested class", () => this.labeling.takeSuggestion()),
      ...classes.slice(0, 10).map((c, k) => this.labelButton(digitOf(k), c.name, c.id)),
      this.labelButton("o", "out-of-class", OUT_OF_CLASS),
      this.labelButton("s", "skip", SKIPPED),
      this.actButton("c", classes.length > 10 ? "more…" : "new class…", this.pick),
    ];
  }

  /** @param {string} key @param {string} name @param {number} code */
  labelButton(key, name, code) {
    const dot = code === SKIPPED ? null : element("span", { className: "dot" });
    const props = { className: "label", color: this.store.colorOf(code) };
    return button("", () => this.labeling.label(code), props, dot, element("kbd", {}, key), name);
  }

  /** @param {string} key @param {string} name @param {() => void} act */
  actButton(key, name, act) {
    return button("", act, { className: "label" }, element("kbd", {}, key), name);
  }

  drawTarget() {
    const { selection, state } = this.store;
    const { isShown } = this.labeling.grid;
    const n = selection.size;
    const none = isShown ? "Label the current image:" : "Select images on the map to label them.";
    setText("target", n ? `Label ${plural(n, "selected image")}:` : none);
    find("clear-selection", HTMLButtonElement).hidden = n === 0;
    find("label-buttons", HTMLElement).hidden = !n && !isShown;
    const images = isShown ? [] : [...selection].slice(0, MOST_SHOWN);
    fill(find("target-images", HTMLElement), [images, state?.session], () =>
      images.map((id) => this.targetImage(id)),
    );
  }

  /** An image that would be labeled, where the grid does not show it. @param {number} id */
  targetImage(id) {
    const open = button("", () => this.labeling.detail.show(id), { "aria-label": "Open the image" });
    open.append(element("img", { alt: "", src: this.store.imageUrl(id, "thumbnail") }));
    return open;
  }

  openNaming() {
    find("name-text", HTMLTextAreaElement).value = "";
    this.naming.returnValue = "";
    this.naming.showModal();
    find("name-text", HTMLTextAreaElement).focus();
  }

  async onNamed() {
    if (this.naming.returnValue !== "ok") return;
    const known = new Set(this.store.classes.map((c) => c.name));
    for (const name of namesOf(find("name-text", HTMLTextAreaElement).value)) {
      if (!known.has(name)) await this.labeling.addClass(name, []);
    }
  }

  /** @param {ClassInfo} info */
  openEditing(info) {
    this.edited = info;
    setText("edit-title", info.name);
    find("edit-name", HTMLInputElement).value = info.name;
    const others = this.store.classes.filter((c) => c.id !== info.id);
    find("edit-into", HTMLSelectElement).replaceChildren(
      ...others.map((c) => element("option", { value: c.id }, c.name)),
    );
    find("edit-merge", HTMLButtonElement).disabled = !others.length;
    this.editing.returnValue = "";
    this.editing.showModal();
  }

  async onEdited() {
    const { edited } = this;
    if (!edited) return;
    const name = find("edit-name", HTMLInputElement).value.trim();
    const into = Number(find("edit-into", HTMLSelectElement).value);
    if (this.editing.returnValue === "rename" && name && name !== edited.name) {
      await this.labeling.ask(
        "/api/classes",
        { action: "rename", id: edited.id, name },
        `${edited.name} is now ${name}`,
      );
    } else if (this.editing.returnValue === "merge") {
      const question = `Merge ${edited.name} into ${this.store.nameOf(into)}, with its ${plural(edited.labels, "label")}?`;
      if (!(await ask(question, "Merge"))) return;
      const text = `${edited.name} merged into ${this.store.nameOf(into)}`;
      await this.labeling.ask("/api/classes", { action: "merge", id: edited.id, into }, text);
    } else if (this.editing.returnValue === "delete") {
      const question = `Delete ${edited.name}? Its ${plural(edited.labels, "image")} will be unlabeled.`;
      if (!(await ask(question, "Delete"))) return;
      const text = `${edited.name} deleted`;
      await this.labeling.ask("/api/classes", { action: "delete", id: edited.id }, text);
    }
  }
}

/** Clusters of out-of-class images: each may be a class that has no name yet. */
export class ClusterList {
  /** @param {Api} api @param {Store} store @param {() => void} pick - opens the class picker */
  constructor(api, store, pick) {
    this.api = api;
    this.store = store;
    this.pick = pick;
    this.box = find("clusters", HTMLElement);
    this.shown = "";
    store.on(["filter", "columns"], () => this.update());
  }

  async update() {
    const { filter, version } = this.store;
    this.box.hidden = filter.view !== "new-class" || filter.ids !== null;
    const key = this.box.hidden ? "" : JSON.stringify([version, filter.cluster]);
    if (key === this.shown) return;
    this.shown = key;
    if (key) await attempt(async () => this.draw(await this.api.newClasses()));
  }

  /** @param {Cluster[]} clusters */
  draw(clusters) {
    const none = element(
      "p",
      { className: "empty" },
      "No clusters yet: they are made of images that the model takes for out-of-class.",
    );
    const shown = clusters.find(({ cluster }) => cluster === this.store.filter.cluster);
    const cards = clusters.map((cluster) => this.card(cluster));
    this.box.replaceChildren(...(clusters.length ? cards : [none]));
    if (shown && !this.store.readOnly) cards[clusters.indexOf(shown)].after(this.classButton(shown));
  }

  /** Selects the typical images of the group that is shown, and asks for the name of their class. @param {Cluster} cluster */
  classButton({ typical }) {
    const act = () => {
      this.store.select(typical);
      this.pick();
    };
    return button(`New class of the ${plural(typical.length, "most typical image")}…`, act, {
      className: "cluster-class write",
    });
  }

  /** @param {Cluster} cluster */
  card({ cluster, size, typical }) {
    const isOn = this.store.filter.cluster === cluster;
    const card = button("", () => this.store.setFilter({ cluster: isOn ? null : cluster }), {
      className: "cluster",
      "aria-pressed": String(isOn),
      "aria-label": `Cluster ${cluster + 1}, ${count(size)} images`,
    });
    const images = typical
      .slice(0, 4)
      .map((id) => element("img", { alt: "", src: this.store.imageUrl(id, "thumbnail") }));
    card.append(...images, element("span", {}, `${count(size)} images`));
    return card;
  }
}
