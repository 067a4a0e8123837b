// Attention inside the model: the heads of a layer, and the weights of the one that is looked at.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { percent } from "./parts.js";
import { api } from "./server.js";
import { change, field, options, problem } from "./controls.js";
import { cellAt, heatmap, largestOf, thumbnail } from "./heatmap.js";

// What a weight of 1 is sent as.
const ONE = 10_000;

/** The text that is read, what its attention in a layer is, the head that is looked at, by its number, and the weight: its row and column.
 * @typedef {{ text: string, signal: AbortSignal | null, layer: number, head: number, tokens: string[], maps: any[], at: number[], failed: unknown }} State */
export const state = signal(/** @type {State} */ ({ text: "", signal: null, layer: 0, head: 0, tokens: [], maps: [], at: [0, 0], failed: null }));

/** Read a text with a layer; throws an Error that says why not.
 * @param {string} text @param {number} layer @param {AbortSignal} signal */
export const read = async (text, layer, signal) => {
  const { tokens, maps, ...found } = await api("/inside/attention", { text, layer }, signal);
  const last = tokens.length - 1, head = maps.some((one) => one.head === state.value.head) ? state.value.head : maps[0].head;
  change(state, { text, signal, layer: found.layer, tokens, maps, head, at: [last, last], failed: null });
};

const other = async (layer, chosen) => {
  const { text, signal } = state.value;
  if (!signal) return;
  try {
    await read(text, layer, signal);
    chosen();
  } catch (failed) {
    if (!signal.aborted) change(state, { failed });
  }
};

const shown = ({ maps, head }) => maps.find((one) => one.head === head);

/** The heads of a layer, and one of them. @param {number} layers @param {() => void} chosen told when another head is chosen, of this layer or another */
export const attention = (layers, chosen) => {
  const { layer, head, maps, failed } = state.value, numbers = Array.from({ length: layers }, (_, i) => String(i));
  const named = (one) => (one.group === "attention" ? `head ${one.number}` : `${one.group} ${one.number}`);
  const choose = (one) => { change(state, { head: one.head, at: [one.weights.length - 1, one.weights.length - 1] }); chosen(); };
  return html`<div class="x-row x-layer">${field("layer", html`<select @change=${(event) => void other(+event.target.value, chosen)}>
      ${options(numbers.map((one) => [one, one]), String(layer))}</select>`)}</div>
    <div class="x-heads" role="group" aria-label="Heads of the layer">${maps.map((one) => html`<button type="button" class=${`x-head x-head-${one.group}`}
      aria-pressed=${one.head === head} @click=${() => choose(one)}><canvas class="x-thumb"></canvas><span>${named(one)}</span></button>`)}</div>
    <div class="x-head-main">${failed ? problem(failed) : large(state.value)}</div>`;
};

/** @param {State} now */
const large = (now) => {
  const { tokens, at: [i, j] } = now, one = shown(now), gives = percent(one.weights[i][j] / ONE);
  const to = i === j ? "itself" : html`<bdi>${tokens[j]}</bdi> at ${j}`;
  const label = `Attention of ${one.title} over ${tokens.length} tokens; arrow keys move over the weights`;
  return html`<div class="x-head-map"><h3 class="x-head-title">${one.title}</h3>
      <div class="x-heat-box"><p class="x-heat-say" aria-live="polite"><bdi>${tokens[i]}</bdi> at ${i} gives ${gives} to ${to}</p>
        <canvas class="x-heat" tabindex="0" role="img" aria-label=${label} @pointermove=${pointed} @keydown=${keyed}></canvas></div></div>
    <div class="x-head-side"><h3>Strongest weights on other tokens</h3><ol class="x-links">${guard([one], () => one.strongest.map(([source, target, weight]) =>
        html`<li><span class="p-number">${percent(weight)}</span><span>${said(tokens, source)} → ${said(tokens, target)}</span></li>`))}</ol>
      <p class="p-note">${one.on_itself === null ? nothing : `On itself ${percent(one.on_itself)} on average.${
        one.group === "noise" ? " A noise head's weights are subtracted, times λ, which is not in them." : ""}`}</p></div>`;
};
const said = (tokens, i) => html`<bdi class="x-said">${tokens[i]}</bdi><small>${i}</small>`;

/** Look at a weight; none stands right of the diagonal. */
const look = (row, column) => {
  const { tokens, at } = state.value, i = Math.max(0, Math.min(tokens.length - 1, row)), j = Math.max(0, Math.min(i, column));
  if (i !== at[0] || j !== at[1]) change(state, { at: [i, j] });
};
const pointed = (event) => {
  const cell = cellAt(event.target, state.value.tokens, event);
  if (cell) look(cell[0], cell[1]);
};
const keyed = (event) => {
  const [row, column] = state.value.at;
  const to = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1] }[event.key];
  if (!to) return;
  event.preventDefault();
  look(to[0], to[1]);
};

/** Draw the pictures: one scale for all heads of the layer. @param {HTMLElement} root @param {boolean} [all] those of all heads, too */
export const pictures = (root, all = true) => {
  const { maps, tokens, at } = state.value, heat = /** @type {HTMLCanvasElement | null} */ (root.querySelector(".x-heat"));
  const small = /** @type {NodeListOf<HTMLCanvasElement>} */ (root.querySelectorAll(".x-thumb")), most = Math.max(...maps.map((one) => largestOf(one.weights)));
  if (all) small.forEach((canvas, i) => thumbnail(canvas, maps[i].weights, most));
  if (heat) heatmap(heat, tokens, shown(state.value).weights, at);
};
