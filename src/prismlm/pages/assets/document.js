// A document of the corpus, opened at the place that an answer points to.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { percent, web } from "./parts.js";
import { api } from "./server.js";
import { change, count, draw, problem } from "./controls.js";

// Characters that a button adds.
const MORE = 100_000;
// Of a shorter one the place is in view, or nearly.
const LONG = 3000;

/** What was asked for and found. Of its text `before` and `after` of the place are shown, from `first` to `last`;
 * `adding` is the end that more is fetched for, `refused` why it did not come; `uses` is what it stands behind, once that is known.
 * @typedef {{ key: string, found: any, failed: unknown, before: string, after: string, first: number, last: number,
 *   adding: string, refused: unknown, uses: { found?: any, failed?: unknown } | null }} State */
const NONE = { found: null, failed: null, before: "", after: "", first: 0, last: 0, adding: "", refused: null, uses: null };
const state = signal(/** @type {State} */ ({ ...NONE, key: "" }));
/** @type {HTMLElement | null} */
let frame = null;

export const show = async (root, at, shared) => {
  const id = at.path.slice(1).join("/");
  const position = at.query.get("at");
  shared.command(["prismlm", "sources", shared.model.path, "--doc", id || "ID"]);
  if (!frame) draw(frame = root, () => page(state.value));
  const key = JSON.stringify([id, position]);
  if (state.value.key === key) {
    toPlace();
    return;
  }
  change(state, { ...NONE, key });
  try {
    if (!id) throw new Error("no document: follow a passage of an answer to the document it is from.");
    const found = await api(`/documents?${new URLSearchParams({ id, ...(position === null ? {} : { at: position }) })}`);
    if (state.value.key !== key) return;
    const [before, , after = ""] = found.parts;
    change(state, { found, before, after, first: found.first, last: found.last });
    toPlace();
    void used(id, key);
  } catch (failed) {
    if (state.value.key === key) change(state, { key: "", failed });
  }
};

const used = async (id, key) => {
  const uses = await api(`/documents/prototypes?${new URLSearchParams({ id })}`).then((found) => ({ found }), (failed) => ({ failed }));
  if (state.value.key === key) change(state, { uses });
};

/** @param {State} now */
const page = (now) => {
  const { found, failed } = now;
  if (failed) return problem(failed);
  if (!found) return html`<p class="p-note">Opening…</p>`;
  const fact = (name, value) => html`<div><dt>${name}</dt><dd><bdi>${value}</bdi></dd></div>`;
  const url = web(found.url), source = url ? html`<a href=${url} rel="noopener noreferrer nofollow" target="_blank">${url}</a>` : "none";
  return html`<article class="prismlm x-document">
    <header class="p-head"><h1 class="x-doc-title"><bdi>${found.title || found.doc_id}</bdi></h1>
      <dl>${fact("id", found.doc_id)}${fact("source", found.source || "unknown")}${fact("domain", found.domain || "unknown")}
        ${fact("licence", found.license || "unknown")}${fact("link", source)}
        ${fact("length", `${count(found.tokens)} tokens, ${count(found.characters)} characters`)}</dl></header>
    <div class="x-doc-parts">${body(now)}<aside class="x-doc-behind"><h2>Prototypes it stands behind</h2>${behind(now)}</aside></div>
  </article>`;
};

/** The text, with buttons for what is before and after the part that is shown. @param {State} now */
const body = (now) => {
  const { found, before, after, first, last } = now, [, token = ""] = found.parts, word = token.trimStart();
  const long = found.parts.length === 3 && found.characters > LONG;
  // Spaces before the marked word stand outside of the mark.
  const opening = before + token.slice(0, token.length - word.length), said = `position ${count(found.at)} of the corpus`;
  const mark = found.parts.length === 3 ? html`<mark id="place" tabindex="-1" title=${said}>${word || "␣"}</mark>` : nothing;
  return html`<div class="x-doc-main">${more(now, "before", first)}
    <div class="x-doc-text" dir="auto">${opening}${mark}${after}</div>
    ${more(now, "after", found.characters - last)}
    ${long ? html`<button type="button" class="x-doc-place" @click=${back}>To the place</button>` : nothing}</div>`;
};

/** A button that adds to the text, while there are characters left. @param {State} now @param {"before" | "after"} end */
const more = ({ adding, refused }, end, left) => html`<button type="button" class="x-doc-more" ?hidden=${left <= 0} ?disabled=${adding === end && !refused}
  @click=${() => void add(end)}>Show what comes ${end}: ${count(Math.min(MORE, left))} of ${count(left)} characters</button>
  ${adding === end && refused ? problem(refused) : nothing}`;

/** @param {"before" | "after"} end */
const add = async (end) => {
  const { key, found, first, last } = state.value;
  const [from, to] = end === "before" ? [Math.max(0, first - MORE), first] : [last, Math.min(found.characters, last + MORE)];
  change(state, { adding: end, refused: null });
  try {
    const { text } = await api(`/documents/text?${new URLSearchParams({ id: found.doc_id, first: String(from), last: String(to) })}`);
    if (state.value.key !== key) return;
    const { scrollHeight } = document.documentElement, { before, after } = state.value;
    change(state, end === "before" ? { adding: "", first: from, before: text + before } : { adding: "", last: to, after: after + text });
    // What is read stays where it is.
    if (end === "before") scrollBy(0, document.documentElement.scrollHeight - scrollHeight);
  } catch (refused) {
    if (state.value.key === key) change(state, { refused });
  }
};

const place = () => /** @type {HTMLElement | null | undefined} */ (frame?.querySelector("#place"));
/** Where the place is in view anyway, the head of the document stays so too. */
const toPlace = () => {
  const box = place()?.getBoundingClientRect();
  if (box && (box.top < 60 || box.bottom > innerHeight - 120)) place()?.scrollIntoView({ block: "center" });
};
const back = () => { toPlace(); place()?.focus({ preventScroll: true }); };

const named = (one) => html`<span class="p-chip" .style=${`--k: ${one.colour}`}></span>
  <span class="p-name"><a href=${`#/prototypes/${one.id}`}><bdi>${one.name}</bdi></a>
  <small>${one.category ? `${one.category} · ${one.id}` : one.id}</small></span>`;

/** The prototypes that it stands behind. @param {State} now */
const behind = ({ uses, found: { doc_id } }) => {
  if (!uses) return html`<p class="p-note">Looking…</p>`;
  if (!uses.found) return html`<p class="p-note">${uses.failed instanceof Error ? uses.failed.message : uses.failed}</p>`;
  const { cells, in_cells, contexts, in_contexts } = uses.found;
  const ranked = ({ position, rank, cosine }) =>
    html`<a href=${`#/document/${encodeURIComponent(doc_id)}?at=${position}`}>rank ${rank + 1}, cosine ${cosine.toFixed(2)}</a>`;
  const listed = (list, figure) => html`<ul class="x-doc-uses">${list.map((one) => html`<li>${named(one)}<span class="p-number">${figure(one)}</span></li>`)}</ul>`;
  return html`<p class="p-note">Its positions lie in the cells of ${count(in_cells)} prototype${in_cells === 1 ? "; it is" : "s; the fullest"}:</p>
    ${listed(cells, (one) => `${count(one.positions)} position${one.positions === 1 ? "" : "s"}, ${percent(one.share)} of the cell`)}
    <p class="p-note">${in_contexts ? `It is among the nearest contexts of ${count(in_contexts)} prototype${in_contexts === 1 ? "" : "s"}:` : "It is among the nearest contexts of none."}</p>
    ${in_contexts ? listed(contexts, ranked) : nothing}`;
};
