// The map on a page of its own: its data stand in it, and its address says which prototype is chosen.
import { know } from "./card.js";
import { show } from "./map.js";

const root = /** @type {HTMLElement} */ (document.querySelector(".p-root"));
const { map, cards } = JSON.parse(root.querySelector("script").textContent);
const texts = cards.map(({ id, name, description, tokens, contexts }) => [`#${id} ${name} ${description ?? ""}`, ...tokens.map(([token]) => token),
  ...contexts.map(({ before, token, after }) => `${before ?? ""}${token ?? ""}${after ?? ""}`)].join(" ").toLowerCase());
const categories = map.categories.toSorted((a, b) => b.prototypes - a.prototypes);
const shared = { model: { path: "", lens: null, categories }, command: () => {}, answer: null, map: { ...map, texts } };
const follow = () => show(root, { path: ["map"], query: new URLSearchParams(location.hash.split("?")[1] ?? "") }, shared);

know(cards);
root.classList.add("x-view", "x-map");
addEventListener("hashchange", follow);
void follow();
