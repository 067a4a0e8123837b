// A field that finds a prototype as one types, by name, token, text or number.
import { make } from "./parts.js";
import { api } from "./server.js";
import { card } from "./hover.js";
import { dot } from "./card.js";

const TYPING = 120, SHOWN = 12;
let fields = 0;

/** @param {(id: number) => void} picked called with the prototype that was chosen */
export const picking = (picked) => {
  const id = `x-pick-${++fields}`;
  const input = Object.assign(make("input", "x-search"), { type: "search", placeholder: "Search, or a number", autocomplete: "off" });
  const list = Object.assign(make("ul", "x-options"), { id, hidden: true });
  const attributes = { role: "combobox", "aria-label": "Prototype", "aria-autocomplete": "list", "aria-expanded": "false", "aria-controls": id };
  for (const [name, value] of Object.entries(attributes)) input.setAttribute(name, value);
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Prototypes found");
  let found = [], active = -1, typed = 0, asking = 0;

  const open = (yes) => {
    list.hidden = !yes;
    input.setAttribute("aria-expanded", String(yes));
    if (!yes) { active = -1; input.removeAttribute("aria-activedescendant"); }
  };
  const move = (to) => {
    active = (to + found.length) % found.length;
    [...list.children].forEach((node, i) => node.setAttribute("aria-selected", String(i === active)));
    input.setAttribute("aria-activedescendant", `${id}-${active}`);
    list.children[active].scrollIntoView({ block: "nearest" });
  };
  const take = (one) => {
    clearTimeout(typed);
    asking += 1;
    input.value = "";
    open(false);
    picked(one.id);
  };
  const draw = () => {
    list.replaceChildren(...found.map((one, i) => {
      const node = Object.assign(make("li", "x-option", dot(one.hue), make("bdi", null, one.name),
        make("small", null, [`#${one.id}`, one.category].filter(Boolean).join(" · "))), { id: `${id}-${i}` });
      node.setAttribute("role", "option");
      node.setAttribute("aria-selected", "false");
      // Pressed, not clicked: by then the field has lost its focus and the list is gone.
      node.addEventListener("pointerdown", (event) => { event.preventDefault(); take(one); });
      return node;
    }));
    open(found.length > 0);
  };
  const search = async () => {
    const own = ++asking, text = input.value.trim(), number = text.match(/^#?(\d+)$/)?.[1];
    if (!text) { open(false); return; }
    const asked = [api(`/prototypes?${new URLSearchParams({ query: text, limit: String(SHOWN) })}`), number ? card(number) : null];
    const [listed, exact] = await Promise.allSettled(asked);
    if (own !== asking) return;
    const first = exact.status === "fulfilled" && exact.value ? [exact.value] : [];
    const others = listed.status === "fulfilled" ? listed.value.items : [];
    // Without a lens there are no names, yet a number is enough.
    if (listed.status === "rejected" && number && !first.length) first.push({ id: +number, name: `prototype ${number}`, hue: 0, category: null });
    found = [...first, ...others.filter((one) => one.id !== first[0]?.id)];
    draw();
  };
  input.addEventListener("input", () => { clearTimeout(typed); typed = setTimeout(search, TYPING); });
  input.addEventListener("blur", () => open(false));
  input.addEventListener("focus", () => { if (input.value) void search(); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { open(false); return; }
    if (event.key === "Enter") {
      // Never sends the form: what is typed here is searched for.
      event.preventDefault();
      if (!list.hidden && found.length) take(found[Math.max(active, 0)]);
      return;
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || list.hidden || !found.length) return;
    event.preventDefault();
    move(active < 0 && step < 0 ? -1 : active + step);
  });
  return make("div", "x-pick", input, list);
};
