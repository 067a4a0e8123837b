// Channels to read: a list of them, and the texts that write into the chosen one, shaded by their gates.
import { html, nothing, svg } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { change, draw } from "./controls.js";
import { byWord, gatesOf, measure, memory } from "./gates.js";
import { figure, moves, origin } from "./parts.js";

const VIEWS = { write: "written", read: "read", memory: "memory" };
const HELP = {
  write: "shade: how much of its write gate a word gives to this channel; a word counts as its largest token",
  read: "shade: how much of its read gate a word gives to this channel; a word counts as its largest token",
  memory: "shade: how much of what the chosen word finds in this channel each earlier word wrote; choose another word",
};
// What the channels of a layer are put in order by.
const ORDERS = { number: (c) => c.id, life: (c) => c.halfLife ?? 0, repetition: (c) => -(c.repetition ?? 0) };

const share = (x) => (x === 0 ? "0" : x < 0.0005 ? "<0.001" : x.toFixed(3));
const rounded = (x) => (x > 0 && x < 0.005 ? "<1 %" : `${Math.round(100 * x)} %`);
const digits = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));
const lifeOf = ({ halfLife }) => (halfLife === null ? "–" : digits(halfLife));
const ahead = (x) => (x > 0 ? "+" : x < 0 ? "−" : "") + Math.abs(x);
const named = (word) => (word === "" ? "end of document" : word.trim() || (word.includes("\n") ? "↵" : "␣"));
const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

/** A text along a channel: its gates by token, and by word.
 * @typedef {{ text: any, total: number | null, rank: number, gates: Record<"write" | "read" | "decay", Float64Array>, writes: number[], reads: number[] }} Sequence
 * What is chosen: a layer and a channel of it by place, what the shade shows, the list's order, the channel's texts, and the word of each that is looked at.
 * @typedef {{ layer: number, channel: number, view: string, order: string, sequences: Sequence[], words: number[] }} State
 * @typedef {{ read: () => (string | null | undefined)[], write: (layer: number, channel: number) => void }} Address
 * @typedef {{ data: any, lives: number[], address: Address, node: HTMLElement, state: import("./vendor/signals-core/signals-core.js").Signal<State> }} Ui */

/** Return the place of channels on a page, and what shows those that the address names; it is told of others that are chosen.
 * @param {any} data @param {Address} address @param {unknown} head @param {unknown} [rest] what follows */
export const channels = (data, address, head, rest = nothing) => {
  measure(data.texts);
  const node = document.createElement("article");
  node.className = "prismlm p-channels";
  const lives = data.layers.flatMap((layer) => layer.channels).filter(({ halfLife }) => halfLife !== null).map(({ halfLife }) => Math.log(halfLife));
  /** @type {Ui} */
  const ui = { data, lives: [Math.min(...lives), Math.max(...lives)], address, node,
    state: signal(/** @type {State} */ ({ layer: 0, channel: 0, view: "write", order: "number", sequences: [], words: [] })) };
  const follow = () => {
    const [layer, channel] = address.read(), at = data.layers.findIndex((one) => String(one.layer) === layer);
    if (at < 0) choose(ui, ui.state.value.layer, ui.state.value.channel);
    else choose(ui, at, Math.max(0, data.layers[at].channels.findIndex((one) => String(one.id) === channel)));
  };
  follow();
  draw(node, () => page(ui, ui.state.value, head, rest));
  requestAnimationFrame(() => reveal(ui)); // it is on the page by then
  return { node, follow: () => { follow(); reveal(ui); } };
};

/** Look at a channel. @param {Ui} ui @param {number} layer @param {number} channel both by place */
const choose = (ui, layer, channel) => {
  const { data, address, state } = ui, own = data.layers[layer].channels[channel];
  const sequences = gatesOf(data.layers[layer], own).map((gates, place) => {
    const [number, total] = own.texts[place], text = data.texts[number];
    // A text that was given comes first and has no rank.
    const rank = place + 1 - (own.texts[0][1] === null ? 1 : 0);
    return { text, total, rank, gates, writes: byWord(text, gates.write, Math.max), reads: byWord(text, gates.read, Math.max) };
  });
  const words = sequences.map(({ reads }) => Math.max(0, reads.indexOf(largest(reads.slice(1)), 1)));
  change(state, { layer, channel, sequences, words });
  address.write(data.layers[layer].layer, own.id);
};

