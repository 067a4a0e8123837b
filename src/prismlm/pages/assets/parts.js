// Parts of every page, as DOM nodes: text from corpora and models is only ever a text node.
// Where a page has more to say of a document or a prototype, it gives the addresses.
/** @type {{ document: null | ((place: any) => string), prototype: null | ((id: number) => string) }} */
export const links = { document: null, prototype: null };
export const make = (tag, classes, ...children) => {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};
export const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(3);
export const plain = (x) => (x < 0 ? "−" : "") + Math.abs(x).toFixed(3);
export const percent = (x) => x > 0 && x < 0.0005 ? "<0.1 %" : (100 * x).toFixed(Math.abs(x) < 0.1 ? 1 : 0) + " %";

/** An address that may be a link: http or https. @param {string | null} url */
export const web = (url) => (url && URL.canParse(url) && /^https?:$/.test(new URL(url).protocol) ? url.trim() : null);

/** Where a place of text is from. @param {any} place @param {string} [more] what else is said of it */
export const origin = (place, more) => {
  const name = place.title || place.doc_id;
  const own = links.document?.(place);
  const url = own ? null : web(place.url);
  const link = make(own || url ? "a" : "b", null, name);
  if (own) link.href = own;
  else if (url) Object.assign(link, { href: url, rel: "noopener noreferrer nofollow", target: "_blank" });
  const facts = [more, place.source, place.license || "licence unknown"];
  return make("cite", "p-origin", link, make("span", null, facts.filter(Boolean).join(" · ")));
};
export const flat = (text) => text.replace(/\s*\n\s*/g, " ↵ ");
// Text as it stands, or a list of which every second piece is marked beside the token; the last is not.
const marked = (text, end = "") => {
  const pieces = [text].flat(), last = pieces.length - 1;
  return pieces.map((piece, i) => (i % 2 ? make("mark", "p-also", flat(piece)) : flat(piece) + (i === last ? end : "")))
    .filter((piece) => piece.textContent !== "");
};
export const quote = (place, classes) => {
  if (place.token === null) return make("p", "p-note", "This lens keeps no text.");
  const token = flat(place.token);
  const word = token.trimStart();
  const space = word ? token.slice(0, token.length - word.length) : "";
  return make("p", classes, make("span", "p-before", make("bdi", null, ...marked(place.before, space))),
    make("mark", null, word || "␣"), make("span", "p-after", ...marked(place.after)));
};
export const shown = (token, classes) => {
  const [, before, inner, after] = token.match(/^(·*)(.*?)(·*)$/su);
  const dim = (marks) => (marks ? make("i", "p-dim", marks) : null);
  return make("span", classes, dim(before), inner, dim(after));
};

export const bar = (label, share, classes, base = null) => {
  const fill = make("span", "p-fill");
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  const name = make("span", "p-key-name", label);
  name.title = label;
  const item = make("li", classes, name, make("span", "p-track", fill),
    make("span", "p-number", percent(share)));
  if (base !== null) {
    const mark = make("span", "p-base");
    mark.style.left = `${Math.min(1, base) * 100}%`;
    fill.after(mark);
    item.title = `${label}: ${percent(share)}, and ${percent(base)} of the corpus`;
    item.append(make("span", "p-lift", share < base ? "" : `× ${(share / base).toFixed(1)}`));
  }
  return item;
};
export const heading = { domain: "By domain", source: "By source", license: "By licence" };
/** Shares as bars that sum to 1: those beyond `most` come as one. @param {any} group @param {number} [most] */
export const shares = ({ by, items, others, elsewhere, unattributed }, most = items.length) => {
  const [count, rest] = others ?? [items.length - most, items.slice(most).reduce((total, { share }) => total + share, 0)];
  const list = make("ul", "p-bars", ...items.slice(0, most).map(({ key, share, base_rate }) => bar(key, share, null, base_rate ?? null)));
  if (count > 0) list.append(bar(`${count} more`, rest, "p-rest"));
  if (elsewhere) list.append(bar("elsewhere", elsewhere, "p-rest"));
  list.append(bar("not traced", unattributed, "p-grey"));
  return make("section", null, make("h3", null, heading[by]), list);
};
// Items under a heading, or that there are none; each with a number before what is in it.
const listed = (kind, title, note, items, none, level = "h3") => make("section", kind, make(level, null, title), note && make("p", "p-note", note),
  items.length ? make("ol", null, ...items) : make("p", "p-note", none));
