/** Parts of a page, built from text: nothing here reads HTML, so names of files and classes stay text. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | null | false | undefined} Child */

/**
 * A new element. Keys of `props` that the element knows are set as properties, others as attributes;
 * `on` has its listeners.
 *
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [props]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on")
      for (const [name, listener] of Object.entries(value)) node.addEventListener(name, listener);
    else if (key === "color") node.style.setProperty("--color", value);
    else if (key in node) Reflect.set(node, key, value);
    else node.setAttribute(key, String(value));
  }
  node.append(...kept(children));
  return node;
}

/** @param {string} tag @param {Record<string, string | number>} attributes @param {...Child} children */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...kept(children));
  return node;
}

/** @param {Child[]} children @returns {(Node | string)[]} */
function kept(children) {
  return /** @type {(Node | string)[]} */ (children.filter((child) => child instanceof Node || child));
}

/**
 * @param {string} text
 * @param {() => void} act
 * @param {Record<string, any>} [props]
 * @param {...Child} more
 */
export function button(text, act, props = {}, ...more) {
  return element("button", { type: "button", on: { click: act }, ...props }, text, ...more);
}

/**
 * The element of the page with this id, which must be of this type.
 *
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} type
 * @returns {T}
 */
export function find(id, type) {
  const node = document.getElementById(id);
  if (!(node instanceof type)) throw new Error(`the page has no ${type.name} #${id}`);
  return node;
}

/** @param {string} id @param {string} text */
export function setText(id, text) {
  const node = find(id, HTMLElement);
  if (node.textContent !== text) node.textContent = text; // an unchanged live region stays silent
}

/**
 * Fills a box anew, but only if what it shows has changed: the state is polled every second, and a rebuilt
 * button would lose the focus.
 *
 * @param {HTMLElement} box @param {unknown} key @param {() => Child[]} build
 */
export function fill(box, key, build) {
  const text = JSON.stringify(key);
  if (box.dataset.key === text) return;
  box.dataset.key = text;
  box.replaceChildren(...kept(build()));
}
