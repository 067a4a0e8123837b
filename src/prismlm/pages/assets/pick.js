// A field that finds a prototype as one types, by name, token, text or number.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { api } from "./server.js";
import { card } from "./card.js";
import { change, dot } from "./controls.js";

const TYPING = 120, SHOWN = 12, LIST = "x-pick";

/** The typed text, its matches, whether they are shown, and the active option (-1: none).
 * @typedef {{ text: string, matches: any[], open: boolean, active: number }} State
 * @typedef {{ picked: (id: number) => void, state: import("./vendor/signals-core/signals-core.js").Signal<State>, typed: number, latest: number }} Field */

/** Return what draws the field. @param {(id: number) => void} picked called with the prototype that was chosen */
export const picking = (picked) => {
  /** @type {Field} */
  const field = { picked, state: signal({ text: "", matches: [], open: false, active: -1 }), typed: 0, latest: 0 };
  return () => drawn(field, field.state.value);
};

/** @param {Field} field @param {State} now */
const drawn = (field, { text, matches, open, active }) => html`<div class="x-pick">
  <input class="x-search" type="search" placeholder="Search, or a number" autocomplete="off" role="combobox" aria-label="Prototype" aria-autocomplete="list"
    aria-expanded=${open} aria-controls=${LIST} aria-activedescendant=${open && active >= 0 ? `${LIST}-${active}` : nothing} .value=${text}
    @input=${(event) => typed(field, event.target.value)} @blur=${() => shut(field)} @focus=${() => text && search(field)}
    @keydown=${(event) => keyed(field, event)}>
  <ul class="x-options" id=${LIST} role="listbox" aria-label="Prototypes found" ?hidden=${!open}>${matches.map((one, i) => option(field, one, i, i === active))}</ul>
</div>`;

// Pressed, not clicked: by then the field has lost its focus and the list is gone.
const option = (field, one, i, active) => html`<li class="x-option" id=${`${LIST}-${i}`} role="option" aria-selected=${active}
  @pointerdown=${(event) => { event.preventDefault(); take(field, one); }}>${dot(one.colour)}<bdi>${one.name}</bdi>
  <small>${[`#${one.id}`, one.category].filter(Boolean).join(" · ")}</small></li>`;

/** @param {Field} field */
const shut = ({ state }) => change(state, { open: false, active: -1 });

/** @param {Field} field @param {string} text */
const typed = (field, text) => {
  change(field.state, { text });
  clearTimeout(field.typed);
  field.typed = setTimeout(() => { void search(field); }, TYPING);
};

/** @param {Field} field */
const take = (field, one) => {
  clearTimeout(field.typed);
  field.latest += 1;
  change(field.state, { text: "", open: false, active: -1 });
  field.picked(one.id);
};

/** @param {Field} field */
const search = async (field) => {
  const own = ++field.latest, text = field.state.value.text.trim(), number = text.match(/^#?(\d+)$/)?.[1];
  if (!text) { shut(field); return; }
  const requests = [api(`/prototypes?${new URLSearchParams({ query: text, limit: String(SHOWN), all: "true" })}`), number ? card(number) : null];
  const [listed, exact] = await Promise.allSettled(requests);
  if (own !== field.latest) return;
  const first = exact.status === "fulfilled" && exact.value ? [exact.value] : [];
  const others = listed.status === "fulfilled" ? listed.value.items : [];
  // Without a lens there are no names, yet a number is enough.
  if (listed.status === "rejected" && number && !first.length) first.push({ id: +number, name: `prototype ${number}`, category: null });
  const matches = [...first, ...others.filter((one) => one.id !== first[0]?.id)];
  change(field.state, { matches, open: matches.length > 0, active: -1 });
};

/** @param {Field} field @param {KeyboardEvent} event */
const keyed = (field, event) => {
  const { matches, open, active } = field.state.value;
  if (event.key === "Escape") { shut(field); return; }
  if (event.key === "Enter") {
    // Never sends the form: what is typed here is searched for.
    event.preventDefault();
    if (open) take(field, matches[Math.max(active, 0)]);
    return;
  }
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || !open) return;
  event.preventDefault();
  // Past the last comes the first.
  const to = active < 0 && step < 0 ? matches.length - 1 : (active + step + matches.length) % matches.length;
  change(field.state, { active: to });
  document.getElementById(`${LIST}-${to}`)?.scrollIntoView({ block: "nearest" });
};
