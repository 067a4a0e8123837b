// Channels to read: a list of them, and the texts that write into the chosen one. Text from models
// and corpora is only ever a text node.
import { html } from "./vendor/lit-html/lit-html.js";
import { bytesOf, gatesOf, measure } from "./gates.js";
import { digits, sequence, shade, share } from "./channel_texts.js";
import { figure, make, moves } from "./parts.js";

const lifeOf = (channel) => (channel.halfLife === null ? "–" : digits(channel.halfLife));
const ahead = (x) => (x > 0 ? "+" : x < 0 ? "−" : "") + Math.abs(x);
const VIEWS = { write: "written", read: "read", memory: "memory" };
const HELP = {
  write: "shade: how much of its write gate a word gives to this channel; a word counts as its largest token",
  read: "shade: how much of its read gate a word gives to this channel; a word counts as its largest token",
  memory: "shade: how much of what the chosen word finds in this channel each earlier word wrote; choose another word",
};
// What the channels of a layer are put in order by.
const ORDERS = { number: (c) => c.id, life: (c) => c.halfLife ?? 0, repetition: (c) => -(c.repetition ?? 0) };

/** What is read, the parts of the page, and what is chosen: a layer and a channel of it by place, what the shade shows, and the list's order.
 * @typedef {{ data: any, bytes: Uint8Array, lives: number[], address: Address, layers: HTMLElement, list: HTMLElement, main: HTMLElement,
 *   layer: number, channel: number, view: string, order: string }} Ui
 * @typedef {{ read: () => (string | null | undefined)[], write: (layer: number, channel: number) => void }} Address */

/** The parts that readChannels fills, below a head and above what follows. @param {unknown} head @param {unknown} [rest] */
export const channelsArticle = (head, rest = "") => html`<article class="prismlm p-channels">${head}
  <div class="c-layers" role="group" aria-label="Layer"></div>
  <div class="c-body"><div class="c-list" role="listbox" aria-label="Channels of the layer; arrow keys move"></div>
    <section class="c-main"></section></div>${rest}</article>`;

/** Fill the parts of a root (.c-layers, .c-list, .c-main) and return what shows the address anew.
 * The address says and is told which layer and channel are chosen, by their numbers.
 * @param {HTMLElement} root @param {any} data @param {Address} address */
export const readChannels = (root, data, address) => {
  measure(data.texts);
  const part = (classes) => /** @type {HTMLElement} */ (root.querySelector(classes));
  /** @type {Ui} */
  const ui = { data, bytes: bytesOf(data.gates), lives: livesOf(data.layers), address, layers: part(".c-layers"), list: part(".c-list"),
    main: part(".c-main"), layer: 0, channel: 0, view: "write", order: "number" };
  const follow = () => {
    fromAddress(ui);
    showLayers(ui);
    showList(ui, false);
    showChannel(ui);
  };
  follow();
  return follow;
};

/** The shortest and longest half-life, as logarithms. */
const livesOf = (layers) => {
  const lives = layers.flatMap((layer) => layer.channels)
    .filter((channel) => channel.halfLife !== null).map((channel) => Math.log(channel.halfLife));
  return [Math.min(...lives), Math.max(...lives)];
};

/** Where a half-life lies between them. @param {number[]} lives */
const lifeShare = ([shortest, longest], life) =>
  life === null ? 0 : longest > shortest ? 0.08 + 0.92 * (Math.log(life) - shortest) / (longest - shortest) : 0.5;

/** @param {Ui} ui */
const fromAddress = (ui) => {
  const [layer, channel] = ui.address.read(), { layers } = ui.data;
  const at = layers.findIndex((one) => String(one.layer) === layer);
  if (at < 0) return;
  ui.layer = at;
  ui.channel = Math.max(0, layers[at].channels.findIndex((one) => String(one.id) === channel));
};

