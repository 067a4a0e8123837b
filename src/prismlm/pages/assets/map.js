// The page of prototypes: its data stand in it, and its address says which one is chosen.
const root = document.querySelector(".m-map");
const { categories, prototypes, regions, opening } = JSON.parse(root.querySelector(".p-data").textContent);
const canvas = root.querySelector(".m-canvas"), card = root.querySelector(".m-card");
const search = root.querySelector(".m-search"), count = root.querySelector(".m-count");
const dark = matchMedia("(prefers-color-scheme: dark)");
const texts = prototypes.map((p, i) =>
  `#${i} ${p.name} ${p.about} ${p.tokens.map((t) => t[0]).join(" ")} ${p.contexts.map((c) => c.slice(0, 3).join("")).join(" ")}`.toLowerCase());

/** What is looked at: categories, what the search found (null: all), and prototypes by number (-1: none).
 * @type {{ shown: Set<number>, found: Set<number> | null, few: boolean, chosen: number, hovered: number, drawing: boolean }} */
const state = { shown: new Set(categories.keys()), found: null, few: false, chosen: -1, hovered: -1, drawing: false };
const visible = (i) => (state.few || prototypes[i].listed) && state.shown.has(prototypes[i].category) && (state.found === null || state.found.has(i));

const draw = () => {
  state.drawing = false;
  const context = cleared(canvas), size = seen.size();
  const wide = state.found === null ? size : size + 1;
  discs(context, canvas, seen, { count: prototypes.length, visible, colour: (i) => categories[prototypes[i].category][1], size: wide });
  if (state.found === null) labelled(context, canvas, seen, regions, dark.matches);
  for (const i of new Set([state.chosen, state.hovered])) {
    if (i >= 0) ringed(context, canvas, seen.place(i), size, prototypes[i].name, dark.matches);
  }
};
const redraw = () => { if (!state.drawing) { state.drawing = true; requestAnimationFrame(draw); } };
const hover = (i) => { if (i !== state.hovered) { state.hovered = i; redraw(); } };

const choose = (i) => {
  state.chosen = i;
  history.replaceState(null, "", `#${i}`);
  const p = prototypes[i];
  card.replaceChildren(make("h2", null, isolated(p.name)), make("p", "m-facts", factsOf(i)));
  if (p.about) card.append(make("p", "m-about", isolated(p.about)));
  card.append(make("h3", null, "Tokens it raises more than others do, the most distinctive first; in logits"), raised(p.tokens));
  if (p.contexts.length) card.append(make("h3", null, "Nearest training text; it fires on the marked token"));
  card.append(passages(p.contexts));
  redraw();
};
const factsOf = (i) => {
  const p = prototypes[i];
  const facts = [`#${i}`, categories[p.category][0], p.role, p.tags.join(", "), `${(100 * p.usage).toPrecision(2)} % of positions use it`];
  if (p.score !== null) facts.push(`its name tells its passages from others in ${Math.round(100 * p.score)} % (50 % by chance)`);
  return facts.filter(Boolean).join(" · ");
};
// Direction marks in corpus text must not reorder the page.
const isolated = (...text) => make("bdi", null, ...text);
const raised = (tokens) => make("ul", "m-tokens", ...tokens.map(([token, value]) =>
  make("li", null, isolated(token.replaceAll("\n", "↵").replace(/^ /, "·")), make("span", "p-number", value.toFixed(2)))));
const passages = (contexts) => make("ul", null, ...contexts.map(([before, token, after, document_]) =>
  make("li", "m-context", isolated(`…${before}`, make("mark", null, token), `${after}…`), make("small", null, document_))));

/** Say how many are seen; of a search those with most text instead of a card. */
const list = () => {
  const those = prototypes.map((_, i) => i).filter(visible);
  count.textContent = `${those.length.toLocaleString("en")} of ${prototypes.length.toLocaleString("en")}`;
  if (state.found === null) return;
  those.sort((a, b) => prototypes[a].place - prototypes[b].place);
  const results = those.slice(0, 100).map((i) => {
    const button = make("button", null, isolated(prototypes[i].name));
    button.addEventListener("click", () => choose(i));
    return make("li", null, button);
  });
  card.replaceChildren(make("h3", null, those.length > 100 ? "The 100 with most text of those found" : "Found"), make("ul", "m-results", ...results));
};

/** The button that hides and shows a category. */
const keyOf = ([name, colour], c) => {
  const share = prototypes.filter((p) => p.category === c).length / prototypes.length, dot = make("i");
  const key = make("button", "m-key", dot, isolated(name), make("span", null, `${(100 * share).toFixed(1)} %`));
  key.type = "button";
  key.setAttribute("aria-pressed", "true");
  key.title = "click to hide or show, double-click to show it alone";
  dot.style.background = colour;
  const update = () => {
    [...key.parentNode.children].forEach((one, i) => one.setAttribute("aria-pressed", String(state.shown.has(i))));
    list();
    redraw();
  };
  const { shown } = state;
  key.addEventListener("click", () => { shown.has(c) ? shown.delete(c) : shown.add(c); update(); });
  key.addEventListener("dblclick", () => { shown.clear(); shown.add(c); update(); });
  return key;
};

/** The button that shows the prototypes of few places too. */
const fewOf = () => {
  const key = make("button", "m-key", "also those of fewer than ten places");
  key.type = "button";
  key.setAttribute("aria-pressed", "false");
  key.addEventListener("click", () => { state.few = !state.few; key.setAttribute("aria-pressed", String(state.few)); list(); redraw(); });
  return key;
};

const searched = () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  state.found = words.length ? new Set(texts.keys().filter((i) => words.every((w) => texts[i].includes(w)))) : null;
  list();
  if (state.found === null && state.chosen >= 0) choose(state.chosen);
  redraw();
};

const seen = plane(canvas, prototypes.map((p) => p.x), prototypes.map((p) => p.y), { visible, choose, redraw, hover, chosen: () => state.chosen });
root.querySelector(".m-legend").append(...categories.map(keyOf));
if (prototypes.some((p) => !p.listed)) root.querySelector(".m-tools").append(fewOf());
search.addEventListener("input", searched);
dark.addEventListener("change", redraw);
addEventListener("resize", redraw);
seen.fit();
list();
const linked = Number.parseInt(location.hash.slice(1), 10);
choose(linked >= 0 && linked < prototypes.length ? linked : opening);
