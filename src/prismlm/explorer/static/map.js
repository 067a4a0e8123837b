// The map: every prototype a point, near those that point the same way, in the hue of its category.
import { make } from "./parts.js";
import { plane } from "./plane.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";
import { card } from "./hover.js";
import { address, dot, whole } from "./card.js";
import { dots } from "./dots.js";
import { drawing, summary, surrounded } from "./lasso.js";
import { overlaid } from "./overlay.js";

export const title = "Map";
const CLOSER = 4;

/** The map: its parts on the page, the prototypes, and what of them is looked at (-1: none).
 * `line` is the lasso's, in the plane; a `kind` is the number of a category, the last that of those without.
 * @typedef {{ root: HTMLElement, data: any, kinds: number[], dark: MediaQueryList, lasso: HTMLElement, path: HTMLElement, fit: HTMLElement,
 *   clear: HTMLElement, said: HTMLElement, chips: HTMLElement, canvas: HTMLCanvasElement, plot: HTMLElement, side: HTMLElement,
 *   line: number[][] | null, category: string, chosen: number, hovered: number, trail: { id: number, text: string }[], lassoing: boolean,
 *   waiting: boolean, sized: boolean, visible: (i: number) => boolean, seen: ReturnType<typeof plane>, painter: import("./dots.js").Painter }} Ui */

/** @type {Ui | null} */
let kept = null;

export const show = async (root, at, shared) => {
  shared.command(["prismlm", "map", shared.model.path, ...(shared.model.lens?.map ? ["--html", "map.html"] : [])]);
  if (!kept) {
    const data = await api("/map");
    // Opened twice while it was fetched, the page is made once.
    if (!kept) {
      root.replaceChildren();
      kept = made(root, data, shared);
    }
  }
  open(kept, at.query, shared);
};

/** The leading prototypes of an answer, by evidence, with the tokens that each led. */
const pathOf = (answer, count) => {
  /** @type {{ id: number, text: string }[]} */
  const path = [];
  for (const step of answer?.data.steps ?? []) {
    const leading = step.uses.reduce((best, use) => (!best || use[2] > best[2] ? use : best), null);
    if (!leading || leading[0] >= count) continue;
    const last = path.at(-1);
    if (last && last.id === leading[0]) last.text += step.target;
    else path.push({ id: leading[0], text: step.target });
  }
  return path;
};

const button = (text, pressed) => {
  const node = Object.assign(make("button", null, text), { type: "button" });
  if (pressed !== undefined) toggle(node, pressed);
  return node;
};
const toggle = (node, on) => node.setAttribute("aria-pressed", String(on));

/** The parts of the page, without chips. */
const parts = (root) => {
  const [lasso, path, fit, clear] = [button("Lasso", false), button("Path of the last answer", false), button("All of it"), button("Clear")];
  lasso.title = "Draw around prototypes; with a mouse, hold Shift";
  const said = make("span", "p-note");
  said.setAttribute("role", "status");
  const chips = make("div", "x-chips");
  chips.setAttribute("role", "group");
  chips.setAttribute("aria-label", "Categories");
  const canvas = Object.assign(make("canvas", "x-over"), { tabIndex: 0 });
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", "Map of prototypes; arrow keys go to the next one, plus and minus zoom, 0 shows all");
  const plot = make("div", "x-plot", canvas), side = make("section", "x-side");
  side.setAttribute("aria-live", "polite");
  root.append(make("div", "prismlm x-tools", make("div", "x-row", lasso, path, fit, clear, said), chips),
    make("div", "prismlm x-map-body", plot, side));
  return { root, lasso, path, fit, clear, said, chips, canvas, plot, side };
};

const made = (root, data, shared) => {
  const { x, y, categories } = data;
  const kinds = data.category.map((number) => (number < 0 ? categories.length : number));
  /** @type {Ui} */
  const ui = /** @type {any} */ ({
    ...parts(root), data, kinds, dark: matchMedia("(prefers-color-scheme: dark)"),
    line: null, category: "", chosen: -1, hovered: -1, trail: [], lassoing: false, waiting: false, sized: false,
    visible: (i) => !ui.category || categories[kinds[i]]?.name === ui.category,
  });
  ui.seen = plane(ui.canvas, x, y, {
    visible: ui.visible, redraw: () => redraw(ui), chosen: () => ui.chosen,
    choose: (i) => choose(ui, i),
    hover: (i) => { if (i !== ui.hovered) { ui.hovered = i; redraw(ui); } },
    take: (event) => (event.shiftKey || ui.lassoing ? drawing(ui, () => redraw(ui), (around) => drawn(ui, around)) : null),
  });
  ui.painter = dots(ui.plot, x, y, kinds, () => redraw(ui));
  ui.chips.append(...shared.model.categories.map((category) => chip(ui, category)));
  ui.side.append(intro(ui));
  wired(ui);
  return ui;
};