/** Scroll the list, and not the page, to the chosen channel. @param {Ui} ui */
const reveal = ({ node }) => {
  const list = /** @type {HTMLElement} */ (node.querySelector(".c-list")), item = /** @type {HTMLElement | null} */ (list.querySelector("[aria-selected=true]"));
  if (item) list.scrollTop += item.getBoundingClientRect().top - list.getBoundingClientRect().top - 120;
};

const choice = (name, label, options, chosen, act) => html`<span class="c-choice" role="radiogroup" aria-label=${label}>${options.map(([value, text]) =>
  html`<label><input type="radio" name=${name} .value=${value} .checked=${value === chosen} @change=${() => act(value)}><span>${text}</span></label>`)}</span>`;

/** @param {Ui} ui @param {State} now */
const page = (ui, now, head, rest) => {
  const { data: { layers }, state } = ui, { layer, channel, view, order } = now, own = layers[layer].channels[channel];
  const orders = [["number", "number"], ["life", "half-life"]];
  if (layers.some((one) => one.channels.some(({ repetition }) => repetition !== null))) orders.push(["repetition", "repetition"]);
  const toLayer = (at) => { choose(ui, +at, Math.min(channel, layers[+at].channels.length - 1)); reveal(ui); };
  const end = { write: share(own.largest[0]), read: share(own.largest[1]), memory: "its largest" }[view];
  const key = (kind, label) => html`<span class="c-scale"><i class=${`c-key c-key-${kind}`}></i>${label}</span>`;
  return html`${head}<div class="c-layers" role="group" aria-label="Layer">
    <span><span class="c-name">Layer</span>${choice("layer", "Layer", layers.map((one, i) => [String(i), one.layer]), String(layer), toLayer)}</span>
    <span><span class="c-name">Channels by</span>${choice("order", "Order of the channels", orders, order, (value) => { change(state, { order: value }); reveal(ui); })}</span></div>
  <div class="c-body">${guard([layer, channel, order], () => list(ui, now))}
    <section class="c-main" data-view=${view}>${guard([own], () => top(layers[layer], own))}
      <div class="c-bar">${choice("view", "What the shade shows", Object.entries(VIEWS), view, (value) => change(state, { view: value }))}
        <span class="c-scale">0<span class="c-ramp"></span>${end}</span>${key("w", "write gate")}${key("r", "read gate")}</div>
      <p class="p-note c-help">${HELP[view]}</p>
      <ol class="c-texts">${now.sequences.map((one, place) => guard([one, view, now.words[place]], () => sequence(ui, own, one, view, place, now.words[place])))}</ol></section></div>${rest}`;
};

/** The channels of the layer. @param {Ui} ui @param {State} now */
const list = (ui, { layer, channel, order }) => {
  const { lives: [shortest, longest], data } = ui, { channels } = data.layers[layer], key = ORDERS[order];
  const places = channels.map((_, i) => i).sort((a, b) => key(channels[a]) - key(channels[b]) || a - b);
  const lifeShare = ({ halfLife }) => (halfLife === null ? 0 : longest > shortest ? 0.08 + 0.92 * (Math.log(halfLife) - shortest) / (longest - shortest) : 0.5);
  const take = (i) => { choose(ui, layer, i); /** @type {HTMLElement} */ (ui.node.querySelector(`.c-item[data-channel="${channels[i].id}"]`)).focus(); };
  const keyed = (event) => {
    const to = moves(event, places.indexOf(channel), places.length);
    if (to !== null) take(places[to]);
  };
  const item = (one, i) => {
    const tokens = one.tokens.slice(0, 6).map(([token]) => token).join("  ");
    return html`<div class="c-item" role="option" data-channel=${one.id} tabindex=${i === channel ? 0 : -1} aria-selected=${i === channel} @click=${() => take(i)}
      aria-label=${`channel ${one.id}, half-life ${lifeOf(one)}, ${tokens}`}><b>${one.id}</b><span class="c-life" title=${`half-life ${lifeOf(one)} positions`}
      .style=${`--life: ${lifeShare(one)}`}>${lifeOf(one)}</span><span>${tokens}</span></div>`;
  };
  return html`<div class="c-list" role="listbox" aria-label="Channels of the layer; arrow keys move" @keydown=${keyed}>${places.map((i) => item(channels[i], i))}</div>`;
};

