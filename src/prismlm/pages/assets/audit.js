// Auditing: what the predictions over many texts rely on, as they are read, and the files of it.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { api, events } from "./server.js";
import { change, count, draw, examples } from "./controls.js";
import { NONE, report, reported } from "./report.js";

const PASTED = "pasted text.txt", KINDS = [".txt", ".md", ".json", ".jsonl", ".ndjson", ".csv"];

/** The files and text to audit, whether files are dragged over the page, and the request under way.
 * @typedef {{ files: File[], text: string, over: boolean, abort: AbortController | null, stopping: boolean, begun: boolean }} State */
const state = signal(/** @type {State} */ ({ files: [], text: "", over: false, abort: null, stopping: false, begun: false }));
/** The place of the view, and what all views share. @type {{ root: HTMLElement, shared: any } | null} */
let frame = null;

export const show = (root, at, shared) => {
  if (!frame) {
    frame = { root, shared };
    draw(root, () => page(state.value, shared.model));
  }
  command();
};

const command = () => {
  const { files } = state.value;
  frame?.shared.command(["prismlm", "audit", frame.shared.model.path, ...(files.length ? files.map((file) => file.name) : ["FILE"]), "--html", "report.html"]);
};

/** @param {State} now */
const page = ({ files, text, over, abort, stopping, begun }, { texts, limits: { audited: most } }) => html`
<form class="prismlm x-form" @submit=${(event) => { event.preventDefault(); void audited(most); }}>
  <div class="x-drop" ?data-over=${over} @dragover=${dragged} @dragleave=${dragged} @drop=${dropped}>
    <label class="x-file-pick"><span>Drop files here, or choose them</span>
      <input class="x-files" type="file" multiple accept=${KINDS.join(",")} @change=${(event) => choose(event.target.files)}></label>
    <p class="p-note x-file-names">${files.length ? files.map((file, i) => html`${i ? ", " : ""}<bdi>${file.name}</bdi>`)
      : `Texts, Markdown, JSON, JSON lines or CSV with a column “text”; up to 1,000 texts and ${count(most)} characters.`}</p>
    <button type="button" class="x-example" ?hidden=${!files.length} @click=${removed}>Remove</button></div>
  <textarea class="x-prompt" rows="3" placeholder="Or paste a text." aria-label="Text to audit" .value=${text}
    @input=${(event) => change(state, { text: event.target.value })}></textarea>
  ${Object.keys(texts).length ? html`<div class="x-examples"><span class="p-note">Or try a held-out text of the corpus:</span>${
    examples(texts, (text) => change(state, { text }))}</div>` : nothing}
  <div class="x-row"><button type="submit" class="x-go">Audit</button>
    <button type="button" class="x-stop" ?hidden=${!abort} ?disabled=${stopping} @click=${stop}>Stop</button></div>
</form>
<div class="x-out">${begun ? reported() : html`<p class="p-note">Of each text, as it is read: how well the model predicts it, how much of that its prototypes explain,
  and how well the corpus supports it. Of all together: what they rely on, by source, domain and licence, and the documents.</p>`}</div>`;

const choose = (files) => { change(state, { files: [...files] }); command(); };
const removed = () => {
  const input = /** @type {HTMLInputElement} */ (frame?.root.querySelector(".x-files"));
  input.value = "";
  choose([]);
  input.focus();
};
const dragged = (event) => { event.preventDefault(); change(state, { over: event.type === "dragover" }); };
const dropped = (event) => {
  dragged(event);
  if (!event.dataTransfer?.files.length) return;
  choose(event.dataTransfer.files);
  event.target.closest("form").requestSubmit();
};

/** Stop the audit, or cancel it if it has not begun. */
const stop = () => {
  const { id } = report.value;
  change(state, { stopping: true });
  if (id) void api(`/answers/${id}/stop`, {});
  else state.value.abort?.abort();
};

/** Return files as they are sent; throw an Error that says which cannot be.
 * @param {File[]} files @param {number} most characters */
const contentsOf = async (files, most) => {
  const unknown = files.find(({ name }) => !KINDS.some((kind) => name.toLowerCase().endsWith(kind)));
  if (unknown) throw new Error(`${unknown.name}: expected a name that ends with ${KINDS.join(", ")}.`);
  // A character takes at most four bytes, of which a file of this size has more.
  const large = files.find(({ size }) => size > 4 * most);
  if (large) {
    throw new Error(`${large.name} has ${count(large.size)} bytes: ${count(most)} characters are read here at once. Use the command below, which has no such limit.`);
  }
  return Promise.all(files.map(async (file) => ({ name: file.name, content: await decoded(file) })));
};

const decoded = async (file) => {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8 text. Write it again in UTF-8.`);
  }
};

const audited = async (most) => {
  state.value.abort?.abort();
  const abort = new AbortController(), { files, text } = state.value, own = () => state.value.abort === abort;
  report.value = NONE;
  change(state, { abort, stopping: false, begun: true });
  const pasted = text.trim() ? [{ name: PASTED, content: text }] : [];
  try {
    const sent = await contentsOf(files, most);
    if (!own()) return;
    await events("/audits", { files: [...sent, ...pasted] }, abort.signal, {
      start: ({ id, texts }) => change(report, { id, texts }),
      row: (row) => change(report, { rows: [...report.value.rows, row] }),
      done: ({ stopped, summary }) => change(report, { stopped, summary, failed: summary ? null : new Error("Stopped before the first text was read to its end.") }),
      error: ({ error }) => change(report, { failed: new Error(error) }),
    });
  } catch (error) {
    if (own()) change(report, { failed: abort.signal.aborted ? new Error("Stopped before it began.") : error });
  }
  if (own()) change(state, { abort: null });
};
