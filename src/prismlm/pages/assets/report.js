// The report of an audit: its sums, and, in the explorer, its texts while they come in.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { documents, figure, links, percent, shares } from "./parts.js";
import { CAVEAT, change, count, field, options, problem } from "./controls.js";

const SHOWN = 100, BARS = 12;
const OPENING = 120; // characters that a row has of its text

/** How many texts there are; rows of texts, in which order they stand and how many of them; and, at the end, the summary.
 * @typedef {{ id: string, note: string, texts: number, rows: any[], order: string, shown: number,
 *   summary: any, stopped: boolean, failed: unknown }} Report */
/** @type {Report} */
export const NONE = { id: "", note: "Reading…", texts: 1, rows: [], order: "order", shown: SHOWN,
  summary: null, stopped: false, failed: null };
export const report = signal(NONE);

/** @type {Record<string, [string, (a: any, b: any) => number]>} */
const ORDERS = {
  order: ["as given", () => 0],
  support: ["least support", (a, b) => (a.support_score ?? 2) - (b.support_score ?? 2)],
  ce: ["largest cross-entropy", (a, b) => (b.ce ?? -1) - (a.ce ?? -1)],
  explained: ["least explained", (a, b) => (a.explained_share ?? 2) - (b.explained_share ?? 2)],
  unattributed: ["most unattributed", (a, b) => (b.unattributed ?? -1) - (a.unattributed ?? -1)],
};

export const reported = () => {
  const now = report.value, { id, summary, stopped, texts, failed } = now;
  return html`<article class="prismlm x-audit">
    <header class="p-head">${summary ? html`${figures(summary)}${saved(id)}` : coming(now)}</header>
    ${stopped && summary ? html`<p class="p-note x-stopped">Stopped after ${count(summary.texts)} of ${count(texts)} texts; what follows is of these.</p>` : nothing}
    <div class="x-audit-whole">${guard([summary], () => (summary ? sums(summary, 10) : nothing))}</div>
    <div class="x-audit-rows">${id ? texted(now) : nothing}</div>
    ${summary ? html`<p class="p-caveat">${CAVEAT}</p>` : nothing}${failed ? problem(failed) : nothing}</article>`;
};

/** @param {Report} now */
const coming = ({ id, note, texts, rows, failed }) => html`
  <p class="p-note x-note" role="status">${failed ? "" : id ? `${count(rows.length)} of ${count(texts)} texts` : note}</p>
  <progress class="x-progress" aria-label="Texts read" max=${texts} .value=${rows.length} ?hidden=${failed}></progress>`;

/** What all texts rely on, and so many of their documents. @param {any} summary of `Audit.to_dict` @param {number} [most] */
export const sums = (summary, most = Infinity) => {
  const list = summary.documents.slice(0, most), places = list.map(({ around, ...one }) => {
    const [before, token, after] = around ?? [null, null, null];
    return { ...one, before, token, after };
  });
  const entries = list.map(({ share }, place) => ({ share, place })), left = Object.entries(summary.left_out ?? {});
  return html`${left.length ? html`<p class="p-note">Left out: ${left.map(([what, number]) => `${what}: ${count(number)}`).join(", ")}.</p>` : nothing}
    ${summary.notes.map((note) => html`<p class="p-caveat">${note}</p>`)}
    <h2>What these texts rely on</h2>
    <div class="p-columns-3">${["source", "domain", "license"].map((by) => shares(summary.shares[by], BARS))}</div>
    ${documents({ contexts: places }, entries, "Documents these texts rely on most")}`;
};

export const figures = ({ texts, predictions, ce, explained_share, shares: { source }, support, where }) => {
  const levels = Object.entries(support?.levels ?? {}).map(([level, number]) => `${number} ${level}`);
  const matching = source.items.reduce((sum, { share }) => sum + share, 0);
  return html`<div class="p-figures x-audit-figures">${figure(count(texts), "texts")}${figure(count(predictions), "predictions")}
    ${figure(ce === null ? "–" : ce.toFixed(3), "cross-entropy, nats")}
    ${figure(explained_share === null ? "–" : percent(explained_share), "explained share, median")}
    ${Object.keys(where).length ? figure(percent(matching), "matching") : nothing}
    ${figure(percent(source.unattributed), "unattributed")}${support ? figure(levels.join(", "), "texts by support") : nothing}</div>`;
};

const saved = (id) => html`<p class="x-exports">Save ${Object.entries({ html: "HTML", parquet: "Parquet", jsonl: "JSON lines", csv: "CSV" }).map(([kind, name]) =>
  html`<a href=${`/api/audits/${id}/report.${kind}`} download=${`audit.${kind}`}>${name}</a>`)}</p>`;

/** The rows of texts, in an order that can be chosen; of many the first are shown. @param {Report} now */
const texted = ({ rows, order, shown }) => {
  const left = rows.length - shown, orders = Object.entries(ORDERS).map(([value, [words]]) => /** @type {[string, string]} */ ([value, words]));
  const columns = ["text", "cross-entropy", "explained", "support", "leans on"];
  return html`<section class="x-audit-texts"><div class="x-row"><h2>Texts</h2>
      ${field("order", html`<select class="x-order" @change=${(event) => change(report, { order: event.target.value })}>${options(orders, order)}</select>`)}</div>
    <table class="x-text-table"><thead><tr>${columns.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${[...rows].sort(ORDERS[order][1]).slice(0, shown).map((row) => guard([row], () => line(row)))}</tbody></table>
    <button type="button" class="x-doc-more" ?hidden=${left <= 0}
      @click=${() => change(report, { shown: shown + SHOWN })}>Show ${Math.min(SHOWN, left)} more of ${count(left)}</button></section>`;
};

const line = (row) => {
  const { text_id, opening, tokens, ce, explained_share, support, support_score, by_source: [source], documents: [document] } = row;
  return html`<tr>
    <td class="x-opening" data-label="text"><bdi>${opening.replace(/\s+/g, " ")}${[...opening].length < OPENING ? "" : "…"}</bdi><small><bdi>${text_id}</bdi> · ${count(tokens)} tokens</small></td>
    <td class="p-number" data-label="cross-entropy">${ce === null ? "–" : ce.toFixed(3)}</td>
    <td class="p-number" data-label="explained">${explained_share === null ? "–" : percent(explained_share)}</td>
    <td class=${support ? `x-support x-support-${support}` : nothing} data-label="support">${
      support ? html`${support}<small>${support_score.toFixed(2)}</small>` : "–"}</td>
    <td data-label="leans on">${
      source ? html`<bdi>${source.key}</bdi><small>${percent(source.share)}</small>` : "–"}${document ? leaned(document) : nothing}</td></tr>`;
};

const leaned = (one) => {
  const address = links.document?.(one), words = html`<bdi>${one.title || one.doc_id}</bdi>`;
  return html`<small>${address ? html`<a href=${address}>${words}</a>` : html`<b>${words}</b>`} ${percent(one.share)}</small>`;
};
