// The lasso of the map: a line that is drawn around prototypes, and what it shows of them.
import { bar, make } from "./parts.js";
import { dot } from "./card.js";

const LISTED = 100;

/** Whether a place is inside of a closed line. @param {number[][]} line */
export const inside = (line, x, y) => {
  let within = false;
  line.forEach(([ax, ay], i) => {
    const [bx, by] = line[(i || line.length) - 1];
    if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) within = !within;
  });
  return within;
};

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

/** Visible prototypes inside of the line, the most used first. @param {import("./map.js").Ui} ui */
export const surrounded = ({ line, data, visible }) => {
  const { x, y, names, usage } = data;
  const found = names.map((_, i) => i).filter((i) => visible(i) && inside(line ?? [], x[i], y[i]));
  return found.sort((a, b) => usage[b] - usage[a] || a - b);
};

/** How those found spread over categories beside all. @param {import("./map.js").Ui} ui @param {number[]} found */
const spread = ({ data: { categories, names }, kinds }, found) => {
  const counted = (those) => {
    const counts = Array(categories.length + 1).fill(0);
    for (const i of those) counts[kinds[i]] += 1;
    return counts;
  };
  const totals = counted(names.keys());
  const present = counted(found).map((count, kind) => [count, kind]).filter(([count]) => count).sort((a, b) => b[0] - a[0]);
  return present.map(([count, kind]) => {
    const [share, base] = [count / found.length, totals[kind] / names.length];
    const name = categories[kind]?.name ?? "no category", item = bar(name, share, null, /** @type {any} */ (base));
    item.title = `${name}: ${count} of ${found.length}; of all prototypes ${totals[kind]} of ${names.length}`;
    return item;
  });
};

/** What is shown of those found: their categories and their names. @param {import("./map.js").Ui} ui
 * @param {number[]} found @param {(i: number) => void} choose */
export const summary = (ui, found, choose) => {
  const { data: { categories, names }, kinds } = ui;
  const rows = found.slice(0, LISTED).map((i) => {
    const node = Object.assign(make("button", "x-found", dot(categories[kinds[i]]?.hue ?? 0), make("bdi", null, names[i])), { type: "button" });
    node.addEventListener("click", () => choose(i));
    return make("li", null, node);
  });
  const heading = make("h2", null, `${found.length.toLocaleString("en")} prototypes`);
  if (!found.length) return [heading];
  return [heading, make("h3", null, "By category; the mark is the share of all prototypes"), make("ul", "p-bars", ...spread(ui, found)),
    make("h3", null, found.length > LISTED ? `The ${LISTED} most used` : "Most used first"), make("ol", "x-found-list", ...rows)];
};
