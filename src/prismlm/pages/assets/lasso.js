// The lasso of the map: a line that is drawn around prototypes, and what it shows of them.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { bar } from "./parts.js";
import { count, dot } from "./controls.js";

const LISTED = 100;

/** A gesture that draws a line. @param {import("./map.js").Ui} ui @param {() => void} redraw
 * @param {(finished: boolean) => void} ended told whether the line goes around anything */
export const drawing = (ui, redraw, ended) => {
  /** @type {number[][]} */
  const line = ui.line = [];
  return {
    move: (px, py) => { line.push(ui.seen.inverse(px, py)); redraw(); },
    end: (finished) => ended(finished && line.length > 2),
  };
};

/** Return what says whether a place is inside of a line. @param {number[][]} line @returns {(x: number, y: number) => boolean} */
const around = (line) => {
  const path = new Path2D(), context = new OffscreenCanvas(1, 1).getContext("2d");
  for (const [x, y] of line) path.lineTo(x, y);
  return (x, y) => context?.isPointInPath(path, x, y, "evenodd") ?? false;
};

/** Visible prototypes inside of the line, those with most text first. @param {import("./map.js").Ui} ui */
export const surrounded = ({ line, data, visible }) => {
  const { x, y, leading } = data, inside = around(line ?? []);
  return leading.filter((i) => visible(i) && inside(x[i], y[i]));
};

/** How those found spread over categories beside all. @param {import("./map.js").Ui} ui @param {number[]} found */
export const spread = ({ data: { categories, names }, kinds }, found) => {
  const counted = (those) => {
    const counts = Array(categories.length + 1).fill(0);
    for (const i of those) counts[kinds[i]] += 1;
    return counts;
  };
  const totals = counted(names.keys());
  const present = counted(found).map((number, kind) => [number, kind]).filter(([number]) => number).sort((a, b) => b[0] - a[0]);
  return present.map(([number, kind]) => {
    const share = number / found.length, base = found.length < names.length ? totals[kind] / names.length : null;
    const { name, colour } = categories[kind] ?? { name: "no category" };
    const item = bar(name, share, colour === undefined ? "p-grey" : "x-hued", /** @type {any} */ (base));
    item.style.setProperty("--k", colour ?? null);
    item.title = `${name}: ${number} of ${found.length}; of all prototypes ${totals[kind]} of ${names.length}`;
    return item;
  });
};

/** What is shown of those found: their categories and their names. @param {import("./map.js").Ui} ui
 * @param {number[]} found @param {(i: number) => void} choose */
export const summary = (ui, found, choose) => {
  const { data: { categories, names }, kinds } = ui;
  return html`<h2>${count(found.length)} prototypes</h2>${found.length ? html`
    <h3>By category; the mark is the share of all prototypes</h3><ul class="p-bars">${spread(ui, found)}</ul>
    <h3>${found.length > LISTED ? `The ${LISTED} with most text` : "Those with most text first"}</h3>
    <ol class="x-found-list">${found.slice(0, LISTED).map((i) => html`<li><button type="button" class="x-found" @click=${() => choose(i)}>
      ${dot(categories[kinds[i]]?.colour)}<bdi>${names[i]}</bdi></button></li>`)}</ol>` : nothing}`;
};