const numbered = (number, ...parts) => make("li", null, make("span", "p-number", number), make("div", null, ...parts));
const placed = (data, entry, said = null) => {
  const place = data.contexts[entry.place];
  return numbered(percent(entry.share), quote(place, "p-passage"), said, origin(place));
};
export const documents = (data, list, title) =>
  listed("p-documents", title, null, list.map((entry) => placed(data, entry)), "No passage was found.");
// Documents, and in each the passages that count most.
const grouped = (data, list) => list.map((entry) => {
  const places = entry.passages.map(({ place }) => data.contexts[place]), [first] = places;
  return numbered(percent(entry.share), origin(first), ...places.map((place) => quote(place, "p-passage")));
});

export const against = (data, list, estimated = false) => {
  const items = list.map((entry) => placed(data, entry, make("p", "p-instead", "instead of ", shown(entry.predicted, "p-target"),
    `, to which the model gave ${estimated ? "an estimated " : ""}${percent(entry.probability)} there`)));
  const note = "Similar text in which another token came next. The figures are shares among such text alone.";
  return listed("p-documents p-against", "What speaks against it", note, items, "No such passage was found.");
};
export const verbatim = (list) => {
  const items = list.map(({ text, length, count, place }) => {
    const name = place.title || place.doc_id || `position ${place.position.toLocaleString("en")}`;
    const own = place.doc_id && links.document?.(place);
    const link = make(own ? "a" : "b", null, name);
    if (own) link.href = own;
    const facts = [place.source, place.license].filter(Boolean);
    if (count > 1) facts.push(`and ${(count - 1).toLocaleString("en")} more`);
    return numbered(`${length} tokens`, make("p", "p-passage", make("q", null, flat(text).trim())),
      make("cite", "p-origin", link, make("span", null, facts.join(" · "))));
  });
  const note = "These words are in the corpus exactly so. That does not show that the model learnt them there.";
  return listed("p-documents p-verbatim", "Word for word", note, items, "No span of five tokens or more.");
};

// The five prototypes that weigh most, with their places among all, and the others, which are shown as one.
const FIRST = 5;
export const ranked = (uses) => {
  const order = uses.map((use, i) => ({ use, i })).sort((a, b) => Math.abs(b.use[1]) - Math.abs(a.use[1]));
  return [order.slice(0, FIRST), order.slice(FIRST)];
};
const sum = (some, column) => some.reduce((total, { use }) => total + use[column], 0);
export const stacked = (data, step) => {
  const [first, rest] = ranked(step.uses);
  const parts = first.map(({ use: [id, value] }, i) => ({
    value, label: data.prototypes[id].name, colour: data.prototypes[id].colour, mark: String(i + 1), kind: "p-seg",
  }));
  if (rest.length) parts.push({ value: sum(rest, 1), label: `${rest.length} more`, mark: "+", kind: "p-seg p-more" });
  parts.push({ value: step.residual[0], label: "residual", mark: "r", kind: "p-seg p-residual" });
  if (step.bias[0]) parts.push({ value: step.bias[0], label: "bias", mark: "b", kind: "p-seg p-bias" });
  const below = parts.reduce((sum, p) => sum + Math.max(0, -p.value), 0);
  const above = parts.reduce((sum, p) => sum + Math.max(0, p.value), 0);
  const span = below + above || 1;
  const at = (x) => (100 * (x + below)) / span;
  const chart = make("div", "p-stack");
  const places = { up: 0, down: 0 };
  for (const part of parts) {
    const from = part.value < 0 ? (places.down += part.value) : places.up;
    if (part.value >= 0) places.up += part.value;
    const width = (100 * Math.abs(part.value)) / span;
    const node = make("span", part.kind, width > 3 ? part.mark : "");
    Object.assign(node.style, { left: `${at(from)}%`, width: `${width}%` });
    if (part.colour) node.style.setProperty("--k", part.colour);
    node.title = `${part.label}: ${signed(part.value)}`;
    chart.append(node);
  }
  const whole = make("span", "p-sum");
  const ends = [at(Math.min(0, step.logit)), at(Math.max(0, step.logit))];
  Object.assign(whole.style, { left: `${ends[0]}%`, width: `${ends[1] - ends[0]}%` });
  const axis = make("div", "p-axis", whole);
  // Labels lie between zero and the logit; where that is too narrow, on either side of both.
  const inward = ends[1] - ends[0] > 14;
  for (const [value, text, other] of [[0, "0", step.logit], [step.logit, `${plain(step.logit)} logits`, 0]]) {
    const left = value < other || (value === other && text === "0");
    const tick = make("span", left === inward ? "p-tick" : "p-tick p-tick-end", text);
    tick.style.left = `${at(value)}%`;
    axis.append(tick);
  }
  const total = step.uses.reduce((s, use) => s + use[1], 0);
  const equation = make("p", "p-equation", "prototypes ", make("b", null, plain(total)), " + residual ",
    make("b", null, plain(step.residual[0])), " + bias ", make("b", null, plain(step.bias[0])), " = logit ",
    make("b", null, plain(step.logit)), make("span", "p-note", ` the model's own${data.softcap ? `, before its soft-cap of ${plain(data.softcap)}` : ""}: ${plain(step.model)}`));
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", parts.map((p) => `${p.label} ${signed(p.value)}`).join(", "));
  return make("div", "p-logit", chart, axis, equation);
};

