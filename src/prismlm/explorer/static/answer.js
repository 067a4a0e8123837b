// An answer of Ask: its tokens and columns as they come in, and what stands behind the one that is looked at.
import { against, behind, make, panel, percent, unpacked, walk, wholeText } from "./parts.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";
import { hovering } from "./hover.js";
import { column, legend } from "./columns.js";

/** An answer while it comes in, and after: its parts on the page, what came in of it, and what is looked at.
 * `bars` are columns with their steps, `largest` the reach of the highest; `chosen` is a step and `slice` a part of its column (-1: none).
 * @typedef {{ shared: any, article: HTMLElement, note: HTMLElement, head: HTMLElement, text: HTMLElement, columns: HTMLElement,
 *   key: HTMLElement, target: HTMLElement, whole: HTMLElement, hover: ReturnType<typeof hovering>, id: string, data: any,
 *   tokens: HTMLElement[], bars: [HTMLElement, any][], prototypes: Record<string, any>, asides: Map<number, HTMLElement>,
 *   largest: number, began: number, written: number, chosen: number, slice: number, choose: (number: number) => void }} Answer */

/** @returns {Answer} */
export const live = (shared) => {
  const note = make("p", "p-note x-note", "Reading…");
  const head = make("header", "p-head", note);
  const [text, columns, key] = [make("div", "p-text"), make("div", "x-columns"), make("div", "x-key")];
  const [target, whole] = [make("div", "p-panel"), make("div", "p-whole")];
  columns.tabIndex = 0;
  columns.setAttribute("role", "group");
  columns.setAttribute("aria-label", "Written tokens as columns of prototypes' parts of each logit; left and right move, up and down go through the parts");
  text.setAttribute("role", "listbox");
  text.setAttribute("aria-label", "Tokens of the text; arrow keys move");
  text.setAttribute("aria-orientation", "horizontal");
  target.setAttribute("aria-live", "polite");
  const article = make("article", "prismlm x-answer", head, text, columns, key, target, whole);
  /** @type {Answer} */
  const answer = { shared, article, note, head, text, columns, key, target, whole, hover: hovering(article), id: "", data: null,
    tokens: [], bars: [], prototypes: {}, asides: new Map(), largest: 1, began: 0, written: 0, chosen: -1, slice: -1, choose: () => {} };
  columns.addEventListener("pointerover", (event) => {
    const slice = event.target.closest("[data-prototype]");
    if (slice) void showSlice(answer, slice);
  });
  columns.addEventListener("pointerleave", () => answer.hover.hide());
  columns.addEventListener("keydown", (event) => keyed(answer, event));
  return answer;
};

/** The text that is read has come. @param {Answer} answer @param {string[]} list its tokens */
export const begin = (answer, list) => {
  answer.note.textContent = "Writing…";
  answer.began = performance.now();
  for (const one of list) addToken(answer, one, "p-token");
};

/** @param {Answer} answer */
const addToken = ({ tokens, text }, words, classes) => {
  const node = make("span", classes, ...spelt(words));
  tokens.push(node);
  text.append(node);
};

/** @param {Answer} answer */
const addColumn = ({ tokens, bars, columns }, one, prototypes) => {
  const bar = column(flat(one), prototypes);
  bar.addEventListener("click", () => tokens[one.position].focus());
  bars.push([bar, one]);
  columns.append(bar);
};

/** A step has come: a token that was read, or one that was written, with its column. @param {Answer} answer */
export const step = (answer, one) => {
  const { tokens, columns, prototypes } = answer;
  for (const [id, [name, category, hue]] of Object.entries(one.prototypes)) prototypes[id] = { name, category, hue };
  tint(tokens[one.position], one, prototypes);
  if (one.from === "generated") {
    answer.written += 1;
    if (tokens.length === one.position + 1) addToken(answer, one.text, "p-token p-written");
    addColumn(answer, one, prototypes);
    const reach = one.uses.reduce((sum, use) => sum + Math.max(0, use[1]), Math.max(0, one.residual) + Math.max(0, one.bias));
    if (reach > answer.largest) { answer.largest = reach; columns.style.setProperty("--largest", String(reach)); }
    columns.scrollLeft = columns.scrollWidth;
  }
  const { written } = answer, seconds = (performance.now() - answer.began) / 1000;
  answer.note.textContent = written ? `Writing… ${written} tokens, ${(written / Math.max(seconds, 1e-3)).toFixed(1)} a second` : "Reading…";
};

