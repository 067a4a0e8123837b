// Prototypes: found by words and category, paged through as cards in a row, with a list for quick choice.
import { make } from "./parts.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";
import { card } from "./hover.js";
import { address, dot, whole, worth } from "./card.js";

export const title = "Prototypes";
const PAGE = 60, BESIDE = 2, ROW = 46, TYPING = 120, SWIPE = 50;
const SORTS = { usage: "most used", score: "best named", name: "name", id: "number" };

/** The view: its parts on the page, what is asked for, and what was found.
 * `pages` of the list are what was asked of the server, `cards` and `rows` what is drawn, by place in the list;
 * `looked` is the prototype of the chosen place, `asking` and `typed` the last search and the wait for more letters.
 * @typedef {{ query: string, category: string, sort: string }} Asked
 * @typedef {{ root: HTMLElement, search: HTMLInputElement, sort: HTMLSelectElement, total: HTMLElement, chips: HTMLElement, room: HTMLElement,
 *   list: HTMLElement, stage: HTMLElement, back: HTMLButtonElement, on: HTMLButtonElement, where: HTMLElement }} Parts
 * @typedef {Parts & { shared: any, asked: Asked, count: number, chosen: number, looked: number | null, asking: number, typed: number,
 *   pages: Map<number, Promise<any>>, cards: Map<number, HTMLElement>, rows: Map<number, HTMLElement> }} Ui */

/** @type {Ui | null} */
let kept = null;

export const show = async (root, at, shared) => {
  const asked = { query: at.query.get("q") ?? "", category: at.query.get("category") ?? "", sort: at.query.get("sort") ?? "usage" };
  if (!(asked.sort in SORTS)) asked.sort = "usage";
  const number = /^\d+$/.test(at.path[1] ?? "") ? +at.path[1] : null;
  // Nothing is asked for by the link in the bar: the view stays as it was left.
  if (kept && number === null && !at.query.size) { tell(kept); await link(kept); return; }
  kept ??= made(root, shared);
  await open(kept, asked, number);
};

const group = (node, label) => {
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", label);
  return node;
};

/** @returns {Parts} */
const parts = (root) => {
  const search = Object.assign(make("input", "x-search"), { type: "search", placeholder: "Search names, tokens, texts" });
  search.setAttribute("aria-label", "Search names, tokens and texts of prototypes");
  const sort = make("select", null, ...Object.entries(SORTS).map(([value, text]) => Object.assign(make("option", null, text), { value })));
  const total = make("span", "p-note p-number");
  total.setAttribute("role", "status");
  const chips = group(make("div", "x-chips"), "Categories");
  const room = make("div", "x-list-room"), list = group(make("div", "x-list", room), "Prototypes found");
  const stage = group(Object.assign(make("div", "x-stage"), { tabIndex: 0 }), "Cards of prototypes; left and right arrow keys page");
  stage.setAttribute("aria-roledescription", "carousel");
  const button = (text, label) => {
    const node = Object.assign(make("button", "x-page-by", text), { type: "button" });
    node.setAttribute("aria-label", label);
    return node;
  };
  const [back, on] = [button("‹", "Previous prototype"), button("›", "Next prototype")];
  const where = make("span", "p-number");
  where.setAttribute("aria-live", "polite");
  root.append(
    make("div", "prismlm x-tools", make("div", "x-row", search, make("label", "x-field", make("span", null, "sort by"), sort), total), chips),
    make("div", "x-carousel", list, make("div", "x-shelf", make("div", "x-paging", back, where, on), stage)),
  );
  return { root, search, sort, total, chips, room, list, stage, back, on, where };
};

const made = (root, shared) => {
  /** @type {Ui} */
  const ui = { ...parts(root), shared, asked: { query: "", category: "", sort: "usage" }, count: 0, chosen: 0, looked: null,
    asking: 0, typed: 0, pages: new Map(), cards: new Map(), rows: new Map() };
  const { search, sort, list, back, on } = ui;
  search.addEventListener("input", () => {
    clearTimeout(ui.typed);
    ui.typed = setTimeout(() => { void again(ui, { query: search.value.trim() }); }, TYPING);
  });
  sort.addEventListener("change", () => { void again(ui, { sort: sort.value }); });
  list.addEventListener("scroll", () => inSight(ui));
  back.addEventListener("click", () => choose(ui, ui.chosen - 1));
  on.addEventListener("click", () => choose(ui, ui.chosen + 1));
  pagedByPointer(ui);
  document.addEventListener("keydown", (event) => keyed(ui, event));
  return ui;
};

