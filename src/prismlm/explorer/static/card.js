// The card of a prototype: what it is called, which tokens it raises, and where it fires.
import { make, origin, percent, quote, shown } from "./parts.js";

const SHORT = 4;
/** A place in the explorer, as an address. @param {string} view @param {Record<string, any>} query */
export const address = (view, query) => {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return `#/${view}${text && `?${text}`}`;
};

/** A dot in the hue that a category has on every page. @param {number} hue */
export const dot = (hue) => {
  const node = make("i", "x-dot");
  node.style.setProperty("--h", String(hue));
  return node;
};

/** A token with the spaces at its ends made visible. @param {string} token */
export const spaced = (token) =>
  shown(token.replaceAll("\n", "↵").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)), "x-word");

const near = (cosine) => {
  if (cosine === null) return "no text in the corpus is near it";
  const how = cosine >= 0.8 ? "very near it" : cosine >= 0.6 ? "near it" : cosine >= 0.4 ? "some way off" : "far from it";
  return `the nearest training text is ${how} (cosine ${cosine.toFixed(2)})`;
};
const used = (usage) => usage > 0 ? `used at ${percent(usage)} of tokens` : "used nowhere in the corpus";
/** What its name is worth, in words. @param {number | null} score */
export const worth = (score) => score === null ? null : `name tells its passages from others: ${Math.round(100 * score)} %`;

const tokens = (list) => {
  const largest = Math.max(...list.map(([, value]) => Math.abs(value)), 1e-9);
  return make("ul", "x-raised", ...list.map(([token, value]) => {
    const fill = make("span", "p-fill");
    fill.style.width = `${(100 * Math.abs(value)) / largest}%`;
    return make("li", null, make("bdi", null, spaced(token)), make("span", "p-track", fill), make("span", "p-number", value.toFixed(2)));
  }));
};

const contexts = (list) => {
  const items = list.map((place) => make("li", null, quote(place, "p-passage"), origin(place)));
  const all = make("ol", "x-places", ...items.slice(0, SHORT));
  if (items.length <= SHORT) return [all];
  const more = Object.assign(make("button", "x-small", `${items.length - SHORT} more`), { type: "button" });
  more.addEventListener("click", () => { all.append(...items.slice(SHORT)); more.remove(); });
  return [all, more];
};

/** Everything known of a prototype.
 * @param {any} one as `/api/prototypes/N` gives it @param {string} [here] the view that shows it */
export const whole = (one, here = "prototypes") => {
  const link = (text, to, classes) => Object.assign(make("a", classes, text), { href: to });
  const kind = [one.category, one.role, ...one.tags].filter(Boolean).join(" · ");
  const facts = [worth(one.score), used(one.usage), near(one.nearest_cosine)].filter(Boolean);
  return [
    make("p", "x-kind", dot(one.hue), make("bdi", null, kind || "no category"), make("span", "p-note", `#${one.id}`)),
    make("h2", null, make("bdi", null, one.name)),
    one.description ? make("p", "x-about", make("bdi", null, one.description)) : null,
    make("ul", "x-facts", ...facts.map((fact) => make("li", null, fact))),
    make("p", "x-actions", link("Steer with it", address("steer", { prototype: one.id }), "x-button"),
      here === "map" ? link("Among all", `#/prototypes/${one.id}`, "x-button") : link("On the map", address("map", { prototype: one.id }), "x-button")),
    make("h3", null, "Tokens it raises most, in logits"), tokens(one.tokens),
    make("h3", null, "Where it fires: on the marked token"),
    ...(one.contexts.length ? contexts(one.contexts) : [make("p", "p-note", "No context in the corpus.")]),
  ].filter((node) => node !== null);
};
