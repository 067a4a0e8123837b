// The map: every prototype a point, near those that point the same way, in the colour of its category.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { effect, signal } from "./vendor/signals-core/signals-core.js";
import { bar } from "./parts.js";
import { cleared, labelled, painter, plane, ringed } from "./plane.js";
import { api } from "./server.js";
import { address, change, count, dot, draw, pressable, problem } from "./controls.js";
import { card, whole } from "./card.js";

const CLOSER = 4, LISTED = 100;
const KEYS = "Map of prototypes; arrow keys go to the next one, plus and minus zoom, 0 shows all";

/** What is chosen (-1: none), the category and the words that alone are shown, buttons that are pressed,
 * what is said, and what stands beside: those in the lasso, a card, or why there is none.
 * @typedef {{ chosen: number, category: string, words: string, few: boolean, lassoing: boolean, said: string,
 *   side: { selected?: number[], one?: any, failed?: unknown } }} State */
const state = signal(/** @type {State} */ ({ chosen: -1, category: "", words: "", few: false, lassoing: false, said: "", side: {} }));

/** What is drawn: the prototypes, on which canvas, and from where it is seen. `line` is the lasso's, in the plane;
 * a `kind` is the number of a category, the last that of those without.
 * @typedef {{ root: HTMLElement, data: any, kinds: number[], dark: MediaQueryList, canvas: HTMLCanvasElement, line: number[][] | null, hovered: number,
 *   waiting: boolean, sized: boolean, shown: boolean[], visible: (i: number) => boolean, seen: ReturnType<typeof plane>,
 *   points: ReturnType<typeof painter> }} Ui */
/** @type {Ui | null} */
let kept = null;

export const show = async (root, at, shared) => {
  shared.command(["prismlm", "map", shared.model.path, ...(shared.model.lens?.map ? ["--html", "map.html"] : [])]);
  if (!kept) {
    const data = shared.map ?? await api("/map");
    // Opened twice while it was fetched, the page is made once.
    kept ??= made(root, data, shared);
  }
  open(kept, at.query);
};

/** @param {Ui} ui @param {State} now */
const page = (ui, { category, words, few, lassoing, said, side }, categories) => html`
<div class="prismlm x-tools"><div class="x-row">
    <input class="x-search" type="search" placeholder=${ui.data.texts ? "Search names, tokens, texts" : "Search names"} aria-label="Search prototypes"
      .value=${words} @input=${(event) => searched(ui, event.target.value)}>
    ${pressable("Lasso", lassoing, () => change(state, { lassoing: !lassoing }), "Draw around prototypes; with a mouse, hold Shift")}
    ${ui.data.listed.every(Boolean) ? nothing : pressable("Few places", few, () => change(state, { few: !few }), "Also those of fewer than ten places")}
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
const beside = (ui, { selected, one, failed }) => {
  if (selected) return summary(ui, selected, (i) => choose(ui, i));
  if (failed) return problem(failed);
  if (one) return html`${ui.line ? html`<button type="button" @click=${() => lassoed(ui)}>‹ Back to the lasso</button>` : nothing}${whole(one, "map")}`;
  return html`<h2>${count(ui.kinds.length)} prototypes</h2><p class="p-note">Near are those that point the same way.
    Point at one for its name, click for its card. To see what an area has, press Lasso (or hold Shift) and draw around it.</p>
    <h3>By category</h3><ul class="p-bars">${spread(ui, ui.kinds.map((_, i) => i))}</ul>`;
};

/** @returns {Ui} */
const made = (root, data, shared) => {
  const { x, y, categories } = data, texts = data.texts ?? data.names.map((name, i) => `#${i} ${name}`.toLowerCase());
  const kinds = data.category.map((number) => (number < 0 ? categories.length : number));
  const ui = /** @type {Ui} */ (/** @type {any} */ ({ root, data, kinds, dark: matchMedia("(prefers-color-scheme: dark)"), line: null, hovered: -1, waiting: false, sized: false, shown: [],
    visible: (i) => ui.shown[i] }));
  draw(root, () => page(ui, state.value, shared.model.categories));
  const canvas = ui.canvas = /** @type {HTMLCanvasElement} */ (root.querySelector(".x-over")), plot = /** @type {HTMLElement} */ (root.querySelector(".x-plot"));
  ui.seen = plane(canvas, x, y, {
    visible: ui.visible, redraw: () => redraw(ui), chosen: () => state.value.chosen,
    choose: (i) => choose(ui, i),
    hover: (i) => { if (i !== ui.hovered) { ui.hovered = i; redraw(ui); } },
    take: (event) => (event.shiftKey || state.value.lassoing ? drawing(ui) : null),
  });
  ui.points = painter(canvas, ui.seen, x, y, kinds, [...categories.map(({ colour }) => colour), "#94918a"]);
  ui.dark.addEventListener("change", () => redraw(ui));
  effect(() => {
    const { few, category, words } = state.value, wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = kinds.map((kind, i) => (few || data.listed[i]) && (!category || categories[kind]?.name === category) && wanted.every((word) => texts[i].includes(word)));
    // The points are repainted when this is another array.
    if (shown.some((one, i) => one !== ui.shown[i])) ui.shown = shown;
    redraw(ui);
  });
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
    if (ui.canvas.clientWidth && ui.canvas.clientHeight) drawnAll(ui);
  });
};