/** The whole trace has come. @param {Answer} answer */
export const finish = (answer, { id, trace, shared: pool, support }) => {
  const { shared, tokens, bars } = answer;
  const data = { ...trace, ...unpacked(pool) };
  Object.assign(answer, { id, data });
  shared.answer = { id, data };
  const facts = [["predictions", data.steps.length.toLocaleString("en")], ["written", String(answer.written)]];
  if (support) facts.push(["support", support.level]);
  const list = make("dl", null, ...facts.map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, value))));
  answer.head.replaceChildren(list, exports(id));
  // A text that was only read comes as a whole: its steps are not told one by one.
  data.steps.forEach((one, i) => tint(tokens[i], flat(one), data.prototypes, one));
  if (!bars.length) for (const one of data.steps) addColumn(answer, one, data.prototypes);
  answer.key.append(legend(bars.map(([, one]) => flat(one)), data.prototypes));
  if (data.whole) answer.whole.append(...wholeText(data));
  answer.whole.append(make("p", "p-note", "Shares show which learned patterns carry a prediction and where they occur in the corpus; they are no proof that removing a document changes the answer."));
  const read = tokens.slice(0, data.steps.length);
  for (const node of read) {
    node.tabIndex = -1;
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", "false");
  }
  for (const node of tokens.slice(data.steps.length)) node.setAttribute("role", "presentation");
  answer.choose = walk(answer.text, read, (number) => look(answer, number));
};

/** Show what a step relies on. @param {Answer} answer */
const look = (answer, number) => {
  if (number === answer.chosen) return;
  const { data, tokens } = answer;
  answer.chosen = number;
  tokens.slice(0, data.steps.length).forEach((node, i) => node.setAttribute("aria-selected", String(i === number)));
  for (const [bar, one] of answer.bars) bar.toggleAttribute("data-chosen", one.position === number);
  answer.target.replaceChildren(panel(data, data.steps[number]), aside(answer, number));
};

/** What stands behind a step: asked for once it is looked at. @param {Answer} answer */
const aside = (answer, number) => {
  const known = answer.asides.get(number);
  if (known) return known;
  const box = make("div", "p-aside", make("p", "p-note", "Looking through the training text…"));
  answer.asides.set(number, box);
  void fill(answer, number, box);
  return box;
};

/** @param {Answer} answer */
const fill = async (answer, number, box) => {
  const { shared: { model: { lens } }, data, id } = answer;
  if (!lens) return box.replaceChildren(...behind(data, { shares: [] }).childNodes);
  try {
    const found = await api(`/answers/${id}/steps/${number}`);
    box.replaceChildren(...behind({ ...data, ...unpacked(found.shared) }, found).childNodes);
    if (lens.cells && lens.corpus) box.append(opposing(answer, number));
  } catch (error) {
    box.replaceChildren(problem(error));
  }
};

/** The button that asks what speaks against a step. @param {Answer} answer */
const opposing = ({ data, id }, number) => {
  const button = Object.assign(make("button", "x-more", "What speaks against it"), { type: "button" });
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const found = await api(`/answers/${id}/steps/${number}/against`);
      button.replaceWith(against({ ...data, ...unpacked(found.shared) }, found.against));
    } catch (error) {
      button.replaceWith(problem(error));
    }
  });
  return button;
};

/** @param {Answer} answer @param {HTMLElement} slice */
const showSlice = ({ hover }, slice) => hover.show(slice, slice.dataset.prototype, slice.dataset.label);

/** By keyboard: left and right along the columns, up and down through the slices of one. @param {Answer} answer */
const keyed = (answer, event) => {
  const { bars, hover } = answer;
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
  if (event.key === "Escape") hover.hide();
  if (!way || !answer.data || !bars.length) return;
  event.preventDefault();
  const at = Math.max(0, bars.findIndex(([, one]) => one.position === answer.chosen));
  const [bar, one] = bars[Math.max(0, Math.min(bars.length - 1, at + way[0]))];
  if (way[0]) { answer.slice = -1; hover.hide(); answer.choose(one.position); }
  const slices = /** @type {HTMLElement[]} */ ([...bar.querySelectorAll("[data-prototype]")]);
  if (way[1] && slices.length) {
    answer.slice = Math.max(0, Math.min(slices.length - 1, answer.slice + way[1]));
    void showSlice(answer, slices[answer.slice]);
  }
  bar.scrollIntoView({ block: "nearest", inline: "nearest" });
};

const exports = (id) => make("p", "x-exports", "Save ", ...["html", "json", "parquet"].map((kind) =>
  Object.assign(make("a", null, kind.toUpperCase()), { href: `/api/answers/${id}/report.${kind}`, download: `answer.${kind}` })));

// A step of a finished trace in the form of one that is told: id and contribution alone.
const flat = (one) => (Array.isArray(one.bias) ? { ...one, bias: one.bias[0], residual: one.residual[0] } : one);

const spelt = (text) => text.split("\n").flatMap((part, i) => (i ? [make("i", "p-return", "↵"), "\n", part] : [part]));

const tint = (node, one, prototypes, full) => {
  const leading = one.uses.reduce((best, use) => (!best || (use[2] ?? use[1]) > (best[2] ?? best[1]) ? use : best), null);
  node.style.setProperty("--h", String(leading ? prototypes[leading[0]].hue : 0));
  node.style.setProperty("--a", Math.max(0, Math.min(1, one.explained)).toFixed(2));
  const name = leading ? prototypes[leading[0]].name : "none in use";
  const label = `${one.token}, then ${one.target} at ${percent(one.probability)}; leading prototype: ${name}; explained ${percent(one.explained)}`;
  node.setAttribute("aria-label", label);
  if (full) node.title = label;
};
