// Ask before anything is asked: prompts to try, and the text that the lens can name.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { bar, heading } from "./parts.js";
import { count } from "./controls.js";

/** @param {any} model @param {string} form the id of the form that asks
 * @param {(text: string, form: HTMLFormElement) => void} tried called with the prompt that was chosen */
export const beginning = ({ prompts, lens }, form, tried) => html`<div class="x-begin">
  <section>${Object.keys(prompts).length ? html`<h2>Begin with one of these</h2>` : nothing}
    <div class="x-prompts">${Object.entries(prompts).map(([domain, words]) => html`<button type="button" class="x-try" form=${form}
      @click=${(event) => asked(words, event.currentTarget.form, tried)}><small><bdi>${domain}</bdi></small><bdi>${words}</bdi></button>`)}</div>
    <p class="p-note">Under each answer stands how far the corpus supports it, and the documents and passages it comes from.
      Unfolded, every token shows the prototypes that made the model write it.</p></section>
  ${lens ? held(lens) : nothing}</div>`;

// The card is gone once it was chosen: the keyboard goes on from the button that asks.
const asked = (words, form, tried) => {
  tried(words, form);
  form.querySelector(".x-go").focus({ preventScroll: true });
};

const held = ({ documents, tokens, trained_on, shares }) => html`<section class="prismlm x-held"><h2>What the answers can be traced to</h2>
  <dl>${[["documents", count(documents)], ["tokens", count(tokens)], ["trained on it", trained_on ?? "not known"]].map(([name, value]) =>
    html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  ${shares ? html`<h3>${heading[shares.by]}</h3><ul class="p-bars">${bars(shares)}</ul>` : nothing}</section>`;

const bars = ({ items, others: [number, rest] }) => {
  const largest = Math.max(...items.map(({ share }) => share));
  const one = (name, share, kind = "") => {
    const item = bar(name, share, kind), fill = /** @type {HTMLElement} */ (item.querySelector(".p-fill"));
    fill.style.width = `${(100 * Math.min(share, largest)) / largest}%`;
    return item;
  };
  return [...items.map(({ key, share }) => one(key, share)), ...(number ? [one(`${number} more`, rest, "p-rest")] : [])];
};
