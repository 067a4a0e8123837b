// Prototypes: searched by words and category, paged through as cards in a row, with a list for quick choice.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { repeat } from "./vendor/lit-html/directives/repeat.js";
import { effect, signal } from "./vendor/signals-core/signals-core.js";
import { api } from "./server.js";
import { address, change, count, dot, draw, field, options, problem } from "./controls.js";
import { card, whole, worth } from "./card.js";

const PAGE = 60, BESIDE = 2, ROW = 46, SPARE = 6, TYPING = 120;
const SORTS = { text: "most text", usage: "most used", score: "best named", name: "name", id: "number" };

/** The search and its results: `total` prototypes in a list of which `chosen` is shown, `counts` of the `matching` by category;
 * pages of the list and cards by prototype, or their errors; and the first and last visible row of the list.
 * @typedef {{ query: string, category: string, sort: string, all: boolean }} Search
 * @typedef {{ search: Search, typed: string, total: number, matching: number, counts: Record<string, number>, chosen: number, first: number, last: number,
 *   pages: Map<number, any[] | Error>, cards: Map<number, any>, failed: unknown }} State */
const NONE = { total: 0, matching: 0, items: [], categories: {} };
const state = signal(/** @type {State} */ ({ search: { query: "", category: "", sort: "text", all: false }, typed: "", total: 0, matching: 0, counts: {},
  chosen: 0, first: 0, last: -1, pages: new Map(), cards: new Map(), failed: null }));
/** The place of the view and what all views share; the number of the last search, and what waits for more letters.
 * @type {{ root: HTMLElement, shared: any } | null} */
let frame = null;
let asking = 0, waiting = 0;

export const show = async (root, at, shared) => {
  const search = { query: at.query.get("q") ?? "", category: at.query.get("category") ?? "", sort: at.query.get("sort") ?? "text", all: at.query.has("all") };
  if (!(search.sort in SORTS)) search.sort = "text";
  const number = /^\d+$/.test(at.path[1] ?? "") ? +at.path[1] : null;
  // The link in the bar has no search: the view stays as it was left.
  if (frame && number === null && !at.query.size) { link(); return; }
  if (!frame) {
    frame = { root, shared };
    draw(root, () => page(state.value, shared.model));
    effect(() => missing(state.value));
    document.addEventListener("keydown", keyed);
  }
  await open(search, number ?? (at.query.size ? null : shared.model.lens?.opening ?? null));
};

const part = (selector) => /** @type {HTMLElement} */ (frame?.root.querySelector(selector));
/** The prototype at a place of the list, once that is known. @param {State} now */
const item = ({ pages }, place) => {
  const page = pages.get(Math.floor(place / PAGE));
  return Array.isArray(page) ? page[place % PAGE] : page;
};
const places = (first, last) => Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);
/** The card that is chosen and those beside it. @param {State} now */
const shelf = ({ chosen, total }) => places(Math.max(0, chosen - BESIDE), Math.min(total - 1, chosen + BESIDE));

/** @param {State} now */
const page = (now, model) => html`
<div class="prismlm x-tools"><div class="x-row">
    <input class="x-search" type="search" placeholder="Search names, tokens, texts" aria-label="Search names, tokens and texts of prototypes"
      .value=${now.typed} @input=${(event) => typed(event.target.value)}>
    ${field("sort by", html`<select @change=${(event) => void again({ sort: event.target.value })}>${options(Object.entries(SORTS), now.search.sort)}</select>`)}
    <label><input type="checkbox" .checked=${now.search.all} @change=${(event) => void again({ all: event.target.checked })}> of few places too</label>
    <span class="p-note p-number" role="status">${count(now.total)} of ${count(model.prototypes)}</span></div>
  <div class="x-chips" role="group" aria-label="Categories">${chips(now, model.categories)}</div></div>
<div class="x-carousel">
  <div class="x-list" role="group" aria-label="Prototypes found" @scroll=${sighted}>
    <div class="x-list-room" .style=${`height: ${now.total * ROW}px`}>
      ${repeat(places(now.first, now.last), (place) => place, (place) => row(now, place))}</div></div>
  <div class="x-shelf"><div class="x-paging">
      ${turning("‹", "Previous prototype", now.chosen <= 0, -1)}
      <span class="p-number" aria-live="polite">${now.total ? `${count(now.chosen + 1)} of ${count(now.total)}` : "none found"}</span>
      ${turning("›", "Next prototype", now.chosen >= now.total - 1, 1)}</div>
    <div class="x-stage" tabindex="0" role="group" aria-roledescription="carousel" aria-label="Cards of prototypes; left and right arrow keys page">${now.failed ? problem(now.failed)
        : repeat(shelf(now), (place) => place, (place) => dealt(now, place))}</div></div>
</div>`;

