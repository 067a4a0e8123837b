// The report of an audit: while it comes in, and after.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { documents, figure, links, percent, shares, unpacked } from "./parts.js";
import { CAVEAT, change, count, field, options, problem } from "./controls.js";

const SHOWN = 100;
const OPENING = 120; // characters that a row has of its text

/** What there is to read and what was read of it; rows of texts, in which order they stand and how many of them; and, at the end, the whole.
 * @typedef {{ id: string, note: string, predictions: number, texts: number, leftOut: string, read: number, began: number, rows: any[], order: string, shown: number,
 *   whole: any, stopped: boolean, failed: unknown }} Report */
/** @type {Report} */
export const NONE = { id: "", note: "Reading…", predictions: 1, texts: 1, leftOut: "", read: 0, began: 0, rows: [], order: "order", shown: SHOWN,
  whole: null, stopped: false, failed: null };
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
  const now = report.value, { id, whole, failed } = now;
  return html`<article class="prismlm x-audit">
    <header class="p-head">${whole ? html`${figures(whole)}${saved(id)}` : coming(now)}</header>
    <div class="x-audit-whole">${guard([whole], () => (whole ? wholly(now) : nothing))}</div>
    <div class="x-audit-rows">${id ? texted(now) : nothing}</div>
    ${whole ? html`<p class="p-caveat">${CAVEAT}</p>` : nothing}${failed ? problem(failed) : nothing}</article>`;
};

/** @param {Report} now */
const coming = ({ id, note, predictions, texts, read, began, rows, failed }) => {
  const seconds = Math.max((performance.now() - began) / 1000, 1e-3);
  const said = id ? `${count(rows.length)} of ${count(texts)} texts, ${count(Math.round(read / seconds))} tokens a second` : note;
  return html`<p class="p-note x-note" role="status">${failed ? "" : said}</p>
    <progress class="x-progress" aria-label="Predictions read" max=${Math.max(1, predictions)} .value=${read} ?hidden=${failed}></progress>`;
};

/** What all texts rely on. @param {Report} now */
const wholly = ({ whole, stopped, texts, leftOut }) => html`${stopped
  ? html`<p class="p-note x-stopped">Stopped after ${count(whole.texts)} of ${count(texts)} texts; what follows is of these.</p>` : nothing}
  ${leftOut ? html`<p class="p-note">Left out: ${leftOut}.</p>` : nothing}${whole.notes.map((note) => html`<p class="p-caveat">${note}</p>`)}
  <h2>What these texts rely on</h2>
  <div class="p-columns-3">${whole.shares.map(shares)}</div>${documents(unpacked(whole.shared), whole.documents, "Documents these texts rely on most")}`;

const figures = (all) => {
  const levels = Object.entries(all.support?.levels ?? {}).map(([level, number]) => `${number} ${level}`);
  return html`<div class="p-figures x-audit-figures">${figure(count(all.texts), "texts")}${figure(count(all.predictions), "predictions")}
    ${figure(all.ce === null ? "–" : all.ce.toFixed(3), "cross-entropy, nats")}
    ${figure(all.explained_share === null ? "–" : percent(all.explained_share), "explained share, median")}
    ${figure(percent(all.shares[0].unattributed), "unattributed")}${all.support ? figure(levels.join(", "), "texts by support") : nothing}</div>`;
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
  const { text_id, opening, tokens, ce, explained_share, support, support_score, source } = row;
  return html`<tr>
    <td class="x-opening" data-label="text"><bdi>${opening.replace(/\s+/g, " ")}${[...opening].length < OPENING ? "" : "…"}</bdi><small><bdi>${text_id}</bdi> · ${count(tokens)} tokens</small></td>
    <td class="p-number" data-label="cross-entropy">${ce === null ? "–" : ce.toFixed(3)}</td>
    <td class="p-number" data-label="explained">${explained_share === null ? "–" : percent(explained_share)}</td>
    <td class=${support ? `x-support x-support-${support}` : nothing} data-label="support">${
      support ? html`${support}<small>${support_score.toFixed(2)}</small>` : "–"}</td>
    <td data-label="leans on">${
      source ? html`<bdi>${source[0]}</bdi><small>${percent(source[1])}</small>` : "–"}${row.document ? leaned(row.document) : nothing}</td></tr>`;
};

const leaned = ([id, name, share, position]) => {
  const address = links.document?.({ doc_id: id, position }), words = html`<bdi>${name || id}</bdi>`;
  return html`<small>${address ? html`<a href=${address}>${words}</a>` : html`<b>${words}</b>`} ${percent(share)}</small>`;
};
