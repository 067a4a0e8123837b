// What an edit did: both texts, and each token before and after, beside the control.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { percent, shown } from "./parts.js";
import { dot } from "./controls.js";
import { signedPercent } from "./edit.js";

const nats = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(2)}`;

/** What happened in a sentence, and how far to trust it. */
const summary = ({ change, control, draws, prompt, text, unedited }) => {
  if (change === null) return "Nothing was written: the text ends here.";
  const what = Math.abs(change) < 0.005 ? "left the tokens below as probable as they were"
    : `made the tokens below ${change > 0 ? "more" : "less"} probable`;
  const beside = control === null ? "" : `; the same change on random prototypes: ${nats(control)} (mean of ${draws} draws)`;
  const same = text === unedited && text !== prompt;
  return `${same ? "The text stays the same; on" : "On"} average the edit ${what}: ${nats(change)} in log-probability${beside}.`;
};

/** What `/api/steer` gave. */
export const result = (found) => {
  const after = (text) => (text.startsWith(found.prompt) ? text.slice(found.prompt.length) : text);
  const column = (title, text) => html`<section class="x-written"><h3>${title}</h3>
    <p><bdi><span class="p-note">${found.prompt}</span><span>${after(text)}</span></bdi></p></section>`;
  return html`<article class="prismlm x-steered">
    <div class="x-sides">${column("With the edit", found.text)}${column("Without", found.unedited)}</div>
    <p class="x-summary">${[...found.cautions, summary(found)].join(" ")}</p>
    ${found.tokens.length ? table(found.tokens) : nothing}
    <p class="p-note">${found.strength === null ? "" : `Strength: ${signedPercent(Math.round(100 * found.strength))}. `}These tokens were written under
      the edit, which by itself favours them. The control gives the same change to random prototypes of equal activation: what any such push does.</p>
  </article>`;
};

const table = (tokens) => html`<div class="x-scroll"><table class="x-table">
  <thead><tr>${["token", "without → with the edit", "control", "leads"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
  <tbody>${tokens.map(row)}</tbody></table></div>`;

const bar = (share, side) => html`<span class=${`p-track ${side}`}><span class="p-fill" .style=${`width: ${100 * share}%`}></span></span>`;

const row = (token) => html`<tr><th><bdi>${shown(token.token, "x-word")}</bdi></th>
  <td><div class="x-change"><div class="x-both">${bar(token.before, "x-before")}${bar(token.after, "x-after")}</div>
    <span class="p-number">${percent(token.before)} → ${percent(token.after)}</span></div></td>
  <td class="p-number">${token.control === null ? "–" : percent(token.control)}</td>
  <td>${leads(token.leading_before, token.leading_after)}</td></tr>`;

const leads = (before, after) => {
  const one = (leading) => leading === null ? html`<span class="p-note">none</span>`
    : html`<span class="x-leads">${dot(leading.colour)}<a href=${`#/prototypes/${leading.prototype}`}>
      <bdi>${leading.name}</bdi></a></span>`;
  return after?.prototype === before?.prototype ? one(after) : [one(before), " → ", one(after)];
};