const turning = (sign, label, disabled, way) => html`<button type="button" class="x-page-by" aria-label=${label} ?disabled=${disabled}
  @click=${() => choose(state.value.chosen + way)}>${sign}</button>`;

/** @param {State} now */
const chips = ({ search, matching, counts }, categories) => {
  const chip = (name, number, colour) => {
    const own = colour === null ? "" : name;
    return html`<button type="button" class="x-chip" aria-pressed=${search.category === own}
      @click=${() => void again({ category: search.category === own ? "" : own })}>${colour === null ? nothing : dot(colour)}<bdi>${name}</bdi>
      <span class="p-number">${count(number)}</span></button>`;
  };
  return categories.length ? [chip("all", matching, null), ...categories.map(({ name, colour }) => chip(name, counts[name] ?? 0, colour))] : nothing;
};

/** A row of the list. @param {State} now */
const row = (now, place) => {
  const one = item(now, place), known = one && !(one instanceof Error);
  return html`<button type="button" class="x-item" .style=${`top: ${place * ROW}px`} aria-current=${place === now.chosen} @click=${() => choose(place)}
    title=${known ? [one.name, worth(one.score)].filter(Boolean).join("; ") : nothing}>${known ? html`${dot(one.colour)}
    <span class="x-item-name"><bdi>${one.name}</bdi></span>
    <small>${[`#${one.id}`, one.category].filter(Boolean).join(" · ")}</small>` : one ? "…" : nothing}</button>`;
};

/** A card on the stage. @param {State} now */
const dealt = (now, place) => {
  const listed = item(now, place), one = listed instanceof Error ? listed : listed && now.cards.get(listed.id), chosen = place === now.chosen;
  const label = one && !(one instanceof Error) ? `Prototype ${one.id}: ${one.name}` : nothing;
  return html`<article class="prismlm x-card" .style=${`--at: ${place - now.chosen}`} ?inert=${!chosen} ?data-chosen=${chosen}
    aria-label=${label}>${guard([one], () =>
    !one ? html`<p class="p-note">…</p>` : one instanceof Error ? problem(one) : whole(one))}</article>`;
};

/** Fetch what is visible and missing; results of an earlier search are dropped. @type {Set<string>} */
const coming = new Set();
/** @param {State} now */
const missing = (now) => {
  const once = async (name, request, keep) => {
    const key = `${asking} ${name}`;
    if (coming.has(key)) return;
    coming.add(key);
    const got = await request().catch((error) => error);
    coming.delete(key);
    if (key.startsWith(`${asking} `)) keep(got);
  };
  const sight = [...places(now.first, now.last), ...shelf(now)];
  for (const number of new Set(sight.map((place) => Math.floor(place / PAGE)))) {
    if (!now.pages.has(number)) {
      void once(`page ${number}`, async () => (await fetched(now.search, number * PAGE)).items, (items) => {
        change(state, { pages: new Map(state.value.pages).set(number, items) });
        if (Math.floor(state.value.chosen / PAGE) === number) link();
      });
    }
  }
  for (const one of shelf(now).map((place) => item(now, place))) {
    if (one && !(one instanceof Error) && !now.cards.has(one.id)) {
      void once(`card ${one.id}`, () => card(one.id), (got) => change(state, { cards: new Map(state.value.cards).set(one.id, got) }));
    }
  }
};

