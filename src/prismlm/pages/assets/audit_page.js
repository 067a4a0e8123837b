// An audit on a page of its own: its summary, and the texts that stand out.
import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { percent } from "./parts.js";
import { CAVEAT, count, facts } from "./controls.js";
import { figures, sums } from "./report.js";

// Characters of a text that are shown.
const OPENING = 120;
const WORDS = {
  strong: "one document of this corpus holds nearly all that the text tells",
  weak: "this corpus holds only parts of what the text tells",
  none: "no document of this corpus holds what the text tells",
};
const root = /** @type {HTMLElement} */ (document.querySelector(".p-root"));
const { summary } = JSON.parse(root.querySelector("script").textContent);

const known = ({ model, lens, corpus, window: width, where }) => /** @type {[string, string][]} */ ([
  ["model", model], ["lens", lens], ["corpus", `${count(corpus.tokens)} tokens ${corpus.share_read < 1 ? "sampled from" : "of"} ${count(corpus.documents)} documents`], ["trained on it", corpus.trained_on],
  ["shares of", "positive evidence for each token"], ["windows", `${width} tokens`],
  ...Object.entries(where).map(([column, values]) => [`only ${column}`, values.join(" or ")])]);

const CELLS = {
  score: ({ score }) => score.toFixed(2),
  share: ({ share }) => percent(share),
  source: ({ key }) => key,
  support: ({ level, off_subject }) => html`${level}<small>${off_subject ? "what holds most of the text names nothing of the question" : WORDS[level]}</small>`,
};
const table = (title, columns, rows) => {
  const text = ({ text_id, opening }) => html`${opening.replace(/\s+/g, " ").trim().slice(0, OPENING)}${opening.length > OPENING ? "…" : ""}<small>${text_id}</small>`;
  return html`<section class="p-block"><h2>${title}</h2>${rows.length ? html`<table><thead><tr>${columns.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${columns.map((name) => html`<td data-label=${name}>${(CELLS[name] ?? text)(row)}</td>`)}</tr>`)}</tbody></table>`
    : html`<p>No text was read.</p>`}</section>`;
};

const { where, support, least_supported, most_matching, least_attributed } = summary, filters = Object.entries(where);
const named = filters.map(([column, values]) => `${column} ${values.join(" or ")}`).join(" and ");
render(html`<article class="prismlm p-audit x-audit"><header class="p-head">${facts(known(summary))}${figures(summary)}</header>
  <div class="x-audit-whole">${sums(summary)}</div>
  ${support ? table("Texts with the least support", ["score", "text", "support"], least_supported) : nothing}
  ${table(filters.length ? `Texts that rely most on ${named}` : "Texts that lean on one source", ["share", "text", ...(filters.length ? [] : ["source"])], most_matching)}
  ${table("Texts with the largest unattributed share", ["share", "text"], least_attributed)}
  <p class="p-caveat">${CAVEAT}</p></article>`, root);
root.dataset.ready = "yes";
