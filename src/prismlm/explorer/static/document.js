// A document of the corpus, opened at the place that an answer points to.
import { make, percent } from "./parts.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";

export const title = "Document";
// Characters that a button adds.
const MORE = 100_000;
// Of a shorter one the place is in view, or nearly.
const LONG = 3000;

let asked = 0, toPlace = () => {};

export const show = async (root, at, shared) => {
  const id = at.path.slice(1).join("/");
  const position = at.query.get("at");
  shared.command(["prismlm", "sources", shared.model.path, "--doc", id || "ID"]);
  const key = JSON.stringify([id, position]);
  if (root.dataset.shown === key) {
    toPlace();
    return;
  }
  const turn = ++asked;
  root.dataset.shown = key;
  root.replaceChildren(make("p", "p-note", "Opening…"));
  if (!id) {
    root.replaceChildren(problem(new Error("no document: follow a passage of an answer to the document it is from.")));
    return;
  }
  try {
    const query = new URLSearchParams({ id, ...(position === null ? {} : { at: position }) });
    const found = await api(`/documents?${query}`);
    if (turn === asked) open(root, found);
  } catch (error) {
    if (turn !== asked) return;
    delete root.dataset.shown;
    root.replaceChildren(problem(error));
  }
};

const fact = (name, value) => make("div", null, make("dt", null, name), make("dd", null, make("bdi", null, value)));

const open = (root, found) => {
  const number = (x) => x.toLocaleString("en");
  const heading = make("h1", "x-doc-title", make("bdi", null, found.title || found.doc_id));
  const source = found.url
    ? Object.assign(make("a", null, found.url), { href: found.url, rel: "noopener noreferrer nofollow", target: "_blank" })
    : "none";
  const facts = make("dl", null, fact("id", found.doc_id), fact("source", found.source || "unknown"), fact("domain", found.domain || "unknown"),
    fact("licence", found.license || "unknown"), fact("link", source),
    fact("length", `${number(found.tokens)} tokens, ${number(found.characters)} characters`));
  const text = body(found);
  const behind = make("aside", "x-doc-behind", make("h2", null, "Prototypes it stands behind"), make("p", "p-note", "Looking…"));
  root.replaceChildren(make("article", "prismlm x-document", make("header", "p-head", heading, facts),
    make("div", "x-doc-parts", text.node, behind)));
  toPlace = text.to;
  toPlace();
  void uses(behind, found.doc_id);
};

/** The token at the place that was asked for. */
const marked = (word, at) => Object.assign(make("mark", null, word || "␣"),
  { id: "place", tabIndex: -1, title: `position ${at.toLocaleString("en")} of the corpus` });

/** A button that adds to the text, while there are characters left. */
const more = (label, left, fetched) => {
  const button = Object.assign(make("button", "x-doc-more"), { type: "button" });
  const told = () => {
    const count = left();
    button.hidden = count <= 0;
    button.textContent = `${label}: ${Math.min(MORE, count).toLocaleString("en")} of ${count.toLocaleString("en")} characters`;
  };
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await fetched();
    } catch (error) {
      button.after(problem(error));
    }
    button.disabled = false;
    told();
  });
  told();
  return button;
};

/** The text, with buttons for what is before and after the part that is shown. */
const body = (found) => {
  const [opening, token = "", rest = ""] = found.parts, word = token.trimStart();
  const mark = found.parts.length === 3 ? marked(word, found.at) : null;
  const text = make("div", "x-doc-text", opening + token.slice(0, token.length - word.length), mark, rest || null);
  text.dir = "auto";
  let { first, last } = found;
  const part = async (from, to) => (await api(`/documents/text?${new URLSearchParams({ id: found.doc_id, first: from, last: to })}`)).text;
  const before = more("Show what comes before", () => first, async () => {
    const from = Math.max(0, first - MORE);
    const added = await part(from, first);
    // What is read stays where it is.
    const height = document.documentElement.scrollHeight;
    text.prepend(added);
    text.normalize();
    first = from;
    scrollBy(0, document.documentElement.scrollHeight - height);
  });
  const after = more("Show what comes after", () => found.characters - last, async () => {
    const to = Math.min(found.characters, last + MORE);
    text.append(await part(last, to));
    text.normalize();
    last = to;
  });
  // Where the place is in view anyway, the head of the document stays so too.
  const to = () => {
    const box = mark?.getBoundingClientRect();
    if (box && (box.top < 60 || box.bottom > innerHeight - 120)) mark?.scrollIntoView({ block: "center" });
  };
  const back = mark && found.characters > LONG ? Object.assign(make("button", "x-doc-place", "To the place"), { type: "button" }) : null;
  back?.addEventListener("click", () => { to(); mark?.focus({ preventScroll: true }); });
  return { node: make("div", "x-doc-main", before, text, after, back), to };
};

const named = (one) => {
  const chip = make("span", "p-chip");
  chip.style.setProperty("--h", String(one.hue));
  const link = Object.assign(make("a", null, make("bdi", null, one.name)), { href: `#/prototypes/${one.id}` });
  return [chip, make("span", "p-name", link, make("small", null, one.category ? `${one.category} · ${one.id}` : String(one.id)))];
};

const uses = async (behind, id) => {
  try {
    const found = await api(`/documents/prototypes?${new URLSearchParams({ id })}`);
    const number = (x) => x.toLocaleString("en");
    const sections = [];
    if (found.cells) {
      sections.push(make("p", "p-note", `Its positions lie in the cells of ${number(found.in_cells)} prototypes; the fullest:`),
        make("ul", "x-doc-uses", ...found.cells.map((one) => make("li", null, ...named(one),
          make("span", "p-number", `${number(one.positions)} positions, ${percent(one.share)} of the cell`)))));
    }
    sections.push(make("p", "p-note", found.in_contexts
      ? `It is among the nearest contexts of ${number(found.in_contexts)} prototypes:`
      : "It is among the nearest contexts of none."));
    if (found.in_contexts) {
      sections.push(make("ul", "x-doc-uses", ...found.contexts.map((one) => {
        const link = Object.assign(make("a", null, `rank ${one.rank + 1}, cosine ${one.cosine.toFixed(2)}`),
          { href: `#/document/${encodeURIComponent(id)}?at=${one.position}` });
        return make("li", null, ...named(one), make("span", "p-number", link));
      })));
    }
    behind.replaceChildren(make("h2", null, "Prototypes it stands behind"), ...sections);
  } catch (error) {
    behind.replaceChildren(make("h2", null, "Prototypes it stands behind"),
      make("p", "p-note", error instanceof Error ? error.message : String(error)));
  }
};
