// An answer: its words as they arrive, its sources, and, folded below, its tokens as columns.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { against, behind, moves, panel, percent, unpacked, wholeText } from "./parts.js";
import { api } from "./server.js";
import { CAVEAT, change, count, draw, facts, problem } from "./controls.js";
import { card, hovering, pointed } from "./card.js";
import { chart, legend } from "./columns.js";

const COLUMNS = "Each token as a column: what prototypes add to its logit; left and right move, up and down go through the parts";
/** Whether tokens are unfolded, in every answer until they are folded again. */
let unfolded = false;

/** An answer while its words come in, and after. `bars` are the steps that have columns; `data` is the whole trace, `id` what the server knows it by (of a static page it does not), `held` the step that was chosen, `chosen` the one that is looked at, as under the pointer, `slice` the part of its column (-1: none).
 * @typedef {{ words: string, written: boolean, one: any }} Token
 * @typedef {{ id: string, note: string, words: string, tokens: Token[], bars: any[], data: any, asides: Record<number, Aside>, held: number, chosen: number, slice: number, hover: import("./card.js").Hover | null, failed: unknown }} State
 * The sources of a step and, on request, the opposing passages.
 * @typedef {{ sources?: any, failed?: unknown, reading?: boolean, opposed?: any, refused?: unknown }} Aside
 * @typedef {{ shared: any, node: HTMLElement, state: import("./vendor/signals-core/signals-core.js").Signal<State> }} Answer */

/** Return an empty answer: its element, and functions that fill it. */
export const live = (shared) => {
  const node = document.createElement("article");
  node.className = "prismlm x-answer";
  /** @type {Answer} */
  const answer = { shared, node, state: signal(/** @type {State} */ ({ id: "", note: "Reading…", words: "", tokens: [], bars: [],
    data: null, asides: {}, held: -1, chosen: -1, slice: -1, hover: null, failed: null })) };
  draw(node, () => page(answer, answer.state.value));
  // A finger leaves what it touches: the card stays until another place is touched.
  node.addEventListener("pointerdown", (event) => /** @type {Element} */ (event.target).closest("[data-prototype]") ?? leave(answer));
  const { state } = answer;
  return {
    node,
    id: () => state.value.id,
    /** @param {string} id @param {string} words that are new */
    write: (id, words) => words && change(state, { id, words: state.value.words + words, note: "Writing…" }),
    finish: (data) => finish(answer, data),
    fail: (failed) => change(state, { failed, note: state.value.words ? "Broken off" : "Not read" }),
  };
};

/** @param {Answer} answer @param {State} now */
const page = (answer, now) => {
  const { id, note, words, tokens, bars, data, held, chosen } = now, support = data?.support, none = support?.level === "none";
  const sentence = support ? html`<p class=${`p-support p-${support.level}`}>${support.sentence}</p>` : nothing;
  const said = data ? data.answer || html`<i>The model wrote nothing.</i>` : marked(words);
  return html`<header class="p-top-of">${data?.question && !id ? html`<p class="p-question">${data.question}</p>` : nothing}${none ? sentence : nothing}<p class="p-answer" aria-live="polite">${said}</p>${none ? nothing : sentence}
  ${data ? data.notes.map((one) => html`<p class="p-note">${one}</p>`) : html`<p class="p-note x-note">${note}</p>`}</header>
${guard([data], () => (data?.whole ? html`<div class="p-whole">${wholeText(data, support?.level)}</div>` : nothing))}
${data ? html`<details class="p-tokens" ?open=${unfolded} @toggle=${(event) => { unfolded = event.target.open; }}><summary>Token by token: the prototypes behind each prediction</summary>
<div class="p-text" role="listbox" aria-label="Tokens of the text; arrow keys move" aria-orientation="horizontal"
  @pointerleave=${() => look(answer, held)} @keydown=${(event) => walk(answer, moves(event, held, data.steps.length))}>${tokens.map((token, i) =>
    guard([token, data, i === chosen, i === held], () => tokenOf(answer, now, token, i)))}</div>
${key(data)}
<div class="x-columns" tabindex="0" role="group" aria-label=${COLUMNS}
  @pointerover=${(event) => void point(answer, event.target.closest("[data-prototype]"))} @pointerleave=${(event) => event.pointerType === "mouse" && leave(answer)}
  @keydown=${(event) => keyed(answer, event)}>${chart(bars, data.prototypes, chosen, (position) => walk(answer, position))}</div>
<div class="x-key">${guard([data], () => legend(bars, data.prototypes))}</div>
<div class="p-panel" aria-live="polite">${guard([data, chosen], () => (chosen < 0 ? nothing : panel(data, data.steps[chosen])))}${guard([now.asides[chosen]],
    () => (chosen < 0 ? nothing : aside(answer, now)))}</div></details>
<footer class="p-caveat"><p>${CAVEAT}</p>${id ? exports(id) : facts(data.facts)}</footer>` : nothing}
${hovering(now.hover)}${now.failed ? problem(now.failed) : nothing}`;
};