/** Cards are paged by a click beside the one looked at, and by a swipe. @param {Ui} ui */
const pagedByPointer = (ui) => {
  const { stage } = ui;
  // Cards beside the one looked at take no clicks of their own, so these reach the stage.
  stage.addEventListener("click", (event) => {
    const own = ui.cards.get(ui.chosen)?.getBoundingClientRect();
    if (event.target !== stage || !own) return;
    if (event.clientX < own.left) choose(ui, ui.chosen - 1);
    else if (event.clientX > own.right) choose(ui, ui.chosen + 1);
  });
  /** @type {number | null} */
  let from = null;
  stage.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? null : event.clientX; });
  stage.addEventListener("pointerup", (event) => {
    if (from !== null && Math.abs(event.clientX - from) > SWIPE) choose(ui, ui.chosen + (event.clientX < from ? 1 : -1));
    from = null;
  });
  stage.addEventListener("pointercancel", () => { from = null; });
};

/** @param {Ui} ui */
const keyed = (ui, event) => {
  const { root, chosen, count } = ui;
  const target = /** @type {HTMLElement} */ (event.target);
  if (!root.isConnected || event.altKey || event.ctrlKey || event.metaKey || target.closest("input, select, textarea")) return;
  const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined || !count) return;
  event.preventDefault();
  choose(ui, to);
};

const fetched = (asked, first, extra = {}) =>
  api(`/prototypes?${new URLSearchParams({ ...asked, first: String(first), limit: String(PAGE), ...extra })}`);

/** The prototype at a place of the list; its page of the list is asked for once. @param {Ui} ui */
const item = async ({ asked, pages }, place) => {
  const page = Math.floor(place / PAGE);
  if (!pages.has(page)) pages.set(page, fetched(asked, page * PAGE));
  try {
    return (await pages.get(page)).items[place % PAGE];
  } catch (error) {
    pages.delete(page);
    throw error;
  }
};

/** Say the command: of the first of a search all that it found, of others the card. @param {Ui} ui */
const tell = ({ shared, asked: { query, category, sort }, chosen, looked }) => {
  const words = ["prismlm", "inspect", "prototypes", shared.model.path];
  if (looked !== null && (chosen > 0 || !(query || category))) return shared.command([...words, looked]);
  if (query) words.push("--search", query);
  if (category) words.push("--category", category);
  if (sort !== "usage") words.push("--sort", sort);
  shared.command(words);
};

/** Put what is looked at into the address. @param {Ui} ui */
const link = async (ui) => {
  const one = ui.count ? await item(ui, ui.chosen) : null;
  ui.looked = one?.id ?? null;
  // Whoever went to another view meanwhile keeps that one's address.
  if (!ui.root.isConnected) return;
  tell(ui);
  const { query, category, sort } = ui.asked;
  history.replaceState(null, "", address(one ? `prototypes/${one.id}` : "prototypes", { q: query, category, sort: sort === "usage" ? "" : sort }));
};

/** Draw the card that is chosen and those beside it. @param {Ui} ui */
const drawCards = (ui) => {
  const { cards, count, chosen } = ui;
  for (const [place, node] of cards) if (Math.abs(place - chosen) > BESIDE) { node.remove(); cards.delete(place); }
  for (let place = Math.max(0, chosen - BESIDE); place <= Math.min(count - 1, chosen + BESIDE); place++) {
    const node = cards.get(place) ?? dealt(ui, place);
    node.style.setProperty("--at", String(place - chosen));
    node.inert = place !== chosen;
    node.toggleAttribute("data-chosen", place === chosen);
  }
  ui.back.disabled = chosen <= 0;
  ui.on.disabled = chosen >= count - 1;
  ui.where.textContent = count ? `${(chosen + 1).toLocaleString("en")} of ${count.toLocaleString("en")}` : "none found";
  ui.rows.forEach((row, place) => row.setAttribute("aria-current", String(place === chosen)));
};

/** A new card on the stage, which fills by itself. @param {Ui} ui */
const dealt = (ui, place) => {
  const node = make("article", "prismlm x-card", make("p", "p-note", "…"));
  ui.cards.set(place, node);
  ui.stage.append(node);
  void filled(ui, node, place);
  return node;
};

