// The frame: which view is shown, by the address's part after #, and what all views share.
import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { batch, signal } from "./vendor/signals-core/signals-core.js";
import { links } from "./parts.js";
import { count, draw, problem } from "./controls.js";
import { api, away, shell } from "./server.js";

/** A view: its name in the bar, and the module that fills the page; its `show` is called again when the address changes.
 * @typedef {{ title: string, load: () => Promise<{ show: (root: HTMLElement, at: Place, shared: Shared) => void | Promise<void> }> }} View
 * @typedef {{ path: string[], query: URLSearchParams }} Place
 * @typedef {{ model: any, command: (words: (string | number)[] | null) => void, answer: any }} Shared */

/** @type {Record<string, View>} */
const views = {
  ask: { title: "Ask", load: () => import("./ask.js") },
  prototypes: { title: "Prototypes", load: () => import("./prototypes.js") },
  map: { title: "Map", load: () => import("./map.js") },
  steer: { title: "Steer", load: () => import("./steer.js") },
  inside: { title: "Inside", load: () => import("./inside.js") },
  audit: { title: "Audit", load: () => import("./audit.js") },
  document: { title: "Document", load: () => import("./document.js") },
};
// Documents are reached from passages.
const unlisted = new Set(["document"]);

/** @type {Shared} */
const shared = { model: null, answer: null, command: (words) => { command.value = words && withLens(words); } };
/** Commands that read a lens choose the one shown, if it is not the default. @param {(string | number)[]} words */
const withLens = (words) => {
  const inspecting = words[1] === "inspect", at = inspecting ? 3 : 2;
  return inspecting && words[2] !== "prototypes" ? words : words.toSpliced(at, 0, ...(shared.model?.lens_options ?? []));
};
/** What is shown: the view's name and its place on the page, and the command that does the same. */
const shown = signal({ name: "", root: /** @type {HTMLElement | null} */ (null) });
const command = signal(/** @type {(string | number)[] | null} */ (null));
const copied = signal(false);
const broken = signal(/** @type {unknown} */ (null));

const copy = async () => {
  await navigator.clipboard.writeText(shell(command.value ?? []));
  copied.value = true;
  setTimeout(() => { copied.value = false; }, 1500);
};

const facts = ({ name, base, parameters, prototypes }) => {
  const size = parameters >= 1e6 ? `${Math.round(parameters / 1e6)} M` : count(parameters);
  return `${name}${base ? ` · ${base.split("/").pop()}` : ""} · ${size} parameters · ${count(prototypes)} prototypes`;
};

const bar = (model, name) => html`<header class="x-bar">
  <h1 class="x-mark">prismlm</h1>
  <span class="x-model">${model ? facts(model) : ""}</span>
  <nav class="x-nav" aria-label="Views">${model ? Object.keys(views).filter((one) => !unlisted.has(one)).map((one) =>
    html`<a href=${`#/${one}`} aria-current=${one === name ? "page" : nothing}>${views[one].title}</a>`) : ""}</nav>
</header>`;

const foot = (words) => html`<footer class="x-foot" ?hidden=${words === null}>
  <span>The same in a terminal</span><code class="x-command" tabindex="0" role="group" aria-label="Command">${words && shell(words)}</code>
  <button type="button" class="x-copy" @click=${copy}>${copied.value ? "Copied" : "Copy"}</button>
</footer>`;

const page = () => {
  const { name, root } = shown.value, missing = shared.model?.missing ?? [];
  return html`<a class="p-sr x-skip" href="#view">To the content</a>
${bar(shared.model, name)}
<aside class="x-missing" aria-label="What is missing" ?hidden=${!missing.length}>
  ${missing.map(({ what, command }) => html`<p>Missing: ${what}. <code>${command}</code></p>`)}
</aside>
<main id="view" tabindex="-1">${broken.value ? problem(broken.value) : root ?? html`<p class="p-note">Loading…</p>`}</main>
${foot(command.value)}`;
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

// A view keeps its state while others are looked at.
const roots = new Map();
const rooted = (name) => {
  const root = document.createElement("section");
  root.className = `x-view x-${name}`;
  roots.set(name, root);
  return root;
};

const show = async () => {
  const at = place();
  const name = at.path[0] in views ? at.path[0] : "ask";
  const root = roots.get(name) ?? rooted(name);
  document.title = `${views[name].title} · ${shared.model.name} · prismlm`;
  batch(() => { shown.value = { name, root }; command.value = null; });
  try {
    const view = await views[name].load().catch(() => { throw away(); });
    // The user may have opened another view meanwhile.
    if (shown.value.name === name) await view.show(root, at, shared);
  } catch (error) {
    render(problem(error), root);
  }
};

const start = async () => {
  draw(document.body, page);
  try {
    shared.model = await api("/model");
  } catch (error) {
    broken.value = error;
    return;
  }
  const { lens } = shared.model;
  if (lens?.corpus) links.document = ({ doc_id, position }) => `#/document/${encodeURIComponent(doc_id)}?at=${position}`;
  links.prototype = (id) => `#/prototypes/${id}`;
  addEventListener("hashchange", () => { void show().then(() => document.querySelector("main")?.focus({ preventScroll: true })); });
  await show();
};
void start();
