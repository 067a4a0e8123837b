// The map: every prototype a point, near those that point the same way, in the colour of its category.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { effect, signal } from "./vendor/signals-core/signals-core.js";
import { plane } from "./plane.js";
import { api } from "./server.js";
import { address, change, count, dot, draw, pressable, problem } from "./controls.js";
import { card } from "./hover.js";
import { whole } from "./card.js";
import { dots } from "./dots.js";
import { drawing, spread, summary, surrounded } from "./lasso.js";
import { overlaid } from "./overlay.js";

const CLOSER = 4;
const KEYS = "Map of prototypes; arrow keys go to the next one, plus and minus zoom, 0 shows all";

/** What is chosen (-1: none), the category and the words that alone are shown, buttons that are pressed, the path of the last answer,
 * what is said, and what stands beside: those found by the lasso, a card, or why there is none.
 * @typedef {{ chosen: number, category: string, words: string, few: boolean, lassoing: boolean, pathed: boolean, trail: { id: number, text: string }[], said: string,
 *   side: { found?: number[], one?: any, failed?: unknown } }} State */
const state = signal(/** @type {State} */ ({ chosen: -1, category: "", words: "", few: false, lassoing: false, pathed: false, trail: [], said: "", side: {} }));

/** What is drawn: the prototypes, on which canvas, and from where it is seen. `line` is the lasso's, in the plane;
 * a `kind` is the number of a category, the last that of those without.
 * @typedef {{ root: HTMLElement, data: any, kinds: number[], dark: MediaQueryList, canvas: HTMLCanvasElement, line: number[][] | null, hovered: number,
 *   waiting: boolean, sized: boolean, state: typeof state, visible: (i: number) => boolean, seen: ReturnType<typeof plane>,
 *   painter: import("./dots.js").Painter }} Ui */
/** @type {Ui | null} */
let kept = null;

export const show = async (root, at, shared) => {
  shared.command(["prismlm", "map", shared.model.path, ...(shared.model.lens?.map ? ["--html", "map.html"] : [])]);
  if (!kept) {
    const data = shared.map ?? await api("/map");
    // Opened twice while it was fetched, the page is made once.
    kept ??= made(root, data, shared);
  }
  open(kept, at.query, shared);
};

/** The leading prototypes of an answer, by evidence, with the tokens that each led. */
const pathOf = (answer, many) => {
  /** @type {State["trail"]} */
  const path = [];
  for (const step of answer?.data.steps ?? []) {
    const leading = step.uses.reduce((best, use) => (!best || use[2] > best[2] ? use : best), null);
    if (!leading || leading[0] >= many) continue;
    const last = path.at(-1);
    if (last && last.id === leading[0]) last.text += step.target;
    else path.push({ id: leading[0], text: step.target });
  }
  return path;
};

/** @param {Ui} ui @param {State} now */
const page = (ui, { category, words, few, lassoing, pathed, trail, said, side }, categories) => html`
<div class="prismlm x-tools"><div class="x-row">
    <input class="x-search" type="search" placeholder=${ui.data.texts ? "Search names, tokens, texts" : "Search names"} aria-label="Search prototypes"
      .value=${words} @input=${(event) => searched(ui, event.target.value)}>
    ${pressable("Lasso", lassoing, () => change(state, { lassoing: !lassoing }), "Draw around prototypes; with a mouse, hold Shift")}
    ${trail.length ? pressable("Path of the last answer", pathed, () => change(state, { pathed: !pathed })) : nothing}
    ${ui.data.listed.every(Boolean) ? nothing : pressable("Few places", few, () => { change(state, { few: !few }); restyle(ui); }, "Also those of fewer than ten places")}
    <button type="button" @click=${() => ui.seen.fit()}>All of it</button><button type="button" @click=${() => emptied(ui)}>Clear</button>
    <span class="p-note" role="status">${said}</span></div>
  <div class="x-chips" role="group" aria-label="Categories">${categories.map((one) => chip(ui, one, category))}</div></div>
<div class="prismlm x-map-body">
  <div class="x-plot"><canvas class="x-over" tabindex="0" role="application" aria-label=${KEYS}
    @keydown=${(event) => { if (event.key === "Escape") emptied(ui); }}></canvas></div>
  <section class="x-side" aria-live="polite">${guard([side], () => beside(ui, side))}</section></div>`;

const chip = (ui, { name, colour, prototypes }, category) => html`<button type="button" class="x-chip" aria-pressed=${name === category}
  @click=${() => { filter(ui, name === category ? "" : name); link(ui); }}>${dot(colour)}<bdi>${name}</bdi><span class="p-number">${count(prototypes)}</span></button>`;

/** @param {Ui} ui @param {State["side"]} side */
const beside = (ui, { found, one, failed }) => {
  if (found) return summary(ui, found, (i) => choose(ui, i));
  if (failed) return problem(failed);
  if (one) return html`${ui.line ? html`<button type="button" @click=${() => lassoed(ui)}>‹ Back to the lasso</button>` : nothing}${whole(one, "map")}`;
  return html`<h2>${count(ui.kinds.length)} prototypes</h2><p class="p-note">Near are those that point the same way.
    Point at one for its name, click for its card. To see what an area has, press Lasso (or hold Shift) and draw around it.</p>
    <h3>By category</h3><ul class="p-bars">${spread(ui, ui.kinds.map((_, i) => i))}</ul>`;
};

