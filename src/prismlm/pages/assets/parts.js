// Parts of every page: places of text, shares, and the parts of a prediction. Text from corpora and models is only ever text.
import { html, nothing } from "./vendor/lit-html/lit-html.js";

// Where a page has more to say of a document or a prototype, it gives the addresses.
/** @type {{ document: null | ((place: any) => string), prototype: null | ((id: number) => string) }} */
export const links = { document: null, prototype: null };
export const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(3);
export const plain = (x) => (x < 0 ? "−" : "") + Math.abs(x).toFixed(3);
export const percent = (x) => x > 0 && x < 0.0005 ? "<0.1 %" : (100 * x).toFixed(Math.abs(x) < 0.1 ? 1 : 0) + " %";

/** An address that may be a link: http or https. @param {string | null} url */
export const web = (url) => (url && URL.canParse(url) && /^https?:$/.test(new URL(url).protocol) ? url.trim() : null);

/** Where a place of text is from. @param {any} place @param {string | null} [more] a fact before its source @param {string | null} [last] one after its licence */
export const origin = (place, more = null, last = null) => {
  const name = place.title || place.doc_id || `position ${place.position.toLocaleString("en")}`;
  const own = place.doc_id ? links.document?.(place) : null, url = own ? null : web(place.url);
  const facts = [more, place.source, place.license || "licence unknown", last];
  return html`<cite class="p-origin">${own ? html`<a href=${own}>${name}</a>` : url
    ? html`<a href=${url} rel="noopener noreferrer nofollow" target="_blank">${name}</a>` : html`<b>${name}</b>`}<span>${facts.filter(Boolean).join(" · ")}</span></cite>`;
};
const flat = (text) => text.replace(/\s*\n\s*/g, " ↵ ");
// Text as it stands, or a list of which every second piece is marked, as the token is; the last is not.
const marked = (text, end = "") => {
  const pieces = [text].flat(), last = pieces.length - 1;
  return pieces.map((piece, i) => (i % 2 && piece ? html`<mark class="p-also">${flat(piece)}</mark>` : flat(piece) + (i === last ? end : "")));
};
/** A token in its text. @param {any} place @param {string} kind */
export const quote = (place, kind) => {
  if (place.token === null) return html`<p class="p-note">This lens keeps no text.</p>`;
  const token = flat(place.token), word = token.trimStart(), space = word ? token.slice(0, token.length - word.length) : "";
  return html`<p class=${kind}><span class="p-before"><bdi>${marked(place.before, space)}</bdi></span><mark>${word || "␣"}</mark><span class="p-after">${marked(place.after)}</span></p>`;
};
/** A token whose spaces are marks, which are dimmed. @param {string} token @param {string} kind */
export const shown = (token, kind) => {
  const [, before, inner, after] = token.match(/^(·*)(.*?)(·*)$/su) ?? [], dim = (marks) => (marks ? html`<i class="p-dim">${marks}</i>` : nothing);
  return html`<span class=${kind}>${dim(before)}${inner}${dim(after)}</span>`;
};

/** A share as a bar, as long as its part of `most`; `base` is its share if evidence were spread evenly.
 * @param {string} label @param {number} share @param {{ kind?: string, base?: number | null, most?: number, colour?: string, title?: string }} [options] */
export const bar = (label, share, { kind, base = null, most = 1, colour, title } = {}) => html`<li class=${kind ?? nothing} .style=${colour ? `--k: ${colour}` : ""}
  title=${title ?? (base === null ? nothing : `${label}: ${percent(share)}, and ${percent(base)} if spread evenly`)}>
  <span class="p-key-name" title=${label}>${label}</span><span class="p-track"><span class="p-fill" .style=${`width: ${100 * Math.max(0, Math.min(1, share / most))}%`}></span>${
    base === null ? nothing : html`<span class="p-base" .style=${`left: ${100 * Math.min(1, base)}%`}></span>`}</span>
  <span class="p-number">${percent(share)}</span>${base === null ? nothing : html`<span class="p-lift">${share < base ? nothing : `× ${(share / base).toFixed(1)}`}</span>`}</li>`;
