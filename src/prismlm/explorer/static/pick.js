// A field that finds a prototype as one types, by name, token, text or number.
import { make } from "./parts.js";
import { api } from "./server.js";
import { card } from "./hover.js";
import { dot } from "./card.js";

const TYPING = 120, SHOWN = 12;
let fields = 0;

/** A field: its parts, what was found for what is typed in it, and the option that is active (-1: none).
 * @typedef {{ id: string, input: HTMLInputElement, list: HTMLElement, picked: (id: number) => void,
 *   found: any[], active: number, typed: number, asking: number }} Field */

/** @param {(id: number) => void} picked called with the prototype that was chosen */
export const picking = (picked) => {
  const id = `x-pick-${++fields}`;
  const input = Object.assign(make("input", "x-search"), { type: "search", placeholder: "Search, or a number", autocomplete: "off" });
  const list = Object.assign(make("ul", "x-options"), { id, hidden: true });
  const attributes = { role: "combobox", "aria-label": "Prototype", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": id };
  for (const [name, value] of Object.entries(attributes)) input.setAttribute(name, value);
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Prototypes found");
  /** @type {Field} */
  const field = { id, input, list, picked, found: [], active: -1, typed: 0, asking: 0 };
  input.addEventListener("input", () => { clearTimeout(field.typed); field.typed = setTimeout(() => { void search(field); }, TYPING); });
  input.addEventListener("blur", () => open(field, false));
  input.addEventListener("focus", () => { if (input.value) void search(field); });
  input.addEventListener("keydown", (event) => keyed(field, event));
  return make("div", "x-pick", input, list);
};

/** @param {Field} field @param {boolean} yes */
const open = (field, yes) => {
  field.list.hidden = !yes;
  field.input.setAttribute("aria-expanded", String(yes));
  if (!yes) { field.active = -1; field.input.removeAttribute("aria-activedescendant"); }
};

/** Make an option active; past the last comes the first. @param {Field} field @param {number} to */
const move = (field, to) => {
  const { id, input, list, found } = field, active = field.active = (to + found.length) % found.length;
  [...list.children].forEach((node, i) => node.setAttribute("aria-selected", String(i === active)));
  input.setAttribute("aria-activedescendant", `${id}-${active}`);
  list.children[active].scrollIntoView({ block: "nearest" });
};

/** @param {Field} field */
const take = (field, one) => {
  clearTimeout(field.typed);
  field.asking += 1;
  field.input.value = "";
  open(field, false);
  field.picked(one.id);
};

/** Show what was found. @param {Field} field */
const draw = (field) => {
  const { id, list, found } = field;
  list.replaceChildren(...found.map((one, i) => {
    const node = Object.assign(make("li", "x-option", dot(one.hue), make("bdi", null, one.name),
      make("small", null, [`#${one.id}`, one.category].filter(Boolean).join(" · "))), { id: `${id}-${i}` });
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", "false");
    // Pressed, not clicked: by then the field has lost its focus and the list is gone.
    node.addEventListener("pointerdown", (event) => { event.preventDefault(); take(field, one); });
    return node;
  }));
  open(field, found.length > 0);
};

/** @param {Field} field */
const search = async (field) => {
  const own = ++field.asking, text = field.input.value.trim(), number = text.match(/^#?(\d+)$/)?.[1];
  if (!text) { open(field, false); return; }
  const asked = [api(`/prototypes?${new URLSearchParams({ query: text, limit: String(SHOWN) })}`), number ? card(number) : null];
  const [listed, exact] = await Promise.allSettled(asked);
  if (own !== field.asking) return;
  const first = exact.status === "fulfilled" && exact.value ? [exact.value] : [];
  const others = listed.status === "fulfilled" ? listed.value.items : [];
  // Without a lens there are no names, yet a number is enough.
  if (listed.status === "rejected" && number && !first.length) first.push({ id: +number, name: `prototype ${number}`, hue: 0, category: null });
  field.found = [...first, ...others.filter((one) => one.id !== first[0]?.id)];
  draw(field);
};

/** @param {Field} field @param {KeyboardEvent} event */
const keyed = (field, event) => {
  const { list, found, active } = field;
  if (event.key === "Escape") { open(field, false); return; }
  if (event.key === "Enter") {
    // Never sends the form: what is typed here is searched for.
    event.preventDefault();
    if (!list.hidden && found.length) take(field, found[Math.max(active, 0)]);
    return;
  }
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || list.hidden || !found.length) return;
  event.preventDefault();
  move(field, active < 0 && step < 0 ? -1 : active + step);
};