const exports = (id) => html`<p class="x-exports">Save ${["html", "json", "parquet"].map((kind) =>
  html`<a href=${`/api/answers/${id}/report.${kind}`} download=${`answer.${kind}`}>${kind.toUpperCase()}</a>`)}</p>`;

/** The legend of the tokens. */
const key = ({ feedback, steps }) => html`<ul class="p-legend"><li><span class="p-key p-key-hue"></span>colour: the prototype that leads the next prediction</li>
  <li><span class="p-key p-key-share"></span>line below: how much of it the prototypes explain</li>
  ${feedback ? html`<li><span class="p-key p-key-fed"></span>line above: uncertainty fed back to the token, of the prediction before it</li>` : nothing}
  ${steps.some(({ from }) => from === "generated") ? html`<li><span class="p-key-written">abc</span> written by the model</li>` : nothing}
  <li><kbd>←</kbd> <kbd>→</kbd> move, <kbd>Home</kbd> <kbd>End</kbd> jump</li></ul>`;

/** A text whose direction marks are replaced by codes: OpenAI's routes pass them on. @param {string} text */
const marked = (text) => text.replace(/[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
  (mark) => `‹U+${mark.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

const spelt = (text) => text.split("\n").map((part, i) => (i ? html`<i class="p-return">↵</i>${`\n${part}`}` : part));

/** A token; those that were read can be chosen, and pointed at. @param {Answer} answer @param {State} now @param {Token} token */
const tokenOf = (answer, { data, held, chosen }, { words, written, one }, i) => {
  const { style, label } = tinted(one, data.prototypes, data.feedback), kind = `p-token${written ? " p-written" : ""}${data.feedback ? " p-fed" : ""}`;
  if (i >= data.steps.length) return html`<span class=${kind} role="presentation" .style=${style}>${spelt(words)}</span>`;
  return html`<span class=${kind} role="option" tabindex=${i === held ? 0 : -1} aria-selected=${i === chosen} aria-label=${label} title=${label} .style=${style}
    @click=${() => walk(answer, i)} @focus=${() => hold(answer, i)} @pointerenter=${(event) => event.pointerType === "mouse" && look(answer, i)}>${spelt(words)}</span>`;
};

const tinted = (one, prototypes, feedback) => {
  if (!one) return { style: "" };
  const leading = one.uses.reduce((best, use) => (!best || use[2] > best[2] ? use : best), null);
  const { name, colour } = leading ? prototypes[leading[0]] : { name: "none in use", colour: "var(--grey)" };
  const fed = one.fed ? `uncertainty ${percent(one.fed[0])}, code ${count(one.fed[1])}` : "nothing";
  return {
    style: `--k: ${colour}; --a: ${Math.max(0, Math.min(1, one.explained)).toFixed(2)}; --u: ${one.fed?.[0] ?? 0}`,
    label: `${one.token}, then ${one.target} at ${percent(one.probability)}; leading prototype: ${name}; explained ${percent(one.explained)}${
      feedback ? `; fed back: ${fed}` : ""}`,
  };
};

/** Show the whole trace. @param {Answer} answer @param {any} whole */
const finish = (answer, { id = "", shared: pool, ...trace }) => {
  const { state, shared } = answer, data = { ...trace, ...unpacked(pool) }, { steps } = data;
  shared.answer = { id };
  const tokens = data.tokens.map((words, i) => ({ words, written: i > 0 && steps[i - 1].from === "generated", one: steps[i] ?? null }));
  // Of a text that was only read all tokens have columns.
  const written = steps.filter(({ from }) => from === "generated"), bars = written.length ? written : steps;
  change(state, { id, data, tokens, bars });
  if (steps.length) hold(answer, steps.length - 1);
};

/** Choose a step, which stays while others are pointed at. @param {Answer} answer */
const hold = (answer, number) => { change(answer.state, { held: number }); look(answer, number); };
/** Move the focus to a token, which chooses its step. @param {Answer} answer @param {number | null} number */
const walk = ({ node }, number) => {
  if (number !== null) /** @type {HTMLElement[]} */ ([...node.querySelectorAll(".p-text [role=option]")])[number].focus();
};

/** Show a step, and fetch its sources once. @param {Answer} answer */
const look = ({ state, shared: { model: { lens } } }, number) => {
  const { chosen, asides, id, data } = state.value, own = data.steps[number];
  if (number === chosen) return;
  const known = number in asides, there = own.shares ? { sources: own } : lens ? {} : { sources: { shares: [] } };
  change(state, { chosen: number, asides: known ? asides : { ...asides, [number]: there } });
  if (!known && !there.sources) api(`/answers/${id}/steps/${number}`).then((sources) => put(state, number, { sources }), (failed) => put(state, number, { failed }));
};

/** Update an aside. @param {Answer["state"]} state @param {number} number @param {Aside} part */
const put = (state, number, part) => {
  const { asides } = state.value;
  change(state, { asides: { ...asides, [number]: { ...asides[number], ...part } } });
};

/** Fetch the passages that oppose a step. @param {Answer["state"]} state */
const oppose = (state, number) => {
  put(state, number, { reading: true });
  api(`/answers/${state.value.id}/steps/${number}/against`).then((opposed) => put(state, number, { opposed }), (refused) => put(state, number, { refused }));
};

/** The sources of the chosen step. @param {Answer} answer @param {State} now */
const aside = ({ state, shared: { model: { lens } } }, { data, chosen, asides }) => {
  const { sources, failed, reading, opposed, refused } = asides[chosen];
  const filled = (part) => (part.shared ? { ...data, ...unpacked(part.shared) } : data);
  const button = html`<button type="button" class="x-more" @click=${() => oppose(state, chosen)}>What speaks against it</button>`;
  const status = html`<p class="p-note x-reading" role="status">The model reads similar text…</p>`;
  return html`<div class="p-aside">${failed ? problem(failed) : !sources ? html`<p class="p-note">Looking through the training text…</p>`
    : behind(filled(sources), { ...data.steps[chosen], ...sources })}${refused ? problem(refused)
    : opposed ? against(filled(opposed), opposed.against) : reading ? status : sources && lens?.readable ? button : nothing}</div>`;
};

/** Show the card of a slice. @param {Answer} answer @param {HTMLElement | null} part */
const point = async ({ state, node }, part) => {
  if (!part || part.dataset.prototype === state.value.hover?.id) return;
  const hover = pointed(part, node);
  change(state, { hover });
  const { id, data } = state.value, contexts = data?.prototypes[hover.id].contexts?.map((number) => data.contexts[number]);
  // Its name is shown already; a static page has some contexts.
  const one = id ? await card(hover.id).catch(() => null) : contexts ? { tokens: [], contexts } : null;
  if (state.value.hover === hover) change(state, { hover: { ...hover, one } });
};
/** @param {Answer} answer */
const leave = ({ state }) => change(state, { hover: null });

/** By keyboard: left and right along the columns, up and down through the slices of one. @param {Answer} answer */
const keyed = (answer, event) => {
  const { state, node } = answer, { data, bars, chosen } = state.value;
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
  if (event.key === "Escape") leave(answer);
  if (!way || !data || !bars.length) return;
  event.preventDefault();
  const at = Math.max(0, bars.findIndex((one) => one.position === chosen)), to = Math.max(0, Math.min(bars.length - 1, at + way[0]));
  if (way[0]) {
    change(state, { slice: -1, hover: null });
    hold(answer, bars[to].position);
  }
  const bar = node.querySelectorAll(".x-column")[to];
  const slices = /** @type {HTMLElement[]} */ ([...bar.querySelectorAll("[data-prototype]")]);
  if (way[1] && slices.length) {
    const slice = Math.max(0, Math.min(slices.length - 1, state.value.slice + way[1]));
    change(state, { slice });
    void point(answer, slices[slice]);
  }
  bar.scrollIntoView({ block: "nearest", inline: "nearest" });
};
