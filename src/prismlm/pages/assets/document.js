// A document of the corpus, opened at the place that an answer points to.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { web } from "./parts.js";
import { api } from "./server.js";
import { change, count, draw, facts, problem } from "./controls.js";

// Of a shorter text the place is in view, or nearly.
const LONG = 3000;

/** The document that was requested, and its data or why there is none.
 * @typedef {{ key: string, document: any, failed: unknown }} State */
const state = signal(/** @type {State} */ ({ key: "", document: null, failed: null }));
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
  state.value = { key, document: null, failed: null };
  try {
    if (!id) throw new Error("no document: follow a passage of an answer to the document it is from.");
    const document = await api(`/documents?${new URLSearchParams({ id, ...(position === null ? {} : { at: position }) })}`);
    if (state.value.key !== key) return;
    change(state, { document });
    toPlace();
  } catch (failed) {
    if (state.value.key === key) change(state, { key: "", failed });
  }
};

/** @param {State} now */
const page = ({ document, failed }) => {
  if (failed) return problem(failed);
  if (!document) return html`<p class="p-note">Opening…</p>`;
  const { title, doc_id, source, domain, license, tokens, characters } = document, url = web(document.url);
  const link = url ? html`<a href=${url} rel="noopener noreferrer nofollow" target="_blank">${url}</a>` : "none";
  const rows = [["id", doc_id], ["source", source || "unknown"], ["domain", domain || "unknown"], ["licence", license || "unknown"], ["link", link],
    ["length", `${count(tokens)} tokens, ${count(characters)} characters`]].map(([name, value]) => /** @type {[string, any]} */ ([name, html`<bdi>${value}</bdi>`]));
  return html`<article class="prismlm x-document">
    <header class="p-head"><h1 class="x-doc-title"><bdi>${title || doc_id}</bdi></h1>${facts(rows)}</header>
    ${text(document)}
  </article>`;
};

const text = ({ parts, at, first, last, characters }) => {
  const [before, token = "", after = ""] = parts, word = token.trimStart(), marked = parts.length === 3;
  // Spaces before the marked word stand outside of the mark.
  const opening = before + token.slice(0, token.length - word.length), title = marked ? `position ${count(at)} of the corpus` : "";
  const part = last - first < characters ? html`<p class="p-note">Characters ${count(first + 1)} to ${count(last)} of ${count(characters)}.</p>` : nothing;
  return html`<div class="x-doc-main">${part}
    <div class="x-doc-text" dir="auto">${opening}${marked ? html`<mark id="place" tabindex="-1" title=${title}>${word || "␣"}</mark>` : nothing}${after}</div>
    ${marked && characters > LONG ? html`<button type="button" class="x-doc-place" @click=${back}>To the place</button>` : nothing}${part}</div>`;
};

const place = () => /** @type {HTMLElement | null | undefined} */ (frame?.querySelector("#place"));
/** Where the place is in view anyway, the head of the document stays so too. */
const toPlace = () => {
  const box = place()?.getBoundingClientRect();
  if (box && (box.top < 60 || box.bottom > innerHeight - 120)) place()?.scrollIntoView({ block: "center" });
};
const back = () => { toPlace(); place()?.focus({ preventScroll: true }); };
