// Channels to read: a list of them, and the texts that write into the chosen one. Text from models
// and corpora is only ever a text node.
const EMPTY_BELOW = 1e-30;
const make = (tag, classes, ...children) => {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
const drawn = (tag, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};
const share = (x) => (x === 0 ? "0" : x < 0.0005 ? "<0.001" : x.toFixed(3));
const percent = (x) => (x > 0 && x < 0.005 ? "<1 %" : `${Math.round(100 * x)} %`);
const digits = (x) => (x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x.toFixed(2));
const lifeOf = (channel) => (channel.halfLife === null ? "–" : digits(channel.halfLife));
const signed = (x) => (x > 0 ? "+" : x < 0 ? "−" : "") + Math.abs(x);
const named = (word) => (word === "" ? "end of document" : word.trim() || (word.includes("\n") ? "↵" : "␣"));

/** Fill the parts of a root (.c-layers, .c-list, .c-main) and return what shows the address anew.
 * The address says and is told which layer and channel are chosen, by their numbers.
 * @param {HTMLElement} root @param {any} data
 * @param {{ read: () => (string | null | undefined)[], write: (layer: number, channel: number) => void }} address */
export const readChannels = (root, data, address) => {
  const bytes = Uint8Array.from(atob(data.gates), (letter) => letter.charCodeAt(0));
  // counts[w] tokens make word w; ends[w] is the number of tokens up to its end.
  for (const text of data.texts) {
    let end = 0;
    text.counts = text.words.map((_, word) => text.many[word] ?? 1);
    text.ends = text.counts.map((count) => (end += count));
    text.length = end;
  }
  const lives = data.layers.flatMap((layer) => layer.channels)
    .filter((channel) => channel.halfLife !== null).map((channel) => Math.log(channel.halfLife));
  const [shortest, longest] = [Math.min(...lives), Math.max(...lives)];
  const lifeShare = (life) => (life === null ? 0 : longest > shortest ? 0.08 + 0.92 * (Math.log(life) - shortest) / (longest - shortest) : 0.5);

  // A byte holds √(gate / largest).
  const decoded = (from, length, largest) =>
    Float64Array.from(bytes.subarray(from, from + length), (level) => largest * (level / 255) ** 2);
  // Where β depends on the token, a byte holds the logarithm of −ln β within the range.
  const [least, most] = data.rates;
  const decays = (from, length) => Float64Array.from(bytes.subarray(from, from + length),
    (level) => Math.exp(-least * Math.exp((Math.log(most / least) * level) / 255)));
  const gatesOf = (layer, channel) => {
    let at = channel.at;
    return channel.texts.map(([number]) => {
      const { length } = data.texts[number];
      const write = decoded(at, length, channel.largest[0]);
      const read = layer.shared ? write : decoded(at + length, length, channel.largest[1]);
      at += layer.shared ? length : 2 * length;
      if (channel.decay !== null) return { write, read, decay: new Float64Array(length).fill(channel.decay) };
      const decay = decays(at, length);
      at += length;
      return { write, read, decay };
    });
  };
  // β_j ⋯ β_(i−1) write_j / M_i for j < i: what position i finds in the channel.
  const memory = (write, decay, i) => {
    const weights = new Float64Array(write.length);
    let mass = 0;
    for (let j = i - 1, left = 1; j >= 0; j--) mass += weights[j] = (left *= decay[j]) * write[j];
    if (mass < EMPTY_BELOW) return { weights: weights.fill(0), mass: 0 };
    return { weights: weights.map((x) => x / mass), mass };
  };
  const byWord = (text, values, combine) => text.ends.map((end, word) => {
    const part = values.subarray(end - text.counts[word], end);
    return part.reduce((a, b) => combine(a, b), 0);
  });
  const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
  const sum = (a, b) => a + b;

  const state = { layer: 0, channel: 0, view: "write", order: "number" };
  const VIEWS = { write: "written", read: "read", memory: "memory" };
  const HELP = {
    write: "shade: how much of its write gate a word gives to this channel; a word counts as its largest token",
    read: "shade: how much of its read gate a word gives to this channel; a word counts as its largest token",
    memory: "shade: how much of what the chosen word finds in this channel each earlier word wrote; choose another word",
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

  const moves = (event, at, count) => {
    const to = { ArrowUp: at - 1, ArrowLeft: at - 1, ArrowDown: at + 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return null;
    event.preventDefault();
    return Math.max(0, Math.min(count - 1, to));
  };

  const part = (classes) => /** @type {HTMLElement} */ (root.querySelector(classes));
  const list = part(".c-list");
  const main = part(".c-main");
  const layerNow = () => data.layers[state.layer];
  const channelNow = () => layerNow().channels[state.channel];

  const showList = (focus) => {
    const { channels } = layerNow();
    const key = { number: (c) => c.id, life: (c) => c.halfLife ?? 0, repetition: (c) => -(c.repetition ?? 0) }[state.order];
    const order = channels.map((_, i) => i).sort((a, b) => key(channels[a]) - key(channels[b]) || a - b);
    const items = order.map((i) => {
      const channel = channels[i];
      const life = make("span", "c-life", lifeOf(channel));
      life.style.setProperty("--life", lifeShare(channel.halfLife));
      life.title = `half-life ${lifeOf(channel)} positions`;
      const tokens = make("span", null, channel.tokens.slice(0, 6).map(([token]) => token).join("  "));
      const item = make("div", "c-item", make("b", null, String(channel.id)), life, tokens);
      item.setAttribute("role", "option");
      item.setAttribute("aria-label", `channel ${channel.id}, half-life ${lifeOf(channel)}, ${tokens.textContent}`);
      item.dataset.channel = channel.id;
      item.addEventListener("click", () => choose(i, true));
      return item;
    });
    const mark = (focused) => items.forEach((item, place) => {
      const chosen = order[place] === state.channel;
      item.setAttribute("aria-selected", String(chosen));
      item.tabIndex = chosen ? 0 : -1;
      if (chosen && focused) item.focus();
    });
    const choose = (i, focused) => {
      state.channel = i;
      mark(focused);
      showChannel();
    };
    list.onkeydown = (event) => {
      const to = moves(event, order.indexOf(state.channel), order.length);
      if (to !== null) choose(order[to], true);
    };
    list.replaceChildren(...items);
    mark(focus);
    // Only the list scrolls, not the page.
    const chosen = items[order.indexOf(state.channel)];
    list.scrollTop = Math.max(0, chosen.offsetTop - list.offsetTop - 120);
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

  const origin = (text) => {
    if (text.doc === null) return make("cite", "p-origin", make("b", null, "the text that was given"));
    const place = data.documents[text.doc];
    const link = make(place.url ? "a" : "b", null, place.title || place.doc_id);
    if (place.url) Object.assign(link, { href: place.url, rel: "noopener noreferrer nofollow", target: "_blank" });
    const facts = [place.title ? place.doc_id : null, `from token ${text.at}`, place.source, place.license || "licence (unknown)"];
    return make("cite", "p-origin", link, make("span", null, facts.filter(Boolean).join(" · ")));
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

  const sequence = (channel, gates, [number, total], rank) => {
    const text = data.texts[number];
    const [box, nodes] = wordsOf(text);
    const [svg, point] = curve(channel, gates, text.length);
    const say = make("p", "c-say");
    say.setAttribute("aria-live", "polite");
    const writes = byWord(text, gates.write, Math.max);
    const reads = byWord(text, gates.read, Math.max);
    let chosen = Math.max(0, reads.indexOf(largest(reads.slice(1)), 1));
    const found = () => memory(gates.write, gates.decay, text.ends[chosen] - 1);
    const shade = () => {
      const values = { write: writes, read: reads, memory: state.view === "memory" ? byWord(text, found().weights, sum) : null }[state.view];
      const most = { write: channel.largest[0], read: channel.largest[1], memory: largest(values) }[state.view] || 1;
      nodes.forEach((node, word) => {
        node.style.setProperty("--a", Math.min(1, values[word] / most).toFixed(3));
        const label = `${named(text.words[word])}: writes ${share(writes[word])}, reads ${share(reads[word])}`;
        node.title = state.view === "memory" ? `${label}, memory ${percent(values[word])}` : label;
        node.setAttribute("aria-label", node.title);
      });
    };
    const speak = () => {
      const { weights, mass } = found();
      const shares = byWord(text, weights, sum);
      const strongest = shares.map((x, word) => [x, word]).sort((a, b) => b[0] - a[0]).slice(0, 3).filter(([x]) => x > 0);
      const behind = strongest.flatMap(([x, word], place) => [place ? ", " : ": ", make("b", null, word === chosen ? "itself" : named(text.words[word])), ` ${percent(x)}`]);
      say.replaceChildren(make("b", null, named(text.words[chosen])), ` writes ${share(writes[chosen])}, reads ${share(reads[chosen])}; `,
        mass ? `finds a mass of ${digits(mass)} in the channel` : "finds the channel empty", ...behind);
    };
    const choose = (word, focus) => {
      nodes[chosen].tabIndex = -1;
      nodes[chosen].setAttribute("aria-selected", "false");
      chosen = word;
      nodes[chosen].tabIndex = 0;
      nodes[chosen].setAttribute("aria-selected", "true");
      if (focus) nodes[chosen].focus();
      point(text.ends[chosen] - 1);
      if (state.view === "memory") shade();
      speak();
    };
    nodes.forEach((node, word) => {
      node.tabIndex = -1;
      node.setAttribute("aria-selected", "false");
      node.addEventListener("click", () => choose(word, true));
    });
    box.addEventListener("keydown", (event) => {
      const to = moves(event, chosen, nodes.length);
      if (to !== null) choose(to, true);
    });
    shade();
    choose(chosen, false);
    const label = make("span", "c-rank", total === null ? "" : String(rank));
    if (total !== null) label.title = `writes ${digits(total)} in all`;
    return [make("li", null, label, make("div", null, box, svg, say, origin(text))), shade];
  };

  const figure = (value, label) => make("div", "p-figure", make("b", null, value), make("span", null, label));
  const showChannel = () => {
    const layer = layerNow();
    const channel = channelNow();
    const figures = make("div", "p-figures", figure(lifeOf(channel), "half-life, positions"));
    if (channel.repetition !== null) figures.append(figure(channel.repetition.toFixed(2), "repetition"));
    if (channel.lag && channel.lag[2] !== null && !layer.shared) {
      figures.append(figure(signed(channel.lag[0]), `positions from read to write, p ${channel.lag[2].toFixed(2)}`));
    }
    const title = make("div", "p-title", make("h2", null, `Layer ${layer.layer}, channel ${channel.id}`),
      make("p", "p-note", layer.shared ? "reads by its write gate" : channel.decay === null ? "β depends on the token" : `β ${channel.decay.toFixed(4)}`));
    const most = channel.tokens.length ? channel.tokens[0][1] * channel.tokens[0][2] : 1;
    const chips = make("div", "c-chips", ...channel.tokens.map(([token, count, gate]) => {
      const chip = make("span", "c-chip", token, make("small", null, `${count}×`));
      chip.style.setProperty("--a", (0.12 + (0.88 * count * gate) / most).toFixed(3));
      chip.title = `${count} of the kept tokens, write gate ${share(gate)} on average`;
      return chip;
    }));
    const help = make("p", "p-note c-help");
    const scale = make("span", "c-scale");
    const parts = gatesOf(layer, channel).map((gates, place) =>
      sequence(channel, gates, channel.texts[place], place + 1 - (channel.texts[0][1] === null ? 1 : 0)));
    const body = make("ol", "c-texts", ...parts.map(([node]) => node));
    const view = (value, again = true) => {
      state.view = value;
      main.dataset.view = value;
      help.textContent = HELP[value];
      const end = { write: share(channel.largest[0]), read: share(channel.largest[1]), memory: "its largest" }[value];
      scale.replaceChildren("0", make("span", "c-ramp"), end);
      if (again) parts.forEach(([, shade]) => shade());
    };
    const key = (kind, label) => make("span", "c-scale", make("i", `c-key c-key-${kind}`), label);
    const bar = make("div", "c-bar", choice("view", "What the shade shows", Object.entries(VIEWS), state.view, view),
      scale, key("w", "write gate"), key("r", "read gate"));
    main.replaceChildren(make("div", "p-top", title, figures), chips, bar, help, body);
    view(state.view, false);
    address.write(layer.layer, channel.id);
  };

  const fromAddress = () => {
    const [layer, channel] = address.read();
    const at = data.layers.findIndex((one) => String(one.layer) === layer);
    if (at < 0) return;
    state.layer = at;
    state.channel = Math.max(0, data.layers[at].channels.findIndex((one) => String(one.id) === channel));
  };
  const show = () => {
    const top = part(".c-layers");
    const layers = data.layers.map((layer, i) => [String(i), String(layer.layer)]);
    const orders = [["number", "number"], ["life", "half-life"]];
    if (data.layers.some((layer) => layer.channels.some((one) => one.repetition !== null))) orders.push(["repetition", "repetition"]);
    const toLayer = (i) => {
      state.layer = Number(i);
      state.channel = Math.min(state.channel, layerNow().channels.length - 1);
      showList(false);
      showChannel();
    };
    const sortBy = (order) => {
      state.order = order;
      showList(false);
    };
    top.replaceChildren(
      make("span", null, make("span", "c-name", "Layer"), choice("layer", "Layer", layers, String(state.layer), toLayer)),
      make("span", null, make("span", "c-name", "Channels by"), choice("order", "Order of the channels", orders, state.order, sortBy)));
    showList(false);
    showChannel();
  };
  const follow = () => {
    fromAddress();
    show();
  };
  follow();
  return follow;
};