export const heading = { domain: "By domain", source: "By source", license: "By licence" };
/** Shares as bars that sum to 1: those beyond `most` come as one. @param {any} group @param {number} [most] */
export const shares = ({ by, items, others, elsewhere, unattributed }, most = items.length) => {
  const [count, rest] = others ?? [items.length - most, items.slice(most).reduce((total, { share }) => total + share, 0)];
  return html`<section><h3>${heading[by]}</h3><ul class="p-bars">${items.slice(0, most).map(({ key, share, base_rate }) => bar(key, share, { base: base_rate === undefined ? null : base_rate * (1 - unattributed) }))}
    ${count > 0 ? bar(`${count} more`, rest, { kind: "p-rest" }) : nothing}${elsewhere ? bar("elsewhere", elsewhere, { kind: "p-rest" }) : nothing}
    ${bar("not traced", unattributed, { kind: "p-grey" })}</ul></section>`;
};
// Items under a heading, or that there are none; each with a number before what is in it.
const listed = (kind, title, note, items, none) => html`<section class=${kind}>${title}${note ? html`<p class="p-note">${note}</p>` : nothing}
  ${items.length ? html`<ol>${items}</ol>` : html`<p class="p-note">${none}</p>`}</section>`;
const numbered = (number, content) => html`<li><span class="p-number">${number}</span><div>${content}</div></li>`;
/** @param {any} data @param {any} entry @param {unknown} [said] */
const placed = (data, entry, said = nothing) => {
  const place = data.contexts[entry.place];
  return numbered(percent(entry.share), html`${quote(place, "p-passage")}${said}${origin(place)}`);
};
export const documents = (data, list, title) =>
  listed("p-documents", html`<h3>${title}</h3>`, null, list.map((entry) => placed(data, entry)), "No passage was found.");
// Documents, and in each the passages that count most.
const grouped = (data, list) => list.map((entry) => {
  const places = entry.passages.map(({ place }) => data.contexts[place]);
  return numbered(percent(entry.share), html`${origin(places[0])}${places.map((place) => quote(place, "p-passage"))}`);
});

export const against = (data, list) => {
  const items = list.map((entry) => placed(data, entry, html`<p class="p-instead">instead of ${shown(entry.predicted, "p-target")}, to which the model gave ${
    percent(entry.probability)} there</p>`));
  const note = "Similar text in which another token came next. The figures are shares among such text alone.";
  return listed("p-documents p-against", html`<h3>What speaks against it</h3>`, note, items, "No such passage was found.");
};
const verbatim = (list) => {
  const items = list.map(({ text, length, count, place }) => numbered(`${length} tokens`, html`<p class="p-passage"><q>${flat(text).trim()}</q></p>${
    origin(place, null, count > 1 ? `and ${(count - 1).toLocaleString("en")} more` : null)}`));
  const note = "These words are in the corpus exactly so. That does not show that the model learnt them there.";
  return listed("p-documents p-verbatim", html`<h3>Word for word</h3>`, note, items, "No span of five tokens or more.");
};

