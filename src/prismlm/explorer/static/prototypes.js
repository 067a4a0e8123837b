// Prototypes: found by words and category, paged through as cards in a row, with a list for quick choice.
import { make } from "./parts.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";
import { card } from "./hover.js";
import { address, dot, whole, worth } from "./card.js";

export const title = "Prototypes";
const PAGE = 60, BESIDE = 2, ROW = 46, TYPING = 120, SWIPE = 50;
const SORTS = { usage: "most used", score: "best named", name: "name", id: "number" };

/** @type {any} */
let ui = null;

export const show = async (root, at, shared) => {
  const asked = { query: at.query.get("q") ?? "", category: at.query.get("category") ?? "", sort: at.query.get("sort") ?? "usage" };
  if (!(asked.sort in SORTS)) asked.sort = "usage";
  const number = /^\d+$/.test(at.path[1] ?? "") ? +at.path[1] : null;
  // Nothing is asked for by the link in the bar: the view stays as it was left.
  if (ui && number === null && !at.query.size) { ui.tell(); await ui.link(); return; }
  ui ??= made(root, shared);
  await ui.open(asked, number);
};

const made = (root, shared) => {
  const search = Object.assign(make("input", "x-search"), { type: "search", placeholder: "Search names, tokens, texts" });
  search.setAttribute("aria-label", "Search names, tokens and texts of prototypes");
  const sort = make("select", null, ...Object.entries(SORTS).map(([value, text]) => Object.assign(make("option", null, text), { value })));
  const total = make("span", "p-note p-number");
  total.setAttribute("role", "status");
  const chips = make("div", "x-chips");
  chips.setAttribute("role", "group");
  chips.setAttribute("aria-label", "Categories");
  const room = make("div", "x-list-room"), list = make("div", "x-list", room);
  list.setAttribute("role", "group");
  list.setAttribute("aria-label", "Prototypes found");
  const stage = Object.assign(make("div", "x-stage"), { tabIndex: 0 });
  stage.setAttribute("role", "group");
  stage.setAttribute("aria-roledescription", "carousel");
  stage.setAttribute("aria-label", "Cards of prototypes; left and right arrow keys page");
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

  let asked = { query: "", category: "", sort: "usage" }, count = 0, chosen = 0, asking = 0, pages = new Map(), typed = 0;
  const cards = new Map(), rows = new Map();

  const fetched = (first, extra = {}) => {
    const given = new URLSearchParams({ ...asked, first: String(first), limit: String(PAGE), ...extra });
    return api(`/prototypes?${given}`);
  };
  /** The prototype at a place of the list; its page of the list is asked for once. */
  const item = async (place) => {
    const page = Math.floor(place / PAGE), own = pages;
    if (!own.has(page)) own.set(page, fetched(page * PAGE));
    try {
      return (await own.get(page)).items[place % PAGE];
    } catch (error) {
      own.delete(page);
      throw error;
    }
  };

  // Of the first of a search all that it found, of others the card.
  let looked = null;
  const tell = () => {
    const { query, category, sort: by } = asked;
    const words = ["prismlm", "inspect", "prototypes", shared.model.path];
    if (looked !== null && (chosen > 0 || !(query || category))) return shared.command([...words, looked]);
    if (query) words.push("--search", query);
    if (category) words.push("--category", category);
    if (by !== "usage") words.push("--sort", by);
    shared.command(words);
  };
  const link = async () => {
    const one = count ? await item(chosen) : null;
    looked = one?.id ?? null;
    if (root.isConnected) tell();
    const { query, category, sort: by } = asked;
    const to = address(one ? `prototypes/${one.id}` : "prototypes", { q: query, category, sort: by === "usage" ? "" : by });
    // Whoever went to another view meanwhile keeps that one's address.
    if (root.isConnected) history.replaceState(null, "", to);
  };

  const draw = () => {
    for (const [place, node] of cards) if (Math.abs(place - chosen) > BESIDE) { node.remove(); cards.delete(place); }
    for (let place = Math.max(0, chosen - BESIDE); place <= Math.min(count - 1, chosen + BESIDE); place++) {
      if (!cards.has(place)) {
        const node = make("article", "prismlm x-card", make("p", "p-note", "…"));
        cards.set(place, node);
        stage.append(node);
        void filled(node, place);
      }
      const node = cards.get(place);
      node.style.setProperty("--at", String(place - chosen));
      node.inert = place !== chosen;
      node.toggleAttribute("data-chosen", place === chosen);
    }
    back.disabled = chosen <= 0;
    on.disabled = chosen >= count - 1;
    where.textContent = count ? `${(chosen + 1).toLocaleString("en")} of ${count.toLocaleString("en")}` : "none found";
    rows.forEach((row, place) => row.setAttribute("aria-current", String(place === chosen)));
  };
  const filled = async (node, place) => {
    try {
      const { id } = await item(place);
      const one = await card(id);
      node.replaceChildren(...whole(one));
      node.setAttribute("aria-label", `Prototype ${id}: ${one.name}`);
    } catch (error) {
      node.replaceChildren(problem(error));
    }
  };
  const choose = (place) => {
    chosen = Math.max(0, Math.min(count - 1, place));
    const top = chosen * ROW;
    draw();
    if (top < list.scrollTop || top > list.scrollTop + list.clientHeight - ROW) list.scrollTop = top - list.clientHeight / 2 + ROW / 2;
    void link();
  };

  /** Rows that are in sight, and those near; the others are room. */
  const inSight = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
    const last = Math.min(count - 1, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 6);
    for (const [place, row] of rows) if (place < first || place > last) { row.remove(); rows.delete(place); }
    for (let place = first; place <= last; place++) {
      if (rows.has(place)) continue;
      const row = Object.assign(make("button", "x-item"), { type: "button" });
      row.style.top = `${place * ROW}px`;
      row.setAttribute("aria-current", String(place === chosen));
      row.addEventListener("click", () => choose(place));
      rows.set(place, row);
      room.append(row);
      item(place).then((one) => {
        row.append(dot(one.hue), make("span", "x-item-name", make("bdi", null, one.name)),
          make("small", null, [`#${one.id}`, one.category].filter(Boolean).join(" · ")));
        row.title = [one.name, worth(one.score)].filter(Boolean).join("; ");
      }, () => { row.textContent = "…"; });
    }
  };

  const chip = (name, number, hue) => {
    const node = Object.assign(make("button", "x-chip", hue === null ? null : dot(hue), make("bdi", null, name),
      make("span", "p-number", number.toLocaleString("en"))), { type: "button" });
    const own = hue === null ? "" : name;
    node.setAttribute("aria-pressed", String(asked.category === own));
    node.addEventListener("click", () => { void again({ category: asked.category === own ? "" : own }); });
    return node;
  };
  const drawChips = ({ matching, categories: counts }) => {
    chips.replaceChildren(...(shared.model.categories.length ? [chip("all", matching, null)] : []),
      ...shared.model.categories.map(({ name, hue }) => chip(name, counts[name] ?? 0, hue)));
  };

  /** Ask anew; the prototype that is looked at stays if it is among those found. */
  const open = async (wanted, number) => {
    const own = ++asking;
    asked = wanted;
    if (search.value !== asked.query) search.value = asked.query;
    sort.value = asked.sort;
    tell();
    try {
      const found = await fetched(0, number === null ? {} : { at: String(number) });
      if (own !== asking) return;
      if (number !== null && found.place === null) {
        if (asked.query || asked.category) return await open({ ...asked, query: "", category: "" }, number);
        throw new Error(`There is no prototype ${number}: they are numbered 0 to ${(found.total - 1).toLocaleString("en")}.`);
      }
      begin(found);
      choose(found.place ?? 0);
    } catch (error) {
      if (own !== asking) return;
      begin({ total: 0, matching: 0, items: [], categories: {} });
      draw();
      stage.replaceChildren(problem(error));
    }
  };
  const begin = (found) => {
    count = found.total;
    pages = new Map([[0, Promise.resolve(found)]]);
    stage.replaceChildren();
    room.replaceChildren();
    cards.clear();
    rows.clear();
    list.scrollTop = 0;
    room.style.height = `${count * ROW}px`;
    total.textContent = `${count.toLocaleString("en")} of ${shared.model.prototypes.toLocaleString("en")}`;
    drawChips(found);
    inSight();
  };
  const again = (change) => open({ ...asked, ...change }, null);

  search.addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => { void again({ query: search.value.trim() }); }, TYPING);
  });
  sort.addEventListener("change", () => { void again({ sort: sort.value }); });
  list.addEventListener("scroll", inSight);
  back.addEventListener("click", () => choose(chosen - 1));
  on.addEventListener("click", () => choose(chosen + 1));
  // Cards beside the one looked at take no clicks of their own, so these reach the stage.
  stage.addEventListener("click", (event) => {
    const own = cards.get(chosen)?.getBoundingClientRect();
    if (event.target !== stage || !own) return;
    if (event.clientX < own.left) choose(chosen - 1);
    else if (event.clientX > own.right) choose(chosen + 1);
  });
  let from = null;
  stage.addEventListener("pointerdown", (event) => { from = event.pointerType === "mouse" ? null : event.clientX; });
  stage.addEventListener("pointerup", (event) => {
    if (from !== null && Math.abs(event.clientX - from) > SWIPE) choose(chosen + (event.clientX < from ? 1 : -1));
    from = null;
  });
  stage.addEventListener("pointercancel", () => { from = null; });
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (!root.isConnected || event.altKey || event.ctrlKey || event.metaKey || target.closest("input, select, textarea")) return;
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: count - 1 }[event.key];
    if (to === undefined || !count) return;
    event.preventDefault();
    choose(to);
  });
  return { open, tell, link };
};
