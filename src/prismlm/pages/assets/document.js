// A document of the corpus, opened at the place that an answer points to.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { percent, web } from "./parts.js";
import { api } from "./server.js";
import { change, count, draw, facts, problem } from "./controls.js";

// Of a shorter text the place is in view, or nearly.
const LONG = 3000;

/** The document that was requested, its data or why there is none, and the prototypes that it stands behind, once these are known.
 * @typedef {{ key: string, document: any, failed: unknown, uses: { data?: any, failed?: unknown } | null }} State */
const state = signal(/** @type {State} */ ({ key: "", document: null, failed: null, uses: null }));
/** @type {HTMLElement | null} */
let frame = null;

export const show = async (root, at, shared) => {
  const id = at.path.slice(1).join("/"), position = at.query.get("at"), key = JSON.stringify([id, position]);
  shared.command(["prismlm", "sources", shared.model.path, "--doc", id || "ID"]);
  if (!frame) draw(frame = root, () => page(state.value));
  if (state.value.key === key) {
    toPlace();
    return;
  }
  state.value = { key, document: null, failed: null, uses: null };
  try {
    if (!id) throw new Error("no document: follow a passage of an answer to the document it is from.");
    const document = await api(`/documents?${new URLSearchParams({ id, ...(position === null ? {} : { at: position }) })}`);
    if (state.value.key !== key) return;
    change(state, { document });
    toPlace();
    void api(`/documents/prototypes?${new URLSearchParams({ id })}`).then((data) => ({ data }), (failed) => ({ failed }))
      .then((uses) => { if (state.value.key === key) change(state, { uses }); });
  } catch (failed) {
    if (state.value.key === key) change(state, { key: "", failed });
  }
};

/** @param {State} now */
const page = ({ document, failed, uses }) => {
  if (failed) return problem(failed);
  if (!document) return html`<p class="p-note">Opening…</p>`;
  const { title, doc_id, source, domain, license, tokens, characters } = document, url = web(document.url);
  const link = url ? html`<a href=${url} rel="noopener noreferrer nofollow" target="_blank">${url}</a>` : "none";
  const rows = [["id", doc_id], ["source", source || "unknown"], ["domain", domain || "unknown"], ["licence", license || "unknown"], ["link", link],
    ["length", `${count(tokens)} tokens, ${count(characters)} characters`]].map(([name, value]) => /** @type {[string, any]} */ ([name, html`<bdi>${value}</bdi>`]));
  return html`<article class="prismlm x-document">
    <header class="p-head"><h1 class="x-doc-title"><bdi>${title || doc_id}</bdi></h1>${facts(rows)}</header>
    <div class="x-doc-parts">${text(document)}<aside class="x-doc-behind"><h2>Prototypes it stands behind</h2>${behind(uses, doc_id)}</aside></div>
  </article>`;
};

const text = ({ doc_id, parts, at, first, last, characters, earlier, later }) => {
  const [before, token = "", after = ""] = parts, word = token.trimStart(), marked = parts.length === 3;
  // Spaces before the marked word stand outside of the mark.
  const opening = before + token.slice(0, token.length - word.length), title = marked ? `position ${count(at)} of the corpus` : "";
  const rest = (position, words) => (position === null ? nothing : html` <a href=${placed(doc_id, position)}>${words}</a>`);
  const part = last - first < characters ? html`<p class="p-note">Characters ${count(first + 1)} to ${count(last)} of ${count(characters)}.${
    rest(earlier, "Earlier text")}${rest(later, "Later text")}</p>` : nothing;
  return html`<div class="x-doc-main">${part}
    <div class="x-doc-text" dir="auto">${opening}${marked ? html`<mark id="place" tabindex="-1" title=${title}>${word || "␣"}</mark>` : nothing}${after}</div>
    ${marked && characters > LONG ? html`<button type="button" class="x-doc-place" @click=${back}>To the place</button>` : nothing}${part}</div>`;
};

/** The address of a document at a position. @param {string} doc_id @param {number} position */
const placed = (doc_id, position) => `#/document/${encodeURIComponent(doc_id)}?at=${position}`;

const place = () => /** @type {HTMLElement | null | undefined} */ (frame?.querySelector("#place"));
/** Where the place is in view anyway, the head of the document stays so too. */
const toPlace = () => {
  const box = place()?.getBoundingClientRect();
  if (box && (box.top < 60 || box.bottom > innerHeight - 120)) place()?.scrollIntoView({ block: "center" });
};
const back = () => { toPlace(); place()?.focus({ preventScroll: true }); };

/** The prototypes that it stands behind. @param {State["uses"]} uses @param {string} doc_id */
const behind = (uses, doc_id) => {
  if (!uses) return html`<p class="p-note">Looking…</p>`;
  if (!uses.data) return html`<p class="p-note">${uses.failed instanceof Error ? uses.failed.message : uses.failed}</p>`;
  const { cells, in_cells, contexts, in_contexts } = uses.data;
  const prototype = ({ id, name, category, colour }) => html`<span class="p-chip" .style=${`--k: ${colour}`}></span>
    <span class="p-name"><a href=${`#/prototypes/${id}`}><bdi>${name}</bdi></a><small>${category ? `${category} · ${id}` : id}</small></span>`;
  const listed = (list, figure) => html`<ul class="x-doc-uses">${list.map((use) => html`<li>${prototype(use)}<span class="p-number">${figure(use)}</span></li>`)}</ul>`;
  const ranked = ({ position, rank, cosine }) =>
    html`<a href=${placed(doc_id, position)}>rank ${rank + 1}, cosine ${cosine.toFixed(2)}</a>`;
  return html`<p class="p-note">Its positions lie in the cells of ${count(in_cells)} prototype${in_cells === 1 ? "; it is" : "s; the fullest"}:</p>
    ${listed(cells, ({ positions, share }) => `${count(positions)} position${positions === 1 ? "" : "s"}, ${percent(share)} of the cell`)}
    <p class="p-note">${in_contexts ? `It is among the nearest contexts of ${count(in_contexts)} prototype${in_contexts === 1 ? "" : "s"}:` : "It is among the nearest contexts of none."}</p>
    ${in_contexts ? listed(contexts, ranked) : nothing}`;
};
