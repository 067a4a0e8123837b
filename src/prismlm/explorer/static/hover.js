// A small card beside what is pointed at: a prototype's name, its tokens and where it fires.
import { make, quote } from "./parts.js";
import { api } from "./server.js";

const cards = new Map();
/** A prototype's card, asked for once. @param {string | number} id */
export const card = (id) => {
  if (!cards.has(String(id))) {
    const asked = api(`/prototypes/${id}`);
    asked.catch(() => cards.delete(String(id)));
    cards.set(String(id), asked);
  }
  return cards.get(String(id));
};

export const hovering = (host) => {
  const box = make("div", "x-hover prismlm");
  box.hidden = true;
  box.setAttribute("role", "status");
  host.append(box);
  let wanted = null;
  const put = (near, ...content) => {
    box.replaceChildren(...content);
    box.hidden = false;
    const [at, room] = [near.getBoundingClientRect(), host.getBoundingClientRect()];
    box.style.left = `${Math.max(8, Math.min(room.width - box.offsetWidth - 8, at.left - room.left + at.width + 8))}px`;
    box.style.top = `${at.top - room.top + at.height / 2}px`;
  };
  const show = async (near, id, value) => {
    if (wanted === id) return;
    wanted = id;
    put(near, make("b", null, value));
    try {
      const one = await card(id);
      if (wanted !== id) return;
      const tokens = make("p", "x-tokens", ...one.tokens.slice(0, 8).map(([token]) => make("bdi", "x-token-chip", token)));
      const contexts = make("ol", "p-contexts", ...one.contexts.slice(0, 3).map((place) => make("li", null, quote(place, "p-line"))));
      put(near, make("b", null, value), make("p", "p-note", [one.category, one.role].filter(Boolean).join(" · ")), tokens, contexts);
    } catch {
      // The name stands there already.
    }
  };
  const hide = () => { wanted = null; box.hidden = true; };
  return { show, hide };
};
