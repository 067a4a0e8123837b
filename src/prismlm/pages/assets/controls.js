// What several views have: state that is drawn, fields of a form, marks, and messages in the place of what could not be shown.
import { html, nothing, render } from "./vendor/lit-html/lit-html.js";
import { effect } from "./vendor/signals-core/signals-core.js";

// What is not to be read out of shares.
export const CAVEAT = "Shares show which learned patterns carry a prediction and where they occur in the corpus; " +
  "they are no proof that removing a document changes the answer.";

/** Draw a template into a place, and again whenever a signal that it reads changes.
 * @param {HTMLElement} root @param {() => unknown} template @param {() => void} [after] what is done with what was drawn */
export const draw = (root, template, after) => effect(() => { render(template(), root); after?.(); });

/** Change some of what a signal holds.
 * @template T @param {import("./vendor/signals-core/signals-core.js").Signal<T>} state @param {Partial<T>} part */
export const change = (state, part) => { state.value = { ...state.value, ...part }; };

/** Facts as names and values. @param {[string, string][]} list */
export const facts = (list) => html`<dl>${list.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

/** A message of ours in the place of what could not be shown. @param {unknown} error */
export const problem = (error) => html`<p class="x-problem" role="alert">${error instanceof Error ? error.message : String(error)}</p>`;

export const field = (label, control) => html`<label class="x-field"><span>${label}</span>${control}</label>`;

/** A field of a number, read from its form: its value is that at first. */
export const numeric = (name, value, least, most, step) =>
  html`<input type="number" name=${name} value=${value} min=${least} max=${most} step=${step} required>`;

/** Choices of a select. @param {[string, string][]} list values and words @param {string} chosen */
export const options = (list, chosen) => list.map(([value, words]) => html`<option value=${value} .selected=${value === chosen}>${words}</option>`);

/** Whether a text is asked as a question; nothing where the model knows no chats. @param {any} model @param {string | undefined} chat */
export const asking = (model, chat) => (model.chat
  ? html`<label class="x-field x-asking" title="The text is put to the model as a user’s message, by its chat template">
      <input type="checkbox" name="chat" .checked=${Boolean(chat)}><span>as a question</span></label>` : nothing);

/** Texts to try: questions where they are asked as such, and there are any. @param {any} model @param {string | undefined} chat */
export const prompts = (model, chat) => (chat && Object.keys(model.questions).length ? model.questions : model.prompts);

/** Buttons that put a text of a domain in. */
export const examples = (prompts, put) => Object.entries(prompts).map(([domain, words]) =>
  html`<button type="button" class="x-example" title=${words.slice(0, 200)} @click=${(event) => put(words, event.target.form)}>${domain}</button>`);

/** A button that stays pressed. */
export const pressable = (words, pressed, press, title) =>
  html`<button type="button" title=${title ?? nothing} aria-pressed=${pressed} @click=${press}>${words}</button>`;

/** What stands in a form, by the names of its fields. @returns {any} */
export const filled = (form) => Object.fromEntries(new FormData(form));

/** A place in the explorer, as an address. @param {string} view @param {Record<string, any>} query */
export const address = (view, query) => {
  const present = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(present).toString();
  return `#/${view}${text && `?${text}`}`;
};

/** A dot in the colour that a category has on every page; grey without one. @param {string | undefined} [colour] */
export const dot = (colour) => html`<i class="x-dot" .style=${`--k: ${colour ?? "var(--grey)"}`}></i>`;

/** A figure as it is read. @param {number} x */
export const count = (x) => x.toLocaleString("en");
