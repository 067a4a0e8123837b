// The map: every prototype a point, near those that point the same way, in the hue of its category.
import { bar, make } from "./parts.js";
import { boxOf, cleared, plane, plaque, ringed } from "./plane.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";
import { card } from "./hover.js";
import { address, dot, whole } from "./card.js";
import { dots } from "./dots.js";

export const title = "Map";
const LISTED = 100, CLOSER = 4;

/** @type {any} */
let ui = null;

export const show = async (root, at, shared) => {
  shared.command(["prismlm", "map", shared.model.path, ...(shared.model.lens?.map ? ["--html", "map.html"] : [])]);
  if (!ui) {
    const data = await api("/map");
    root.replaceChildren();
    ui ??= made(root, data, shared);
  }
  ui.open(at.query);
};

/** Whether a place is inside of a closed line. @param {number[][]} line */
export const inside = (line, x, y) => {
  let within = false;
  line.forEach(([ax, ay], i) => {
    const [bx, by] = line[(i || line.length) - 1];
    if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) within = !within;
  });
  return within;
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

const made = (root, data, shared) => {
  const { x: xs, y: ys, names, usage, categories } = data;
  // The last kind is of those without a category.
  const kinds = data.category.map((number) => (number < 0 ? categories.length : number));
  const totals = Array(categories.length + 1).fill(0);
  kinds.forEach((kind) => { totals[kind] += 1; });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = (text, pressed) => {
    const node = Object.assign(make("button", null, text), { type: "button" });
    if (pressed !== undefined) node.setAttribute("aria-pressed", String(pressed));
    return node;
  };
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

  /** @type {number[][] | null} */
  let line = null;
  let category = "", chosen = -1, hovered = -1, drawing = false, trail = [], asked = false, sized = false;
  const visible = (i) => !category || categories[kinds[i]]?.name === category;
  const colours = () => [...categories.map(({ hue }) => (dark.matches ? `oklch(.74 .13 ${hue})` : `oklch(.62 .15 ${hue})`)), dark.matches ? "#70747d" : "#a9a69d"];
  const redraw = () => { if (!asked) { asked = true; requestAnimationFrame(draw); } };
  const seen = plane(canvas, xs, ys, {
    visible, redraw, chosen: () => chosen,
    choose: (i) => choose(i),
    hover: (i) => { if (i !== hovered) { hovered = i; redraw(); } },
    take: (event) => (event.shiftKey || drawing ? gesture() : null),
  });
  const painter = dots(plot, xs, ys, kinds, redraw);
  const restyle = () => { painter.restyle(colours(), visible); redraw(); };

  const draw = () => {
    asked = false;
    if (!canvas.clientWidth) return;
    painter.draw(seen);
    const context = cleared(canvas);
    if (line) outlined(context, line);
    if (path.getAttribute("aria-pressed") === "true") trailed(context);
    for (const i of new Set([chosen, hovered])) {
      if (i >= 0) ringed(context, canvas, seen.place(i), seen.size(), names[i], dark.matches);
    }
  };
  const traced = (context, points) => {
    context.beginPath();
    points.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
  };
  const outlined = (context, points) => {
    traced(context, points.map(([x, y]) => seen.at(x, y)));
    context.closePath();
    context.setLineDash([5, 4]);
    context.lineWidth = 1.5;
    context.strokeStyle = dark.matches ? "#fff" : "#111";
    context.fillStyle = dark.matches ? "#ffffff14" : "#0000000f";
    context.fill();
    context.stroke();
    context.setLineDash([]);
  };
  const trailed = (context) => {
    const points = trail.map(({ id }) => seen.place(id));
    context.lineWidth = 1.6;
    context.strokeStyle = context.fillStyle = dark.matches ? "#93b4ff" : "#1f4fbf";
    // What was read last stands out most.
    points.forEach((point, i) => {
      context.globalAlpha = 0.25 + (0.65 * (i + 1)) / points.length;
      if (i) { traced(context, [points[i - 1], point]); context.stroke(); }
      context.beginPath();
      context.arc(point[0], point[1], 3.5, 0, 7);
      context.fill();
    });
    context.globalAlpha = 1;
    const taken = [];
    trail.forEach(({ text }, i) => {
      const [px, py] = points[i], box = boxOf(context, canvas, text, px, py - 4);
      const [left, top, wide, high] = box;
      const off = px < 0 || py < 0 || px > canvas.clientWidth || py > canvas.clientHeight;
      if (off || taken.some(([l, t, w, h]) => left < l + w && l < left + wide && top < t + h && t < top + high)) return;
      taken.push(box);
      plaque(context, text, box, dark.matches);
    });
  };

  const gesture = () => {
    /** @type {number[][]} */
    const points = [];
    line = points;
    return {
      move: (px, py) => { points.push(seen.inverse(px, py)); redraw(); },
      end: (finished) => {
        if (finished && points.length > 2) { lassoed(); toggle(lasso, drawing = false); } else { line = null; }
        redraw();
      },
    };
  };
  const toggle = (node, on) => node.setAttribute("aria-pressed", String(on));

  /** Those inside of the lasso: how they spread over categories beside all, and their names. */
  const lassoed = () => {
    const around = line ?? [];
    const found = names.map((_, i) => i).filter((i) => visible(i) && inside(around, xs[i], ys[i]));
    found.sort((a, b) => usage[b] - usage[a] || a - b);
    const counts = Array(categories.length + 1).fill(0);
    found.forEach((i) => { counts[kinds[i]] += 1; });
    const bars = counts.map((count, kind) => [count, kind]).filter(([count]) => count).sort((a, b) => b[0] - a[0]).map(([count, kind]) => {
      const [share, base] = [count / found.length, totals[kind] / names.length];
      const name = categories[kind]?.name ?? "no category", item = bar(name, share, null, /** @type {any} */ (base));
      item.title = `${name}: ${count} of ${found.length}; of all prototypes ${totals[kind]} of ${names.length}`;
      return item;
    });
    const rows = found.slice(0, LISTED).map((i) => {
      const node = Object.assign(make("button", "x-found", dot(categories[kinds[i]]?.hue ?? 0), make("bdi", null, names[i])), { type: "button" });
      node.addEventListener("click", () => choose(i));
      return make("li", null, node);
    });
    said.textContent = `${found.length.toLocaleString("en")} in the lasso`;
    side.replaceChildren(make("h2", null, `${found.length.toLocaleString("en")} prototypes`),
      ...(found.length ? [make("h3", null, "By category; the mark is the share of all prototypes"), make("ul", "p-bars", ...bars),
        make("h3", null, found.length > LISTED ? `The ${LISTED} most used` : "Most used first"), make("ol", "x-found-list", ...rows)] : []));
  };

  const link = () => {
    if (root.isConnected) history.replaceState(null, "", address("map", { prototype: chosen < 0 ? null : chosen, category }));
  };
  const choose = async (i) => {
    chosen = i;
    redraw();
    link();
    const back = line ? button("‹ Back to the lasso") : null;
    back?.addEventListener("click", lassoed);
    try {
      const one = await card(i);
      if (chosen === i) side.replaceChildren(...(back ? [back] : []), ...whole(one, "map"));
    } catch (error) {
      if (chosen === i) side.replaceChildren(problem(error));
    }
  };
  const filter = (name) => {
    category = name;
    [...chips.children].forEach((node) => toggle(node, /** @type {HTMLElement} */ (node).dataset.category === category));
    said.textContent = category ? `${kinds.filter((_, i) => visible(i)).length.toLocaleString("en")} of ${names.length.toLocaleString("en")}` : "";
    if (line) lassoed();
    restyle();
  };
  chips.append(...shared.model.categories.map(({ name, hue, prototypes }) => {
    const node = Object.assign(make("button", "x-chip", dot(hue), make("bdi", null, name), make("span", "p-number", prototypes.toLocaleString("en"))), { type: "button" });
    node.dataset.category = name;
    node.addEventListener("click", () => { filter(category === name ? "" : name); link(); });
    return node;
  }));

  lasso.addEventListener("click", () => toggle(lasso, drawing = !drawing));
  path.addEventListener("click", () => { toggle(path, path.getAttribute("aria-pressed") !== "true"); redraw(); });
  fit.addEventListener("click", () => seen.fit());
  const emptied = () => {
    line = null;
    filter("");
    link();
    if (chosen >= 0) void choose(chosen);
    else side.replaceChildren(intro());
  };
  clear.addEventListener("click", emptied);
  canvas.addEventListener("keydown", (event) => { if (event.key === "Escape") emptied(); });
  const intro = () => make("p", "p-note", `${names.length.toLocaleString("en")} prototypes; near are those that point the same way. Point at one for its name, click for its card. To see what an area has, press Lasso (or hold Shift) and draw around it.`);
  side.append(intro());
  dark.addEventListener("change", restyle);
  new ResizeObserver(() => {
    if (!canvas.clientWidth) return;
    if (!sized) { sized = true; seen.fit(); near(); }
    redraw();
  }).observe(plot);

  /** Look at the chosen prototype from nearer by. */
  const near = () => {
    if (chosen < 0) return;
    seen.fit();
    Object.assign(seen.view, { x: xs[chosen], y: ys[chosen], scale: seen.view.scale * CLOSER });
  };
  const open = (query) => {
    trail = pathOf(shared.answer, names.length);
    path.hidden = !trail.length;
    if (query.has("category")) filter(categories.some(({ name }) => name === query.get("category")) ? query.get("category") : "");
    const number = query.get("prototype");
    if (number !== null) {
      if (!/^\d+$/.test(number) || +number >= names.length) {
        side.replaceChildren(problem(new Error(`There is no prototype ${number}: they are numbered 0 to ${(names.length - 1).toLocaleString("en")}.`)));
      } else if (+number !== chosen) {
        void choose(+number);
        if (sized) near();
      }
    }
    if (!query.size) link();
    restyle();
  };
  return { open };
};