/** @returns {Ui} */
const made = (root, data, shared) => {
  const { x, y, categories } = data, texts = data.texts ?? data.names.map((name, i) => `#${i} ${name}`.toLowerCase());
  const searchedFor = () => state.value.words.toLowerCase().split(/\s+/).filter(Boolean);
  const kinds = data.category.map((number) => (number < 0 ? categories.length : number));
  const ui = /** @type {Ui} */ ({
    root, data, kinds, state, dark: matchMedia("(prefers-color-scheme: dark)"), line: null, hovered: -1, waiting: false, sized: false,
    visible: (i) => (state.value.few || data.listed[i]) && (!state.value.category || categories[kinds[i]]?.name === state.value.category)
      && searchedFor().every((word) => texts[i].includes(word)),
  });
  draw(root, () => page(ui, state.value, shared.model.categories));
  const canvas = ui.canvas = /** @type {HTMLCanvasElement} */ (root.querySelector(".x-over")), plot = /** @type {HTMLElement} */ (root.querySelector(".x-plot"));
  ui.seen = plane(canvas, x, y, {
    visible: ui.visible, redraw: () => redraw(ui), chosen: () => state.value.chosen,
    choose: (i) => choose(ui, i),
    hover: (i) => { if (i !== ui.hovered) { ui.hovered = i; redraw(ui); } },
    take: (event) => (event.shiftKey || state.value.lassoing ? drawing(ui, () => redraw(ui), (around) => drawn(ui, around)) : null),
  });
  ui.painter = dots(plot, x, y, kinds, () => redraw(ui));
  ui.dark.addEventListener("change", () => redraw(ui));
  // What is chosen and the path lie over the points.
  effect(() => { state.value; redraw(ui); });
  new ResizeObserver(() => {
    if (!canvas.clientWidth) return;
    if (!ui.sized) { ui.sized = true; ui.seen.fit(); near(ui); }
    redraw(ui);
  }).observe(plot);
  return ui;
};

/** @param {Ui} ui */
const redraw = (ui) => {
  if (ui.waiting) return;
  ui.waiting = true;
  requestAnimationFrame(() => {
    ui.waiting = false;
    if (!ui.canvas.clientWidth) return;
    ui.painter.draw(ui.seen);
    overlaid(ui);
  });
};

/** Colour the points anew. @param {Ui} ui */
const restyle = (ui) => {
  ui.painter.restyle([...ui.data.categories.map(({ colour }) => colour), "#94918a"], ui.visible);
  redraw(ui);
};

/** A lasso's end. @param {Ui} ui @param {boolean} around */
const drawn = (ui, around) => {
  if (around) {
    lassoed(ui);
    change(state, { lassoing: false });
  } else ui.line = null;
  redraw(ui);
};

/** Show what is in the lasso. @param {Ui} ui */
const lassoed = (ui) => {
  const found = surrounded(ui);
  change(state, { said: `${count(found.length)} in the lasso`, side: { found } });
};

/** Put into the address what is looked at. @param {Ui} ui */
const link = ({ root }) => {
  const { chosen, category } = state.value;
  if (root.isConnected) history.replaceState(null, "", address("map", { prototype: chosen < 0 ? null : chosen, category }));
};

/** @param {Ui} ui */
const choose = async (ui, i) => {
  change(state, { chosen: i });
  link(ui);
  const side = await card(i).then((one) => ({ one }), (failed) => ({ failed }));
  if (state.value.chosen === i) change(state, { side });
};

/** Show those alone that have some words. @param {Ui} ui @param {string} words */
const searched = (ui, words) => {
  ui.line = null;
  change(state, { words });
  const found = ui.data.leading.filter(ui.visible);
  change(state, words.trim() ? { said: `${count(found.length)} found`, side: { found } } : { said: "", side: {} });
  restyle(ui);
  if (!words.trim() && state.value.chosen >= 0) void choose(ui, state.value.chosen);
};

/** Show one category alone, or with no name all. @param {Ui} ui */
const filter = (ui, category) => {
  change(state, { category });
  const { kinds } = ui;
  change(state, { said: category ? `${count(kinds.filter((_, i) => ui.visible(i)).length)} of ${count(kinds.length)}` : "" });
  if (ui.line) lassoed(ui);
  restyle(ui);
};

/** Take lasso and filter away; what is chosen stays. @param {Ui} ui */
const emptied = (ui) => {
  ui.line = null;
  change(state, { words: "" });
  filter(ui, "");
  link(ui);
  if (state.value.chosen >= 0) void choose(ui, state.value.chosen);
  else change(state, { side: {} });
};

/** Look at the chosen prototype from nearer by. @param {Ui} ui */
const near = ({ seen, data }) => {
  const { chosen } = state.value;
  if (chosen < 0) return;
  seen.fit();
  Object.assign(seen.view, { x: data.x[chosen], y: data.y[chosen], scale: seen.view.scale * CLOSER });
};

/** Look at what an address names. @param {Ui} ui */
const open = (ui, query, shared) => {
  const { categories, names } = ui.data, number = query.get("prototype");
  change(state, { trail: pathOf(shared.answer, names.length) });
  if (query.has("category")) filter(ui, categories.some(({ name }) => name === query.get("category")) ? query.get("category") : "");
  if (number !== null) {
    if (!/^\d+$/.test(number) || +number >= names.length) {
      change(state, { side: { failed: new Error(`There is no prototype ${number}: they are numbered 0 to ${count(names.length - 1)}.`) } });
    } else if (+number !== state.value.chosen) {
      void choose(ui, +number);
      if (ui.sized) near(ui);
    }
  }
  if (!query.size) link(ui);
  restyle(ui);
};
