// The card of a prototype: what it is called, which tokens it raises, and where it fires; whole, or small beside what is pointed at.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { links, origin, percent, quote, shown } from "./parts.js";
import { address, count, dot } from "./controls.js";
import { api } from "./server.js";

const SHORT = 4;

/** A token with the spaces at its ends made visible. @param {string} token */
const spaced = (token) =>
  shown(token.replaceAll("\n", "↵").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)), "x-word");

const near = (cosine) => {
  if (cosine === null) return "no text in the corpus is near it";
  const how = cosine >= 0.8 ? "very near it" : cosine >= 0.6 ? "near it" : cosine >= 0.4 ? "some way off" : "far from it";
  return `the nearest training text is ${how} (cosine ${cosine.toFixed(2)})`;
};
const used = (usage) => usage > 0 ? `used at ${percent(usage)} of positions` : "used nowhere in the corpus";
const nearest = (positions) => positions === null ? null
  : `the nearest of all at ${positions ? `${count(positions)} positions` : "no position"} of the corpus`;
/** What its name is worth, in words. @param {number | null} score */
export const worth = (score) => score === null ? null : `its name tells its passages from others in ${Math.round(100 * score)} % (50 % by chance)`;

const tokens = (list) => {
  const largest = Math.max(...list.map(([, value]) => value), 1e-9);
  return html`<ul class="x-raised">${list.map(([token, value]) => html`<li><bdi>${spaced(token)}</bdi>
    <span class="p-track"><span class="p-fill" .style=${`width: ${(100 * Math.max(value, 0)) / largest}%`}></span></span>
    <span class="p-number">${value.toFixed(2)}</span></li>`)}</ul>`;
};

const contexts = (list) => {
  if (!list.length) return html`<p class="p-note">No context in the corpus.</p>`;
  const places = (some) => some.map((place) => html`<li>${quote(place, "p-passage")}${origin(place)}</li>`);
  const rest = list.slice(SHORT);
  return html`<ol class="x-places">${places(list.slice(0, SHORT))}</ol>${rest.length
    ? html`<details class="x-rest"><summary>${rest.length} more</summary><ol class="x-places">${places(rest)}</ol></details>` : nothing}`;
};

/** Everything known of a prototype.
 * @param {any} one as `/api/prototypes/N` gives it @param {string} [here] the view that shows it */
export const whole = (one, here = "prototypes") => {
  const kind = [one.category, one.role, ...one.tags].filter(Boolean).join(" · ");
  const facts = [worth(one.score), nearest(one.positions), used(one.usage), near(one.nearest_cosine)].filter(Boolean);
  return html`
    <p class="x-kind">${dot(one.colour)}<bdi>${kind || "no category"}</bdi><span class="p-note">#${one.id}</span></p>
    <h2><bdi>${one.name}</bdi></h2>
    ${one.label_source === "embedded" && one.name.includes("→") ? html`<p class="p-note">words read last → words that come next, or that it raises where these are few or vary; in brackets what the text is about</p>` : nothing}
    ${one.description ? html`<p class="x-about"><bdi>${one.description}</bdi></p>` : nothing}
    <ul class="x-facts">${facts.map((fact) => html`<li>${fact}</li>`)}</ul>
    ${links.prototype ? html`<p class="x-actions"><a class="x-button" href=${address("steer", { prototype: one.id })}>Steer with it</a>${here === "map"
      ? html`<a class="x-button" href=${`#/prototypes/${one.id}`}>Among all</a>`
      : html`<a class="x-button" href=${address("map", { prototype: one.id })}>On the map</a>`}</p>` : nothing}
    <h3>Tokens it raises more than others do, the most distinctive first; in logits</h3>${tokens(one.tokens)}
    <h3>Where it fires: on the marked token</h3>${contexts(one.contexts)}`;
};

const WIDE = 440, EDGE = 8;
const cards = new Map();
/** A prototype's card, fetched once. @param {string | number} id */
export const card = (id) => {
  if (!cards.has(String(id))) {
    const request = api(`/prototypes/${id}`);
    request.catch(() => cards.delete(String(id)));
    cards.set(String(id), request);
  }
  return cards.get(String(id));
};

/** Store cards, so that they need not be fetched. @param {any[]} all */
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