/** Show what is in the lasso. @param {Ui} ui */
const lassoed = (ui) => {
  const selected = surrounded(ui);
  change(state, { said: `${count(selected.length)} in the lasso`, side: { selected } });
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
  const selected = ui.data.leading.filter(ui.visible);
  change(state, words.trim() ? { said: `${count(selected.length)} found`, side: { selected } } : { said: "", side: {} });
  if (!words.trim() && state.value.chosen >= 0) void choose(ui, state.value.chosen);
};

/** Show one category alone, or with no name all. @param {Ui} ui */
const filter = (ui, category) => {
  change(state, { category });
  const { kinds } = ui;
  change(state, { said: category ? `${count(kinds.filter((_, i) => ui.visible(i)).length)} of ${count(kinds.length)}` : "" });
  if (ui.line) lassoed(ui);
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
const open = (ui, query) => {
  const { categories, names } = ui.data, number = query.get("prototype");
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
};

/** A gesture that draws the lasso; one that goes around nothing is dropped. @param {Ui} ui */
const drawing = (ui) => {
  /** @type {number[][]} */
  const line = ui.line = [];
  return {
    move: (px, py) => { line.push(ui.seen.inverse(px, py)); redraw(ui); },
    end: (finished) => {
      if (finished && line.length > 2) {
        lassoed(ui);
        change(state, { lassoing: false });
      } else ui.line = null;
      redraw(ui);
    },
  };
};

/** Visible prototypes inside of the line, those with most text first. @param {Ui} ui @returns {number[]} */
const surrounded = ({ line, data: { x, y, leading }, visible }) => {
  const path = new Path2D(), context = new OffscreenCanvas(1, 1).getContext("2d");
  for (const [px, py] of line ?? []) path.lineTo(px, py);
  return leading.filter((i) => visible(i) && context?.isPointInPath(path, x[i], y[i], "evenodd"));
};

/** The categories of selected prototypes, and of all. @param {Ui} ui @param {number[]} selected */
const spread = ({ data: { categories, names }, kinds }, selected) => {
  const totals = Map.groupBy(kinds, (kind) => kind), present = Map.groupBy(selected, (i) => kinds[i]);
  return [...present].sort((a, b) => b[1].length - a[1].length).map(([kind, { length }]) => {
    const { name, colour } = categories[kind] ?? { name: "no category" }, total = totals.get(kind)?.length ?? 0;
    const base = selected.length < names.length ? total / names.length : null;
    const title = `${name}: ${length} of ${selected.length}; of all prototypes ${total} of ${names.length}`;
    return bar(name, length / selected.length, { kind: colour ? "x-hued" : "p-grey", base, colour, title });
  });
};

/** Categories and names of selected prototypes. @param {Ui} ui
 * @param {number[]} selected @param {(i: number) => void} choose */
const summary = (ui, selected, choose) => {
  const { data: { categories, names }, kinds } = ui;
  return html`<h2>${count(selected.length)} prototypes</h2>${selected.length ? html`
    <h3>By category; the mark is the share of all prototypes</h3><ul class="p-bars">${spread(ui, selected)}</ul>
    <h3>${selected.length > LISTED ? `The ${LISTED} with most text` : "Those with most text first"}</h3>
    <ol class="x-found-list">${selected.slice(0, LISTED).map((i) => html`<li><button type="button" class="x-found" @click=${() => choose(i)}>
      ${dot(categories[kinds[i]]?.colour)}<bdi>${names[i]}</bdi></button></li>`)}</ol>` : nothing}`;
};

/** Draw the points, and over them the lasso and names. @param {Ui} ui */
const drawnAll = (ui) => {
  const { canvas, seen, data, dark, line, hovered } = ui, { chosen } = state.value, context = cleared(canvas);
  ui.points(context, ui.shown);
  if (line) outlined(context, line.map(([x, y]) => seen.at(x, y)), dark.matches);
  labelled(context, canvas, seen, data.regions, dark.matches);
  for (const i of new Set([chosen, hovered])) {
    if (i >= 0) ringed(context, canvas, seen.place(i), seen.size(), data.names[i], dark.matches);
  }
};

const outlined = (context, points, dark) => {
  context.beginPath();
  for (const [px, py] of points) context.lineTo(px, py);
  context.closePath();
  context.setLineDash([5, 4]);
  context.lineWidth = 1.5;
  context.strokeStyle = dark ? "#fff" : "#111";
  context.fillStyle = dark ? "#ffffff14" : "#0000000f";
  context.fill();
  context.stroke();
  context.setLineDash([]);
};
