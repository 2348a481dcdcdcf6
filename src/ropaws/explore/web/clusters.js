/**
 * Clusters of out-of-class images: each may be a class that has no name yet.
 *
 * @import { Api, Cluster } from "./api.js"
 * @import { Store } from "./store.js"
 */
import { button, element, find } from "./dom.js";
import { count } from "./format.js";
import { attempt } from "./messages.js";

export class ClusterList {
  /** @param {Api} api @param {Store} store */
  constructor(api, store) {
    this.api = api;
    this.store = store;
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
    this.box.replaceChildren(...(clusters.length ? clusters.map((cluster) => this.card(cluster)) : [none]));
  }

  /** @param {Cluster} cluster */
  card({ cluster, size, examples }) {
    const isOn = this.store.filter.cluster === cluster;
    const card = button("", () => this.store.setFilter({ cluster: isOn ? null : cluster }), {
      className: "cluster",
      "aria-pressed": String(isOn),
      "aria-label": `Cluster ${cluster + 1}, ${count(size)} images`,
    });
    const images = examples
      .slice(0, 4)
      .map((id) => element("img", { alt: "", src: this.store.imageUrl(id, "thumbnail") }));
    card.append(...images, element("span", {}, `${count(size)} images`));
    return card;
  }
}