// The five prototypes that weigh most, with their places among all, and the others, which are shown as one.
const FIRST = 5;
export const ranked = (uses) => {
  const order = uses.map((use, i) => ({ use, i })).sort((a, b) => Math.abs(b.use[1]) - Math.abs(a.use[1]));
  return [order.slice(0, FIRST), order.slice(FIRST)];
};
const sum = (some, column) => some.reduce((total, { use }) => total + use[column], 0);
/** The parts of a logit: the first prototypes, the others as one, residual and bias. */
export const partsOf = ({ uses, residual, bias }, prototypes) => {
  const [first, rest] = ranked(uses), all = first.map(({ use: [id, value] }, i) => ({ id, value, mark: String(i + 1), role: "", ...prototypes[id] }));
  const others = [[sum(rest, 1), `${rest.length} more`, "+", "more"], [residual[0], "residual", "r", "residual"], [bias[0], "bias", "b", "bias"]];
  return [...all, ...others.filter(([value, , , role]) => (role === "more" ? rest.length : role === "residual" || value))
    .map(([value, name, mark, role]) => ({ value, name, mark, role }))];
};
/** The parts of a logit as one bar over an axis, and as an equation. */
const stacked = (data, step) => {
  const parts = partsOf(step, data.prototypes), { logit, residual: [residual], bias: [bias] } = step;
  const below = parts.reduce((total, { value }) => total + Math.max(0, -value), 0);
  const span = below + parts.reduce((total, { value }) => total + Math.max(0, value), 0) || 1;
  const at = (x) => (100 * (x + below)) / span, ends = { up: 0, down: 0 };
  const segments = parts.map(({ value, name, colour, mark, role }) => {
    const start = value < 0 ? (ends.down += value) : ends.up, width = (100 * Math.abs(value)) / span;
    ends.up += Math.max(0, value);
    return html`<span class=${role ? `p-seg p-${role}` : "p-seg"} title=${`${name}: ${signed(value)}`} .style=${`left: ${at(start)}%; width: ${width}%${colour ? `; --k: ${colour}` : ""}`}>${width > 3 ? mark : nothing}</span>`;
  });
  const [left, right] = [at(Math.min(0, logit)), at(Math.max(0, logit))];
  // Labels lie between zero and the logit; where that is too narrow, on either side of both.
  const tick = (value, text, starts) => html`<span class=${starts === right - left > 14 ? "p-tick" : "p-tick p-tick-end"} .style=${`left: ${at(value)}%`}>${text}</span>`;
  return html`<div class="p-logit"><div class="p-stack" role="img" aria-label=${parts.map(({ name, value }) => `${name} ${signed(value)}`).join(", ")}>${segments}</div>
    <div class="p-axis"><span class="p-sum" .style=${`left: ${left}%; width: ${right - left}%`}></span>${tick(0, "0", logit >= 0)}${tick(logit, `${plain(logit)} logits`, logit < 0)}</div>
    <p class="p-equation">prototypes <b>${plain(step.uses.reduce((total, use) => total + use[1], 0))}</b> + residual <b>${plain(residual)}</b> + bias <b>${plain(bias)}</b> = logit <b>${
      plain(logit)}</b><span class="p-note"> the model's own${data.softcap ? `, before its soft-cap of ${plain(data.softcap)}` : ""}: ${plain(step.model)}</span></p></div>`;
};

/** How a prototype came to be active: parts of the direct path, and of the channels on it. */
const chain = ({ activation, parts: [embedding, layers, mixers, edit], channels }) => html`<div class="p-chain"><p class="p-equation">activation <b>${plain(activation)}</b>
  = embedding <b>${plain(embedding)}</b> + SwiGLUs <b>${plain(layers)}</b> + channels <b>${plain(mixers)}</b>${edit ? ` + edit ${plain(edit)}` : nothing}</p>
  <ol>${channels.map(([layer, channel, life, part, contribution, tokens]) => html`<li><span class="p-number" title=${`${signed(contribution)} of the logit`}>${signed(part)}</span>
    <span class="p-channel">layer ${layer} · channel ${channel}<small>half-life ${life < 1000 ? life.toPrecision(3) : Math.round(life)}</small></span>
    <span class="p-from">${tokens.map(([position, token, value]) => html`<span class="p-source">${shown(token, "p-target")}<small>${signed(value)} at ${position}</small></span>`)}</span></li>`)}</ol></div>`;

/** The cells of a row: a mark, a name, and the contribution, evidence and cosine, of which some are none. */
const row = (mark, name, figures) => html`${mark}<span class="p-name">${name}</span>${["contribution", "evidence", "cosine"].map((label, i) => {
  const x = figures[i] ?? null;
  return html`<span class="p-number" data-label=${label}>${x === null ? nothing : label === "cosine" ? x.toFixed(2) : signed(x)}</span>`;
})}`;
const chip = (mark, kind, colour = "") => html`<span class=${`p-chip ${kind}`} .style=${colour && `--k: ${colour}`}>${mark}</span>`;
const use = (data, step, { use: [id, ...figures], i: own }, i) => {
  const { name, category, colour, contexts } = data.prototypes[id], card = links.prototype?.(id), open = i < (matchMedia("(max-width: 820px)").matches ? 1 : 3);
  return html`<details ?open=${open}><summary class="p-row">${row(chip(i + 1, "", colour), html`${name}<small>${category ? `${category} · ${id}` : id}</small>`, figures)}</summary>
    ${step.chains?.[own] ? chain(step.chains[own]) : nothing}${contexts?.length
      ? html`<ol class="p-contexts">${contexts.map((n) => html`<li>${quote(data.contexts[n], "p-line")}${origin(data.contexts[n])}</li>`)}</ol>`
      : html`<p class="p-note">${contexts ? "No context in the corpus." : "It carries little here, so its contexts are left out."}</p>`}
    ${card ? html`<a class="p-more-of" href=${card}>All of this prototype</a>` : nothing}</details>`;
};
const PATHS = "Parts of an activation are those of the direct path: what a channel gave to later layers, and reached the prototype through them, " +
  "counts as theirs. The largest channels and tokens are shown.";