/** What a channel is called, its figures, and the tokens that write most into it. */
const top = (layer, { id, decay, repetition, lag, tokens, ...channel }) => {
  const most = tokens.length ? tokens[0][1] * tokens[0][2] : 1;
  return html`<div class="p-top"><div class="p-title"><h2>Layer ${layer.layer}, channel ${id}</h2>
      <p class="p-note">${layer.shared ? "reads by its write gate" : decay === null ? "β depends on the token" : `β ${decay.toFixed(4)}`}</p></div>
    <div class="p-figures">${figure(lifeOf(/** @type {any} */ (channel)), "half-life, positions")}${repetition === null ? nothing : figure(repetition.toFixed(2), "repetition")}
      ${lag && lag[2] !== null && !layer.shared ? figure(ahead(lag[0]), `positions from read to write, p ${lag[2].toFixed(2)}`) : nothing}</div></div>
  <div class="c-chips">${tokens.map(([token, count, gate]) => html`<span class="c-chip" title=${`${count} of the kept tokens, write gate ${share(gate)} on average`}
    .style=${`--a: ${(0.12 + (0.88 * count * gate) / most).toFixed(3)}`}>${token}<small>${count}×</small></span>`)}</div>`;
};

/** A text: its words, of which one is chosen, its gates as curves, and what the chosen word finds. @param {Ui} ui @param {Sequence} one */
const sequence = (ui, channel, one, view, place, chosen) => {
  const { text, total, rank, gates, writes, reads } = one, { state, data } = ui, token = text.ends[chosen] - 1;
  const { weights, mass } = memory(gates.write, gates.decay, token), shares = byWord(text, weights, (a, b) => a + b);
  const values = { write: writes, read: reads, memory: shares }[view], most = { write: channel.largest[0], read: channel.largest[1], memory: largest(shares) }[view] || 1;
  const take = (word, event) => {
    const box = event.currentTarget.closest(".c-text");
    change(state, { words: state.value.words.with(place, word) });
    box.querySelectorAll(".c-word")[word].focus();
  };
  const keyed = (event) => {
    const to = moves(event, chosen, text.words.length);
    if (to !== null) take(to, event);
  };
  const word = (string, i) => {
    const before = string.match(/^\s*/)[0], inner = string.slice(before.length), broken = before.includes("\n");
    const label = `${named(string)}: writes ${share(writes[i])}, reads ${share(reads[i])}${view === "memory" ? `, memory ${rounded(shares[i])}` : ""}`;
    return html`${inner && broken ? html`<i class="c-break">↵</i>` : nothing}${inner && before ? " " : nothing}<span class=${`c-word${!inner && string ? " c-break" : ""}`} role="option"
      data-word=${i} tabindex=${i === chosen ? 0 : -1} aria-selected=${i === chosen} title=${label} aria-label=${label} @click=${(event) => take(i, event)}
      .style=${`--a: ${Math.min(1, values[i] / most).toFixed(3)}`}>${inner || (string === "" ? "∎" : broken ? "↵" : "␣")}</span>`;
  };
  const strongest = shares.map((x, i) => [x, i]).sort((a, b) => b[0] - a[0]).slice(0, 3).filter(([x]) => x > 0);
  return html`<li><span class="c-rank" title=${total === null ? nothing : `writes ${digits(total)} in all`}>${total === null ? nothing : rank}</span><div>
    <div class="c-text" role="listbox" aria-label="Words; arrow keys move" aria-orientation="horizontal" @keydown=${keyed}>${text.words.map(word)}</div>${curve(channel, gates, text.length, token)}
    <p class="c-say" aria-live="polite"><b>${named(text.words[chosen])}</b> writes ${share(writes[chosen])}, reads ${share(reads[chosen])}; ${
      mass ? `finds a mass of ${digits(mass)} in the channel` : "finds the channel empty"}${strongest.map(([x, i], n) =>
      html`${n ? ", " : ": "}<b>${i === chosen ? "itself" : named(text.words[i])}</b> ${rounded(x)}`)}</p>
    ${text.doc === null ? html`<cite class="p-origin"><b>the text that was given</b></cite>` : origin(data.documents[text.doc], `from token ${text.at}`)}</div></li>`;
};

const curve = (channel, gates, length, token) => {
  const top = Math.max(...channel.largest, 1e-9);
  const path = (values) => "M" + Array.from(values, (x, i) => `${i + 0.5} ${(100 - (96 * x) / top).toFixed(1)}`).join("L");
  return html`<svg class="c-curve" viewBox=${`0 0 ${length} 100`} preserveAspectRatio="none" role="img" aria-label=${`write and read gates over ${length} tokens, up to ${share(top)}`}>${svg`
    <line class="c-zero" x1="0" x2=${length} y1="100" y2="100"></line><line x1=${token + 0.5} x2=${token + 0.5} y1="0" y2="100"></line>
    <path class="c-r" d=${path(gates.read)}></path><path class="c-w" d=${path(gates.write)}></path>`}</svg>`;
};