const fetched = (search, first, extra = {}) =>
  api(`/prototypes?${new URLSearchParams({ ...search, all: String(search.all), first: String(first), limit: String(PAGE), ...extra })}`);

/** The number of the chosen prototype, once known. */
const looked = () => {
  const { total, chosen } = state.value, one = item(state.value, chosen);
  return total && !(one instanceof Error) ? one?.id : undefined;
};

/** Update the command: for the first of a search its whole list, for others the card. */
const tell = () => {
  const { search: { query, category, sort, all }, chosen } = state.value, number = looked();
  const words = ["prismlm", "inspect", "prototypes", frame?.shared.model.path];
  if (number !== undefined && (chosen > 0 || !(query || category))) { frame?.shared.command([...words, number]); return; }
  if (query) words.push("--search", query);
  if (category) words.push("--category", category);
  if (sort !== "text") words.push("--sort", sort);
  if (all) words.push("--all");
  frame?.shared.command(words);
};

/** Update address and command. */
const link = () => {
  // The user may have opened another view meanwhile.
  if (!frame?.root.isConnected) return;
  const { query, category, sort, all } = state.value.search, number = looked();
  tell();
  history.replaceState(null, "", address(number === undefined ? "prototypes" : `prototypes/${number}`, { q: query, category, sort: sort === "text" ? "" : sort, all: all ? 1 : null }));
};

/** Choose a place of the list; whatever failed is fetched again. */
const choose = (place) => {
  const { total, pages, cards } = state.value, chosen = Math.max(0, Math.min(total - 1, place)), top = chosen * ROW, list = part(".x-list");
  const came = (all) => new Map([...all].filter(([, got]) => !(got instanceof Error)));
  change(state, { chosen, pages: came(pages), cards: came(cards) });
  if (top < list.scrollTop || top > list.scrollTop + list.clientHeight - ROW) list.scrollTop = top - list.clientHeight / 2 + ROW / 2;
  link();
};

/** Draw the visible rows and a few around them; the others are empty space. */
const sighted = () => {
  const list = part(".x-list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE);
  change(state, { first, last: Math.min(state.value.total - 1, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE) });
};

/** Search; the chosen prototype stays if it is among the results.
 * @param {Search} search @param {number | null} number */
const open = async (search, number) => {
  const own = ++asking;
  change(state, { search, typed: state.value.typed.trim() === search.query ? state.value.typed : search.query });
  tell();
  try {
    const data = await fetched(search, 0, number === null ? {} : { at: String(number) });
    if (own !== asking) return;
    if (number !== null && data.place === null) {
      if (search.query || search.category || !search.all) return await open({ ...search, query: "", category: "", all: true }, number);
      throw new Error(`There is no prototype ${number}: they are numbered 0 to ${count(data.total - 1)}.`);
    }
    begin(data, null);
    choose(data.place ?? 0);
  } catch (error) {
    if (own === asking) begin(NONE, error);
  }
};
/** @param {Partial<Search>} part */
const again = (part) => open({ ...state.value.search, ...part }, null);
const typed = (text) => {
  change(state, { typed: text });
  clearTimeout(waiting);
  waiting = setTimeout(() => { void again({ query: text.trim() }); }, TYPING);
};

/** Show results from their beginning. */
const begin = ({ total, matching, items, categories }, failed) => {
  change(state, { total, matching, counts: categories, chosen: 0, first: 0, last: -1, pages: new Map([[0, items]]), failed });
  part(".x-list").scrollTop = 0;
  sighted();
};

// Cards are paged by arrow keys.
const keyed = (event) => {
  const { chosen, total } = state.value, target = /** @type {HTMLElement} */ (event.target);
  if (!frame?.root.isConnected || event.altKey || event.ctrlKey || event.metaKey || target.closest("input, select, textarea")) return;
  const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: total - 1 }[event.key];
  if (to === undefined || !total) return;
  event.preventDefault();
  choose(to);
};