const choice = (name, label, options, chosen, act) => {
  const group = make("span", "c-choice");
  group.setAttribute("role", "radiogroup");
  group.setAttribute("aria-label", label);
  for (const [value, text] of options) {
    const input = make("input");
    Object.assign(input, { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => act(value));
    group.append(make("label", null, input, make("span", null, text)));
  }
  return group;
};

/** Show what chooses a layer and the order of its channels. @param {Ui} ui */
const showLayers = (ui) => {
  const { layers } = ui.data;
  const orders = [["number", "number"], ["life", "half-life"]];
  if (layers.some((layer) => layer.channels.some((one) => one.repetition !== null))) orders.push(["repetition", "repetition"]);
  const toLayer = (i) => {
    ui.layer = Number(i);
    ui.channel = Math.min(ui.channel, layers[ui.layer].channels.length - 1);
    showList(ui, false);
    showChannel(ui);
  };
  const sortBy = (order) => {
    ui.order = order;
    showList(ui, false);
  };
  const numbers = layers.map((layer, i) => [String(i), String(layer.layer)]);
  ui.layers.replaceChildren(
    make("span", null, make("span", "c-name", "Layer"), choice("layer", "Layer", numbers, String(ui.layer), toLayer)),
    make("span", null, make("span", "c-name", "Channels by"), choice("order", "Order of the channels", orders, ui.order, sortBy)));
};

/** A channel in the list. @param {Ui} ui */
const itemOf = ({ lives }, channel) => {
  const life = make("span", "c-life", lifeOf(channel));
  life.style.setProperty("--life", lifeShare(lives, channel.halfLife));
  life.title = `half-life ${lifeOf(channel)} positions`;
  const tokens = make("span", null, channel.tokens.slice(0, 6).map(([token]) => token).join("  "));
  const item = make("div", "c-item", make("b", null, String(channel.id)), life, tokens);
  item.setAttribute("role", "option");
  item.setAttribute("aria-label", `channel ${channel.id}, half-life ${lifeOf(channel)}, ${tokens.textContent}`);
  item.dataset.channel = channel.id;
  return item;
};

/** @param {Ui} ui @param {boolean} focus whether the chosen channel takes it */
const showList = (ui, focus) => {
  const { list } = ui, { channels } = ui.data.layers[ui.layer], key = ORDERS[ui.order];
  const order = channels.map((_, i) => i).sort((a, b) => key(channels[a]) - key(channels[b]) || a - b);
  const items = order.map((i) => itemOf(ui, channels[i]));
  const mark = (focused) => items.forEach((item, place) => {
    const chosen = order[place] === ui.channel;
    item.setAttribute("aria-selected", String(chosen));
    item.tabIndex = chosen ? 0 : -1;
    if (chosen && focused) item.focus();
  });
  const choose = (place) => {
    ui.channel = order[place];
    mark(true);
    showChannel(ui);
  };
  items.forEach((item, place) => item.addEventListener("click", () => choose(place)));
  list.onkeydown = (event) => {
    const to = moves(event, order.indexOf(ui.channel), order.length);
    if (to !== null) choose(to);
  };
  list.replaceChildren(...items);
  mark(focus);
  // Only the list scrolls, not the page.
  const chosen = items[order.indexOf(ui.channel)];
  list.scrollTop = Math.max(0, chosen.offsetTop - list.offsetTop - 120);
};

/** Show the chosen channel and the texts that write into it. @param {Ui} ui */
const showChannel = (ui) => {
  const { main } = ui, layer = ui.data.layers[ui.layer], channel = layer.channels[ui.channel];
  const texts = gatesOf(ui.bytes, ui.data, layer, channel).map((gates, place) => sequence(ui, channel, gates, place));
  const help = make("p", "p-note c-help"), scale = make("span", "c-scale");
  const view = (value) => {
    ui.view = main.dataset.view = value;
    help.textContent = HELP[value];
    const end = { write: share(channel.largest[0]), read: share(channel.largest[1]), memory: "its largest" }[value];
    scale.replaceChildren("0", make("span", "c-ramp"), end);
    for (const one of texts) shade(one, value);
  };
  const key = (kind, label) => make("span", "c-scale", make("i", `c-key c-key-${kind}`), label);
  const bar = make("div", "c-bar", choice("view", "What the shade shows", Object.entries(VIEWS), ui.view, view),
    scale, key("w", "write gate"), key("r", "read gate"));
  main.replaceChildren(topOf(layer, channel), chipsOf(channel), bar, help, make("ol", "c-texts", ...texts.map(({ node }) => node)));
  view(ui.view);
  ui.address.write(layer.layer, channel.id);
};

/** What a channel is called, and its figures. */
const topOf = (layer, channel) => {
  const figures = make("div", "p-figures", figure(lifeOf(channel), "half-life, positions"));
  if (channel.repetition !== null) figures.append(figure(channel.repetition.toFixed(2), "repetition"));
  if (channel.lag && channel.lag[2] !== null && !layer.shared) {
    figures.append(figure(ahead(channel.lag[0]), `positions from read to write, p ${channel.lag[2].toFixed(2)}`));
  }
  const title = make("div", "p-title", make("h2", null, `Layer ${layer.layer}, channel ${channel.id}`),
    make("p", "p-note", layer.shared ? "reads by its write gate" : channel.decay === null ? "β depends on the token" : `β ${channel.decay.toFixed(4)}`));
  return make("div", "p-top", title, figures);
};

/** The tokens that write most into a channel. */
const chipsOf = ({ tokens }) => {
  const most = tokens.length ? tokens[0][1] * tokens[0][2] : 1;
  return make("div", "c-chips", ...tokens.map(([token, count, gate]) => {
    const chip = make("span", "c-chip", token, make("small", null, `${count}×`));
    chip.style.setProperty("--a", (0.12 + (0.88 * count * gate) / most).toFixed(3));
    chip.title = `${count} of the kept tokens, write gate ${share(gate)} on average`;
    return chip;
  }));
};