// A row for each of the first prototypes, and one for the others, which opens.
const uses = (data, step) => {
  const [first, rest] = ranked(step.uses), others = [["residual", "r", step.residual], ["bias", "b", step.bias]].filter(([name, , [value]]) => name === "residual" || value);
  return html`<div class="p-uses"><div class="p-row p-columns"><span></span><span>prototype</span>${["contribution", "evidence", "cosine"].map((name) => html`<span class="p-number">${name}</span>`)}</div>
    ${first.map((one, i) => use(data, step, one, i))}${rest.length ? html`<details class="p-others"><summary class="p-row">${
      row(chip("+", "p-more"), `${rest.length} more`, [sum(rest, 1), sum(rest, 2)])}</summary><div class="p-hidden">${rest.map((one, i) => use(data, step, one, FIRST + i))}</div></details>` : nothing}
    ${others.map(([name, mark, figures]) => html`<div class="p-row p-plain">${row(chip(mark, `p-${name}`), name, figures)}</div>`)}
    ${step.chains ? html`<p class="p-note p-direct">${PATHS}</p>` : nothing}</div>`;
};

export const figure = (value, label, title) => html`<div class="p-figure" title=${title ?? nothing}><b>${value}</b><span>${label}</span></div>`;
const KINDS = { text: "as the text goes on", generated: "as the model wrote", argmax: "the model's top token" };
const FED = "Uncertainty fed back to the token that was read: the entropy of the prediction before it, of the largest possible; 50 % is the neutral code, of text that is read at once with one pass";
/** A prediction and its parts. */
export const panel = (data, step) => html`<div class="p-main"><div class="p-top"><div class="p-title"><h2>${shown(step.token, "p-read")}<span class="p-arrow">→</span>${shown(step.target, "p-target")}</h2>
    <p class="p-note">position ${step.position} · ${KINDS[step.from]}</p></div>
  <div class="p-figures">${figure(percent(step.probability), "probability")}${figure(percent(step.explained), "explained")}${figure(plain(step.logit), "logit")}
    ${!data.feedback ? nothing : step.fed ? figure(percent(step.fed[0]), `fed back, code ${step.fed[1].toLocaleString("en")}`, FED) : figure("–", "nothing fed back", FED)}</div></div>
  ${stacked(data, step)}${uses(data, step)}</div>`;
/** What stands behind a prediction. */
export const behind = (data, step) => step.shares.length
  ? html`<h2>Where this prediction comes from</h2>${step.shares.map((one) => shares(one))}${documents(data, step.documents, "Passages")}`
  : html`<p class="p-note">No lens, so no training text. \`prismlm index\` builds one.</p>`;
// What traces of one lens share, as it travels, made handy.
export const unpacked = ({ prototypes, places, documents }) => ({
  prototypes: Object.fromEntries(Object.entries(prototypes).map(
    ([id, [name, category, colour, contexts]]) => [id, { name, category, colour, contexts }])),
  contexts: places.map(([before, token, after, document, position]) => ({ before, token, after, position, ...documents[document] })),
});
// Where an answer comes from: documents with their passages, then shares. What the corpus does not support is folded.
export const wholeText = (data, support) => {
  const { documents: list, shares: groups, verbatim: words, against: opposed } = data.whole;
  const parts = html`${listed("p-documents p-grouped", html`<h2>Documents and passages</h2>`, "Each document with its share of the evidence for this answer.", grouped(data, list), "No document was found.")}
    <section><h2>Shares</h2><p class="p-note">How the evidence divides. The line on a bar is where an even spread over the corpus would end; × 3 means three times as much.</p>
      <div class="p-shares">${groups.map((one) => shares(one))}</div></section>
    ${opposed ? against(data, opposed) : nothing}${words ? verbatim(words) : nothing}`;
  return support === "none" ? html`<details class="p-nearest"><summary>Show the nearest passages anyway</summary>${parts}</details>` : parts;
};

/** Which of so many a key goes to from one, or null. @returns {number | null} */
export const moves = (event, at, count) => {
  const to = { ArrowUp: at - 1, ArrowLeft: at - 1, ArrowDown: at + 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return null;
  event.preventDefault();
  return Math.max(0, Math.min(count - 1, to));
};
