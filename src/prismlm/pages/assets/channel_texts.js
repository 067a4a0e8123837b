// Texts along a channel: words to choose from, shaded by their gates, and what the chosen one finds in it.
import { byWord, memory } from "./gates.js";
import { make, moves, origin } from "./parts.js";

const drawn = (tag, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
export const share = (x) => (x === 0 ? "0" : x < 0.0005 ? "<0.001" : x.toFixed(3));
const rounded = (x) => (x > 0 && x < 0.005 ? "<1 %" : `${Math.round(100 * x)} %`);
export const digits = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));
const named = (word) => (word === "" ? "end of document" : word.trim() || (word.includes("\n") ? "↵" : "␣"));
const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const sum = (a, b) => a + b;

/** What is read, and what the shade shows. @typedef {{ data: any, view: string }} Shown */
/** A text along a channel: its gates by token (`gates`) and by word (`writes`, `reads`), and the word that is chosen.
 * @typedef {{ text: any, channel: any, gates: Record<"write" | "read" | "decay", Float64Array>, writes: number[], reads: number[], chosen: number,
 *   node: HTMLElement, nodes: HTMLElement[], say: HTMLElement, point: (token: number) => void }} Sequence */

/** @param {Shown} ui @returns {Sequence} */
export const sequence = (ui, channel, gates, place) => {
  const [number, total] = channel.texts[place], text = ui.data.texts[number];
  const [box, nodes] = wordsOf(text);
  const [svg, point] = curve(channel, gates, text.length);
  const say = make("p", "c-say");
  say.setAttribute("aria-live", "polite");
  const [writes, reads] = [byWord(text, gates.write, Math.max), byWord(text, gates.read, Math.max)];
  // A text that was given comes first and has no rank.
  const rank = place + 1 - (channel.texts[0][1] === null ? 1 : 0);
  const label = make("span", "c-rank", total === null ? "" : String(rank));
  if (total !== null) label.title = `writes ${digits(total)} in all`;
  const node = make("li", null, label, make("div", null, box, svg, say, from(ui.data.documents, text)));
  /** @type {Sequence} */
  const one = { text, channel, gates, writes, reads, chosen: Math.max(0, reads.indexOf(largest(reads.slice(1)), 1)), node, nodes, say, point };
  nodes.forEach((node, word) => {
    node.tabIndex = -1;
    node.setAttribute("aria-selected", "false");
    node.addEventListener("click", () => chooseWord(ui, one, word, true));
  });
  box.addEventListener("keydown", (event) => {
    const to = moves(event, one.chosen, nodes.length);
    if (to !== null) chooseWord(ui, one, to, true);
  });
  chooseWord(ui, one, one.chosen, false);
  return one;
};

/** @param {Shown} ui @param {Sequence} one */
const chooseWord = (ui, one, word, focus) => {
  const { nodes, text } = one;
  nodes[one.chosen].tabIndex = -1;
  nodes[one.chosen].setAttribute("aria-selected", "false");
  one.chosen = word;
  nodes[word].tabIndex = 0;
  nodes[word].setAttribute("aria-selected", "true");
  if (focus) nodes[word].focus();
  one.point(text.ends[word] - 1);
  if (ui.view === "memory") shade(one, ui.view);
  speak(one);
};

/** What the chosen word finds in the channel, by token. @param {Sequence} one */
const found = ({ text, gates, chosen }) => memory(gates.write, gates.decay, text.ends[chosen] - 1);

/** Shade the words by what a view shows. @param {Sequence} one @param {string} view */
export const shade = (one, view) => {
  const { text, channel, writes, reads } = one;
  const shares = view === "memory" ? byWord(text, found(one).weights, sum) : null;
  const values = shares ?? { write: writes, read: reads }[view];
  const most = (shares ? largest(shares) : { write: channel.largest[0], read: channel.largest[1] }[view]) || 1;
  one.nodes.forEach((node, word) => {
    node.style.setProperty("--a", Math.min(1, values[word] / most).toFixed(3));
    const label = `${named(text.words[word])}: writes ${share(writes[word])}, reads ${share(reads[word])}`;
    node.title = shares ? `${label}, memory ${rounded(shares[word])}` : label;
    node.setAttribute("aria-label", node.title);
  });
};

/** Say what the chosen word does, and which words it finds most of. @param {Sequence} one */
const speak = (one) => {
  const { text, writes, reads, chosen } = one, { weights, mass } = found(one);
  const shares = byWord(text, weights, sum);
  const strongest = shares.map((x, word) => [x, word]).sort((a, b) => b[0] - a[0]).slice(0, 3).filter(([x]) => x > 0);
  const behind = strongest.flatMap(([x, word], place) => [place ? ", " : ": ", make("b", null, word === chosen ? "itself" : named(text.words[word])), ` ${rounded(x)}`]);
  one.say.replaceChildren(make("b", null, named(text.words[chosen])), ` writes ${share(writes[chosen])}, reads ${share(reads[chosen])}; `,
    mass ? `finds a mass of ${digits(mass)} in the channel` : "finds the channel empty", ...behind);
};

const wordsOf = (text) => {
  const box = make("div", "c-text");
  const nodes = text.words.map((word, number) => {
    const before = word.match(/^\s*/)[0];
    const inner = word.slice(before.length);
    if (inner && before.includes("\n")) box.append(make("i", "c-break", "↵"));
    if (inner && before) box.append(" ");
    const node = make("span", "c-word", inner || (word === "" ? "∎" : before.includes("\n") ? "↵" : "␣"));
    node.setAttribute("role", "option");
    node.dataset.word = number;
    if (!inner && word) node.classList.add("c-break");
    box.append(node);
    return node;
  });
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", "Words; arrow keys move");
  box.setAttribute("aria-orientation", "horizontal");
  return [box, nodes];
};

const curve = (channel, gates, length) => {
  const top = Math.max(...channel.largest, 1e-9);
  const path = (values) => "M" + Array.from(values, (x, i) => `${i + 0.5} ${(100 - (96 * x) / top).toFixed(1)}`).join("L");
  const svg = drawn("svg", { class: "c-curve", viewBox: `0 0 ${length} 100`, preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", `write and read gates over ${length} tokens, up to ${share(top)}`);
  const at = drawn("line", { y1: 0, y2: 100 });
  svg.append(drawn("line", { class: "c-zero", x1: 0, x2: length, y1: 100, y2: 100 }), at,
    drawn("path", { class: "c-r", d: path(gates.read) }), drawn("path", { class: "c-w", d: path(gates.write) }));
  return [svg, (token) => { at.setAttribute("x1", token + 0.5); at.setAttribute("x2", token + 0.5); }];
};

const from = (documents, text) =>
  text.doc === null ? make("cite", "p-origin", make("b", null, "the text that was given")) : origin(documents[text.doc], `from token ${text.at}`);