/** @param {Ui} ui */
const filled = async (ui, node, place) => {
  try {
    const { id } = await item(ui, place);
    const one = await card(id);
    node.replaceChildren(...whole(one));
    node.setAttribute("aria-label", `Prototype ${id}: ${one.name}`);
  } catch (error) {
    node.replaceChildren(problem(error));
  }
};

/** Look at a place of the list. @param {Ui} ui */
const choose = (ui, place) => {
  const { list } = ui;
  ui.chosen = Math.max(0, Math.min(ui.count - 1, place));
  const top = ui.chosen * ROW;
  drawCards(ui);
  if (top < list.scrollTop || top > list.scrollTop + list.clientHeight - ROW) list.scrollTop = top - list.clientHeight / 2 + ROW / 2;
  void link(ui);
};

/** Draw the rows that are in sight, and those near; the others are room. @param {Ui} ui */
const inSight = (ui) => {
  const { list, rows } = ui;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
  const last = Math.min(ui.count - 1, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 6);
  for (const [place, row] of rows) if (place < first || place > last) { row.remove(); rows.delete(place); }
  for (let place = first; place <= last; place++) if (!rows.has(place)) addRow(ui, place);
};

/** @param {Ui} ui */
const addRow = (ui, place) => {
  const row = Object.assign(make("button", "x-item"), { type: "button" });
  row.style.top = `${place * ROW}px`;
  row.setAttribute("aria-current", String(place === ui.chosen));
  row.addEventListener("click", () => choose(ui, place));
  ui.rows.set(place, row);
  ui.room.append(row);
  item(ui, place).then((one) => {
    row.append(dot(one.hue), make("span", "x-item-name", make("bdi", null, one.name)),
      make("small", null, [`#${one.id}`, one.category].filter(Boolean).join(" · ")));
    row.title = [one.name, worth(one.score)].filter(Boolean).join("; ");
  }, () => { row.textContent = "…"; });
};

/** @param {Ui} ui */
const drawChips = (ui, { matching, categories: counts }) => {
  const chip = (name, number, hue) => {
    const node = Object.assign(make("button", "x-chip", hue === null ? null : dot(hue), make("bdi", null, name),
      make("span", "p-number", number.toLocaleString("en"))), { type: "button" });
    const own = hue === null ? "" : name;
    node.setAttribute("aria-pressed", String(ui.asked.category === own));
    node.addEventListener("click", () => { void again(ui, { category: ui.asked.category === own ? "" : own }); });
    return node;
  };
  const { categories } = ui.shared.model;
  ui.chips.replaceChildren(...(categories.length ? [chip("all", matching, null)] : []),
    ...categories.map(({ name, hue }) => chip(name, counts[name] ?? 0, hue)));
};

/** Ask anew; the prototype that is looked at stays if it is among those found.
 * @param {Ui} ui @param {Asked} wanted @param {number | null} number */
const open = async (ui, wanted, number) => {
  const own = ++ui.asking;
  ui.asked = wanted;
  if (ui.search.value !== wanted.query) ui.search.value = wanted.query;
  ui.sort.value = wanted.sort;
  tell(ui);
  try {
    const found = await fetched(wanted, 0, number === null ? {} : { at: String(number) });
    if (own !== ui.asking) return;
    if (number !== null && found.place === null) {
      if (wanted.query || wanted.category) return await open(ui, { ...wanted, query: "", category: "" }, number);
      throw new Error(`There is no prototype ${number}: they are numbered 0 to ${(found.total - 1).toLocaleString("en")}.`);
    }
    begin(ui, found);
    choose(ui, found.place ?? 0);
  } catch (error) {
    if (own !== ui.asking) return;
    begin(ui, { total: 0, matching: 0, items: [], categories: {} });
    drawCards(ui);
    ui.stage.replaceChildren(problem(error));
  }
};
/** @param {Ui} ui @param {Partial<Asked>} change */
const again = (ui, change) => open(ui, { ...ui.asked, ...change }, null);

/** Show what was found, from its beginning. @param {Ui} ui */
const begin = (ui, found) => {
  ui.count = found.total;
  ui.pages = new Map([[0, Promise.resolve(found)]]);
  ui.stage.replaceChildren();
  ui.room.replaceChildren();
  ui.cards.clear();
  ui.rows.clear();
  ui.list.scrollTop = 0;
  ui.room.style.height = `${ui.count * ROW}px`;
  ui.total.textContent = `${ui.count.toLocaleString("en")} of ${ui.shared.model.prototypes.toLocaleString("en")}`;
  drawChips(ui, found);
  inSight(ui);
};