/** @param {Ui} ui */
const wired = (ui) => {
  const { lasso, path, fit, clear, canvas, dark, plot } = ui;
  lasso.addEventListener("click", () => toggle(lasso, ui.lassoing = !ui.lassoing));
  path.addEventListener("click", () => { toggle(path, path.getAttribute("aria-pressed") !== "true"); redraw(ui); });
  fit.addEventListener("click", () => ui.seen.fit());
  clear.addEventListener("click", () => emptied(ui));
  canvas.addEventListener("keydown", (event) => { if (event.key === "Escape") emptied(ui); });
  dark.addEventListener("change", () => restyle(ui));
  new ResizeObserver(() => {
    if (!canvas.clientWidth) return;
    if (!ui.sized) { ui.sized = true; ui.seen.fit(); near(ui); }
    redraw(ui);
  }).observe(plot);
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
  const dark = ui.dark.matches;
  const colours = ui.data.categories.map(({ hue }) => (dark ? `oklch(.74 .13 ${hue})` : `oklch(.62 .15 ${hue})`));
  ui.painter.restyle([...colours, dark ? "#70747d" : "#a9a69d"], ui.visible);
  redraw(ui);
};

/** A lasso's end. @param {Ui} ui @param {boolean} around */
const drawn = (ui, around) => {
  if (around) {
    lassoed(ui);
    toggle(ui.lasso, ui.lassoing = false);
  } else ui.line = null;
  redraw(ui);
};

/** Show what is in the lasso. @param {Ui} ui */
const lassoed = (ui) => {
  const found = surrounded(ui);
  ui.said.textContent = `${found.length.toLocaleString("en")} in the lasso`;
  ui.side.replaceChildren(...summary(ui, found, (i) => choose(ui, i)));
};

/** Put into the address what is looked at. @param {Ui} ui */
const link = ({ root, chosen, category }) => {
  if (root.isConnected) history.replaceState(null, "", address("map", { prototype: chosen < 0 ? null : chosen, category }));
};

/** @param {Ui} ui */
const choose = async (ui, i) => {
  ui.chosen = i;
  redraw(ui);
  link(ui);
  const back = ui.line ? button("‹ Back to the lasso") : null;
  back?.addEventListener("click", () => lassoed(ui));
  try {
    const one = await card(i);
    if (ui.chosen === i) ui.side.replaceChildren(...(back ? [back] : []), ...whole(one, "map"));
  } catch (error) {
    if (ui.chosen === i) ui.side.replaceChildren(problem(error));
  }
};

/** Show one category alone, or with no name all. @param {Ui} ui */
const filter = (ui, name) => {
  const { kinds } = ui;
  ui.category = name;
  [...ui.chips.children].forEach((node) => toggle(node, /** @type {HTMLElement} */ (node).dataset.category === name));
  ui.said.textContent = name ? `${kinds.filter((_, i) => ui.visible(i)).length.toLocaleString("en")} of ${kinds.length.toLocaleString("en")}` : "";
  if (ui.line) lassoed(ui);
  restyle(ui);
};

const chip = (ui, { name, hue, prototypes }) => {
  const node = Object.assign(make("button", "x-chip", dot(hue), make("bdi", null, name), make("span", "p-number", prototypes.toLocaleString("en"))), { type: "button" });
  node.dataset.category = name;
  node.addEventListener("click", () => { filter(ui, ui.category === name ? "" : name); link(ui); });
  return node;
};

/** Take lasso and filter away; what is chosen stays. @param {Ui} ui */
const emptied = (ui) => {
  ui.line = null;
  filter(ui, "");
  link(ui);
  if (ui.chosen >= 0) void choose(ui, ui.chosen);
  else ui.side.replaceChildren(intro(ui));
};

const intro = ({ kinds }) => make("p", "p-note", `${kinds.length.toLocaleString("en")} prototypes; near are those that point the same way. Point at one for its name, click for its card. To see what an area has, press Lasso (or hold Shift) and draw around it.`);

/** Look at the chosen prototype from nearer by. @param {Ui} ui */
const near = ({ chosen, seen, data }) => {
  if (chosen < 0) return;
  seen.fit();
  Object.assign(seen.view, { x: data.x[chosen], y: data.y[chosen], scale: seen.view.scale * CLOSER });
};

/** Look at what an address names. @param {Ui} ui */
const open = (ui, query, shared) => {
  const { categories, names } = ui.data, number = query.get("prototype");
  ui.trail = pathOf(shared.answer, names.length);
  ui.path.hidden = !ui.trail.length;
  if (query.has("category")) filter(ui, categories.some(({ name }) => name === query.get("category")) ? query.get("category") : "");
  if (number !== null) {
    if (!/^\d+$/.test(number) || +number >= names.length) {
      ui.side.replaceChildren(problem(new Error(`There is no prototype ${number}: they are numbered 0 to ${(names.length - 1).toLocaleString("en")}.`)));
    } else if (+number !== ui.chosen) {
      void choose(ui, +number);
      if (ui.sized) near(ui);
    }
  }
  if (!query.size) link(ui);
  restyle(ui);
};