export const chain = (one) => {
  const [embedding, layers, channels, edit] = one.parts;
  const sum = make("p", "p-equation", "activation ", make("b", null, plain(one.activation)), " = embedding ",
    make("b", null, plain(embedding)), " + SwiGLUs ", make("b", null, plain(layers)), " + channels ",
    make("b", null, plain(channels)), edit ? ` + edit ${plain(edit)}` : "");
  const list = one.channels.map(([layer, channel, life, part, contribution, tokens]) => {
    const place = make("span", "p-channel", `layer ${layer} · channel ${channel}`,
      make("small", null, `half-life ${life < 1000 ? life.toPrecision(3) : Math.round(life)}`));
    const value = make("span", "p-number", signed(part));
    value.title = `${signed(contribution)} of the logit`;
    const from = tokens.map(([position, token, given]) =>
      make("span", "p-source", shown(token, "p-target"), make("small", null, `${signed(given)} at ${position}`)));
    return make("li", null, value, place, make("span", "p-from", ...from));
  });
  return make("div", "p-chain", sum, make("ol", null, ...list));
};

export const row = (mark, name, numbers) => {
  const cells = numbers.map(([label, x]) => {
    const cell = make("span", "p-number", x === null ? "" : label === "cosine" ? x.toFixed(2) : signed(x));
    cell.dataset.label = label;
    return cell;
  });
  return [mark, name, ...cells];
};
// A row for each of the first prototypes, and one for the others, which opens.
export const uses = (data, step) => {
  const list = make("div", "p-uses", make("div", "p-row p-columns", make("span"), make("span", null, "prototype"),
    ...["contribution", "evidence", "cosine"].map((x) => make("span", "p-number", x))));
  const opened = matchMedia("(max-width: 820px)").matches ? 1 : 3;
  const [first, rest] = ranked(step.uses), hidden = make("div", "p-hidden");
  [...first, ...rest].forEach(({ use: [id, contribution, evidence, cosine], i: own }, i) => {
    const one = data.prototypes[id];
    const chip = make("span", "p-chip", String(i + 1));
    chip.style.setProperty("--k", one.colour);
    const name = make("span", "p-name", one.name, make("small", null, one.category ? `${one.category} · ${id}` : `${id}`));
    const summary = make("summary", "p-row", ...row(chip, name,
      [["contribution", contribution], ["evidence", evidence], ["cosine", cosine]]));
    const contexts = (one.contexts ?? []).map((n) =>
      make("li", null, quote(data.contexts[n], "p-line"), origin(data.contexts[n])));
    const none = one.contexts === undefined ? "It carries little here, so its contexts are left out." : "No context in the corpus.";
    const body = contexts.length ? make("ol", "p-contexts", ...contexts) : make("p", "p-note", none);
    const more = links.prototype?.(id);
    const card = more ? Object.assign(make("a", "p-more-of", "All of this prototype"), { href: more }) : null;
    const entry = make("details", null, summary, ...(step.chains?.[own] ? [chain(step.chains[own])] : []), body, ...(card ? [card] : []));
    entry.open = i < opened;
    (i < FIRST ? list : hidden).append(entry);
  });
  if (rest.length) {
    const summary = make("summary", "p-row", ...row(make("span", "p-chip p-more", "+"),
      make("span", "p-name", `${rest.length} more`),
      [["contribution", sum(rest, 1)], ["evidence", sum(rest, 2)], ["cosine", null]]));
    list.append(make("details", "p-others", summary, hidden));
  }
  for (const [name, mark, [contribution, evidence]] of [["residual", "r", step.residual], ["bias", "b", step.bias]]) {
    if (name === "bias" && !contribution) continue;
    list.append(make("div", "p-row p-plain", ...row(make("span", `p-chip p-${name}`, mark), make("span", "p-name", name),
      [["contribution", contribution], ["evidence", evidence], ["cosine", null]])));
  }
  if (step.chains) {
    list.append(make("p", "p-note p-direct", "Parts of an activation are those of the direct path: what a channel gave " +
      "to later layers, and reached the prototype through them, counts as theirs. The largest channels and tokens are shown."));
  }
  return list;
};

