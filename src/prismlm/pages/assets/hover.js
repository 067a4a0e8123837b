// A small card beside what is pointed at: a prototype's name, its tokens and where it fires.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { quote } from "./parts.js";
import { api } from "./server.js";

const WIDE = 440, EDGE = 8;
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

/** Keep cards that need not be asked for. @param {any[]} all */
export const know = (all) => { for (const one of all) cards.set(String(one.id), Promise.resolve(one)); };

/** What is pointed at: a prototype, what is said of it, where the card stands, and, once known, what is on it.
 * @typedef {{ id: string, label: string, place: string, one: any }} Hover */

/** What is pointed at by a part of a host that its card stands over. @param {HTMLElement} near @param {HTMLElement} host @returns {Hover} */
export const pointed = (near, host) => {
  const [at, room] = [near.getBoundingClientRect(), host.getBoundingClientRect()];
  const wide = Math.min(WIDE, room.width - 2 * EDGE);
  const left = Math.max(EDGE, Math.min(room.width - wide - EDGE, at.left - room.left + at.width + EDGE));
  // Above or below the pointer, wherever the window has more room: what lies outside of it cannot be scrolled to.
  const middle = at.top + at.height / 2, below = middle < innerHeight / 2;
  // From the host's top in either case: its end moves when what stands behind a token comes.
  const side = `top: ${middle - room.top}px${below ? "" : "; transform: translateY(-100%)"}`;
  const high = (below ? innerHeight - middle : middle) - EDGE;
  return { id: near.dataset.prototype ?? "", label: near.dataset.label ?? "", place: `left: ${left}px; ${side}; max-height: ${high}px`, one: null };
};

/** @param {Hover | null} now */
export const hovering = (now) => html`<div class="x-hover prismlm" role="status" ?hidden=${!now}
  .style=${now?.place ?? ""}>${now ? html`<b>${now.label}</b>${now.one ? known(now.one) : nothing}` : nothing}</div>`;

const known = ({ category, role, tokens, contexts }) => html`<p class="p-note">${[category, role].filter(Boolean).join(" · ")}</p>
  <p class="x-tokens">${tokens.slice(0, 8).map(([token]) => html`<bdi class="x-token-chip">${token}</bdi>`)}</p>
  <ol class="p-contexts">${contexts.slice(0, 3).map((place) => html`<li>${quote(place, "p-line")}</li>`)}</ol>`;
