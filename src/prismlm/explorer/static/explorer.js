// The frame: which view is shown, by the address's part after #, and what all views share.
import { links, make } from "./parts.js";
import { api, shell } from "./server.js";
import * as ask from "./ask.js";
import * as audit from "./audit.js";
import * as document_ from "./document.js";
import * as inside from "./inside.js";
import * as map from "./map.js";
import * as prototypes from "./prototypes.js";
import * as steer from "./steer.js";

/** A view: its name in the bar, and what fills the page; `show` is called again when its address changes.
 * @typedef {{ title: string, show: (root: HTMLElement, at: Place, shared: Shared) => void | Promise<void>, needs?: (model: any) => string | null }} View
 * @typedef {{ path: string[], query: URLSearchParams }} Place
 * @typedef {{ model: any, command: (words: (string | number)[] | null) => void, answer: any }} Shared */

/** @type {Record<string, View>} */
const views = { ask, prototypes, map, steer, inside, audit, document: document_ };
// A document is come to from a passage.
const unlisted = new Set(["document"]);

const view = /** @type {HTMLElement} */ (document.querySelector("#view"));
const one = (selector) => /** @type {HTMLElement} */ (document.querySelector(selector));

/** @type {Shared} */
const shared = {
  model: null,
  answer: null,
  command: (words) => {
    one(".x-foot").hidden = words === null;
    one(".x-command").textContent = words === null ? "" : shell(words);
  },
};

const decoded = (part) => {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
};
const place = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").map(decoded), query: new URLSearchParams(query ?? "") };
};

const roots = new Map();
const show = async () => {
  const at = place();
  const name = at.path[0] in views ? at.path[0] : "ask";
  document.title = `${views[name].title} · ${shared.model.name} · prismlm`;
  for (const link of document.querySelectorAll(".x-nav a")) {
    if (link.getAttribute("href") === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  // A view keeps its state while others are looked at.
  if (!roots.has(name)) roots.set(name, make("section", `x-view x-${name}`));
  const root = roots.get(name);
  view.replaceChildren(root);
  shared.command(null);
  try {
    await views[name].show(root, at, shared);
  } catch (error) {
    root.replaceChildren(problem(error));
  }
};

/** A message of ours in the place of what could not be shown. @param {unknown} error */
export const problem = (error) => {
  const node = make("p", "x-problem", error instanceof Error ? error.message : String(error));
  node.setAttribute("role", "alert");
  return node;
};

const missing = (list) => {
  const box = one(".x-missing");
  box.hidden = !list.length;
  box.replaceChildren(...list.map(({ what, command }) => make("p", null, `Missing: ${what}. `, make("code", null, command))));
};

const start = async () => {
  try {
    shared.model = await api("/model");
  } catch (error) {
    view.replaceChildren(problem(error));
    return;
  }
  const { model } = shared;
  const size = model.parameters >= 1e6 ? `${Math.round(model.parameters / 1e6)} M` : model.parameters.toLocaleString("en");
  one(".x-model").textContent = `${model.name}${model.base ? ` · ${model.base.split("/").pop()}` : ""} · ${size} parameters · ${model.prototypes.toLocaleString("en")} prototypes`;
  one(".x-nav").append(...Object.entries(views).filter(([name]) => !unlisted.has(name)).map(([name, { title }]) => Object.assign(make("a", null, title), { href: `#/${name}` })));
  missing(model.missing);
  if (model.lens?.corpus) links.document = ({ doc_id, position }) => `#/document/${encodeURIComponent(doc_id)}?at=${position}`;
  links.prototype = (id) => `#/prototypes/${id}`;
  one(".x-copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(one(".x-command").textContent ?? "");
    one(".x-copy").textContent = "Copied";
    setTimeout(() => { one(".x-copy").textContent = "Copy"; }, 1500);
  });
  addEventListener("hashchange", () => { void show().then(() => view.focus({ preventScroll: true })); });
  await show();
};
void start();