export const figure = (value, label) => make("div", "p-figure", make("b", null, value), make("span", null, label));
export const kinds = { text: "as the text goes on", generated: "as the model wrote", argmax: "the model's top token" };
export const panel = (data, step) => {
  const title = make("div", "p-title",
    make("h2", null, shown(step.token, "p-read"), make("span", "p-arrow", "→"), shown(step.target, "p-target")),
    make("p", "p-note", `position ${step.position} · ${kinds[step.from]}`));
  const figures = make("div", "p-figures", figure(percent(step.probability), "probability"),
    figure(percent(step.explained), "explained"), figure(plain(step.logit), "logit"));
  if (data.feedback) {
    const fed = step.fed
      ? figure(percent(step.fed[0]), `fed back, code ${step.fed[1].toLocaleString("en")}`)
      : figure("–", "nothing fed back");
    fed.title = "Uncertainty fed back to the token that was read: the entropy of the prediction before it, of the largest possible; 50 % is the neutral code, of text that is read at once with one pass";
    figures.append(fed);
  }
  return make("div", "p-main", make("div", "p-top", title, figures), stacked(data, step), uses(data, step));
};
export const behind = (data, step) => step.shares.length
  ? make("div", "p-aside", make("h2", null, "Where this prediction comes from"), ...step.shares.map((one) => shares(one)),
      documents(data, step.documents, "Passages"))
  : make("div", "p-aside", make("p", "p-note", "No lens, so no training text. `prismlm index` builds one."));
// What traces of one lens share, as it travels, made handy.
export const unpacked = ({ prototypes, places, documents }) => ({
  prototypes: Object.fromEntries(Object.entries(prototypes).map(
    ([id, [name, category, colour, contexts]]) => [id, { name, category, colour, contexts }])),
  contexts: places.map(([before, token, after, document, position]) => ({ before, token, after, position, ...documents[document] })),
});
// Where an answer comes from: documents with their passages, then shares. What the corpus does not support is folded.
export const wholeText = (data, support) => {
  const { documents: list, shares: groups, verbatim: words, against: opposed } = data.whole;
  const parts = [
    listed("p-documents p-grouped", "Documents and passages", "Each document with its share of the evidence for this answer.", grouped(data, list), "No document was found.", "h2"),
    make("section", null, make("h2", null, "Shares"), make("p", "p-note", "How the evidence divides. The line on a bar is the share of the whole corpus; × 3 means three times that share."),
      make("div", "p-shares", ...groups.map((one) => shares(one)))),
    ...(opposed ? [against(data, opposed)] : []), ...(words ? [verbatim(words)] : [])];
  return support === "none" ? [make("details", "p-nearest", make("summary", null, "Show the nearest passages anyway"), ...parts)] : parts;
};
/** Which of so many a key goes to from one, or null. @returns {number | null} */
export const moves = (event, at, count) => {
  const to = { ArrowUp: at - 1, ArrowLeft: at - 1, ArrowDown: at + 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return null;
  event.preventDefault();
  return Math.max(0, Math.min(count - 1, to));
};
// Tokens as one list to walk with the arrow keys: what is chosen stays, what is pointed at shows.
// What it returns chooses one by its number.
export const walk = (text, tokens, show) => {
  let chosen = tokens.length - 1;
  const choose = (number, focus) => {
    tokens[chosen].tabIndex = -1;
    chosen = number;
    tokens[chosen].tabIndex = 0;
    if (focus) tokens[chosen].focus();
    show(chosen);
  };
  tokens.forEach((token, i) => {
    token.addEventListener("click", () => choose(i, true));
    token.addEventListener("focus", () => choose(i, false));
    token.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && show(i));
  });
  text.addEventListener("pointerleave", () => show(chosen));
  text.addEventListener("keydown", (event) => {
    const to = moves(event, chosen, tokens.length);
    if (to !== null) choose(to, true);
  });
  choose(chosen, false);
  return (number) => choose(number, false);
};
