// Asking: tokens come in one by one, each a column of slices that add up to its logit.
import { figure, make, panel, percent, plain, signed, unpacked, walk, wholeText, behind, against } from "./parts.js";
import { api, events } from "./server.js";
import { problem } from "./explorer.js";
import { hovering } from "./hover.js";

export const title = "Ask";
/** @type {any} */
let ui = null;

export const show = (root, at, shared) => {
  if (!ui) {
    ui = form(root, shared);
    root.append(ui.form, ui.out);
  }
  command(shared);
};

const command = (shared) => {
  const words = ["prismlm", "explain", shared.model.path, ui.text.value.trim() || "TEXT"];
  if (+ui.generate.value) words.push("--generate", ui.generate.value);
  if (+ui.temperature.value) words.push("--temperature", ui.temperature.value, "--seed", ui.seed.value);
  shared.command(words);
};

const field = (label, node) => make("label", "x-field", make("span", null, label), node);
const numeric = (value, min, max, step) =>
  Object.assign(make("input"), { type: "number", value: String(value), min: String(min), max: String(max), step: String(step), required: true });

const form = (root, shared) => {
  const text = Object.assign(make("textarea", "x-prompt"), { rows: 3, placeholder: "Write the beginning of a text; the model goes on.", required: true });
  text.setAttribute("aria-label", "Prompt");
  const [generate, temperature, seed] = [numeric(40, 0, 1024, 1), numeric(0.5, 0, 10, 0.1), numeric(0, 0, 2 ** 31, 1)];
  const go = Object.assign(make("button", "x-go", "Ask"), { type: "submit" });
  const stop = Object.assign(make("button", "x-stop", "Stop"), { type: "button", hidden: true });
  const examples = make("div", "x-examples", make("span", "p-note", "Try"), ...Object.entries(shared.model.prompts).map(([domain, prompt]) => {
    const chip = Object.assign(make("button", "x-example", domain), { type: "button", title: prompt });
    chip.addEventListener("click", () => { text.value = prompt; form.requestSubmit(); });
    return chip;
  }));
  const form = make("form", "prismlm x-form", text,
    make("div", "x-row", field("tokens", generate), field("temperature", temperature), field("seed", seed), go, stop), examples);
  const out = make("div", "x-out");
  const made = { form, text, generate, temperature, seed, go, stop, out, abort: null };
  form.addEventListener("input", () => command(shared));
  form.addEventListener("submit", (event) => { event.preventDefault(); void asked(shared); });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  return made;
};

const asked = async (shared) => {
  ui.abort?.abort();
  const abort = ui.abort = new AbortController();
  command(shared);
  const answer = live(shared);
  ui.out.replaceChildren(answer.article);
  ui.stop.hidden = false;
  ui.stop.onclick = () => answer.id && void api(`/answers/${answer.id}/stop`, {});
  const body = { text: ui.text.value, generate: +ui.generate.value, temperature: +ui.temperature.value, seed: +ui.seed.value };
  try {
    await events("/ask", body, abort.signal, {
      waiting: ({ before }) => { answer.note.textContent = `Waiting: ${before} before you.`; },
      start: ({ id, tokens }) => { answer.id = id; answer.begin(tokens); },
      step: (step) => answer.step(step),
      done: (data) => answer.finish(data),
      error: ({ error }) => answer.article.append(problem(new Error(error))),
    });
  } catch (error) {
    if (!abort.signal.aborted) answer.article.append(problem(error));
  }
  if (ui.abort === abort) ui.stop.hidden = true;
};

/** An answer while it comes in, and after. */
const live = (shared) => {
  const note = make("p", "p-note x-note", "Reading…");
  const head = make("header", "p-head", note);
  const text = make("div", "p-text");
  const columns = make("div", "x-columns");
  const key = make("div", "x-key");
  const target = make("div", "p-panel");
  const whole = make("div", "p-whole");
  columns.tabIndex = 0;
  columns.setAttribute("role", "group");
  columns.setAttribute("aria-label", "Written tokens as columns of prototypes' parts of each logit; left and right move, up and down go through the parts");
  text.setAttribute("role", "listbox");
  text.setAttribute("aria-label", "Tokens of the text; arrow keys move");
  text.setAttribute("aria-orientation", "horizontal");
  target.setAttribute("aria-live", "polite");
  const article = make("article", "prismlm x-answer", head, text, columns, key, target, whole);
  const tokens = [], bars = [], prototypes = {};
  let largest = 1, prompt = 0, began = 0, data = null, written = 0, chosen = -1, answer = "", choose = (/** @type {number} */ _) => {};
  const hover = hovering(article);

  const token = (words, classes) => {
    const node = make("span", classes, ...spelt(words));
    tokens.push(node);
    text.append(node);
    return node;
  };
  const begin = (list) => {
    note.textContent = "Writing…";
    prompt = list.length;
    began = performance.now();
    list.forEach((one) => token(one, "p-token"));
  };
  const step = (one) => {
    for (const [id, [name, category, hue]] of Object.entries(one.prototypes)) prototypes[id] = { name, category, hue };
    tint(tokens[one.position], one, prototypes);
    if (one.from === "generated") {
      written += 1;
      if (tokens.length === one.position + 1) token(one.text, "p-token p-written");
      const bar = column(one, prototypes);
      bar.addEventListener("click", () => tokens[one.position].focus());
      bars.push([bar, one]);
      const reach = one.uses.reduce((sum, use) => sum + Math.max(0, use[1]), Math.max(0, one.residual) + Math.max(0, one.bias));
      columns.append(bar);
      if (reach > largest) { largest = reach; columns.style.setProperty("--largest", String(largest)); }
      columns.scrollLeft = columns.scrollWidth;
    }
    const seconds = (performance.now() - began) / 1000;
    note.textContent = written ? `Writing… ${written} tokens, ${(written / Math.max(seconds, 1e-3)).toFixed(1)} a second` : "Reading…";
  };
  const finish = ({ id, trace, shared: pool, support }) => {
    answer = id;
    data = { ...trace, ...unpacked(pool) };
    shared.answer = { id, data };
    const facts = [["predictions", data.steps.length.toLocaleString("en")], ["written", String(written)]];
    if (support) facts.push(["support", support.level]);
    const list = make("dl", null, ...facts.map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, value))));
    head.replaceChildren(list, exports(id));
    // A text that was only read comes as a whole: its steps are not told one by one.
    data.steps.forEach((one, i) => tint(tokens[i], flat(one), data.prototypes, one));
    const read = tokens.slice(0, data.steps.length);
    read.forEach((node, i) => Object.assign(node, { tabIndex: -1 }).setAttribute("role", "option") ?? node.setAttribute("aria-selected", "false"));
    tokens.slice(data.steps.length).forEach((node) => node.setAttribute("role", "presentation"));
    if (!bars.length) data.steps.forEach((one, i) => {
      const bar = column(flat(one), data.prototypes);
      bar.addEventListener("click", () => tokens[i].focus());
      columns.append(bar);
      bars.push([bar, one]);
    });
    key.append(legend(bars.map(([, one]) => flat(one)), data.prototypes));
    if (data.whole) whole.append(...wholeText(data));
    whole.append(make("p", "p-note", "Shares show which learned patterns carry a prediction and where they occur in the corpus; they are no proof that removing a document changes the answer."));
    choose = walk(text, read, (number) => {
      if (number === chosen) return;
      chosen = number;
      read.forEach((node, i) => node.setAttribute("aria-selected", String(i === number)));
      bars.forEach(([bar, one]) => bar.toggleAttribute("data-chosen", one.position === number));
      target.replaceChildren(panel(data, data.steps[number]), aside(number));
    });
  };
  const asides = new Map();
  const aside = (number) => {
    if (!asides.has(number)) {
      const box = make("div", "p-aside", make("p", "p-note", "Looking through the training text…"));
      asides.set(number, box);
      void fill(number, box);
    }
    return asides.get(number);
  };
  // What stands behind a step is asked for once it is looked at.
  const fill = async (number, box) => {
    if (!shared.model.lens) return box.replaceWith(behind(data, { shares: [] }));
    try {
      const found = await api(`/answers/${answer}/steps/${number}`);
      box.replaceChildren(...behind({ ...data, ...unpacked(found.shared) }, found).childNodes);
      if (shared.model.lens.cells && shared.model.lens.corpus) box.append(opposing(number));
    } catch (error) {
      box.replaceChildren(problem(error));
    }
  };
  const opposing = (number) => {
    const button = Object.assign(make("button", "x-more", "What speaks against it"), { type: "button" });
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        const found = await api(`/answers/${answer}/steps/${number}/against`);
        button.replaceWith(against({ ...data, ...unpacked(found.shared) }, found.against));
      } catch (error) {
        button.replaceWith(problem(error));
      }
    });
    return button;
  };
  columns.addEventListener("pointerover", (event) => {
    const slice = /** @type {HTMLElement | null} */ (/** @type {HTMLElement} */ (event.target).closest("[data-prototype]"));
    if (slice) hover.show(slice, slice.dataset.prototype, slice.dataset.label);
  });
  columns.addEventListener("pointerleave", () => hover.hide());
  // By keyboard: left and right along the tokens, up and down through a column's slices.
  let slice = -1;
  columns.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (event.key === "Escape") hover.hide();
    if (!way || !data || !bars.length) return;
    event.preventDefault();
    const at = Math.max(0, bars.findIndex(([, one]) => one.position === chosen));
    const to = Math.max(0, Math.min(bars.length - 1, at + way[0]));
    if (way[0]) { slice = -1; hover.hide(); choose(bars[to][1].position); }
    const slices = /** @type {HTMLElement[]} */ ([...bars[to][0].querySelectorAll("[data-prototype]")]);
    if (way[1] && slices.length) {
      slice = Math.max(0, Math.min(slices.length - 1, slice + way[1]));
      void hover.show(slices[slice], slices[slice].dataset.prototype, slices[slice].dataset.label);
    }
    bars[to][0].scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  return { article, note, begin, step, finish, id: "" };
};

const exports = (id) => make("p", "x-exports", "Save ", ...["html", "json", "parquet"].map((kind) =>
  Object.assign(make("a", null, kind.toUpperCase()), { href: `/api/answers/${id}/report.${kind}`, download: `answer.${kind}` })));

// A step of a finished trace in the form of one that is told: id and contribution alone.
const flat = (one) => (Array.isArray(one.bias) ? { ...one, bias: one.bias[0], residual: one.residual[0] } : one);

const spelt = (text) => text.split("\n").flatMap((part, i) => (i ? [make("i", "p-return", "↵"), "\n", part] : [part]));

const tint = (node, one, prototypes, full) => {
  const leading = one.uses.reduce((best, use) => (!best || (use[2] ?? use[1]) > (best[2] ?? best[1]) ? use : best), null);
  node.style.setProperty("--h", String(leading ? prototypes[leading[0]].hue : 0));
  node.style.setProperty("--a", Math.max(0, Math.min(1, one.explained)).toFixed(2));
  const name = leading ? prototypes[leading[0]].name : "none in use";
  const label = `${one.token}, then ${one.target} at ${percent(one.probability)}; leading prototype: ${name}; explained ${percent(one.explained)}`;
  node.setAttribute("aria-label", label);
  if (full) node.title = label;
};

// Slices of one category stand together, the weightiest category first: bands that can be seen.
const banded = (uses, prototypes) => {
  const weights = new Map();
  for (const [id, value] of uses) {
    const { category } = prototypes[id];
    weights.set(category, (weights.get(category) ?? 0) + Math.abs(value));
  }
  const order = ([id, value]) => [-(weights.get(prototypes[id].category) ?? 0), -value];
  return [...uses].sort((a, b) => {
    const [[first, second], [third, fourth]] = [order(a), order(b)];
    return first - third || second - fourth;
  });
};

const column = (one, prototypes) => {
  const parts = banded(one.uses, prototypes).map(([id, value]) => ({ value, id, ...prototypes[id], kind: "x-slice" }));
  parts.push({ value: one.residual, name: "residual", kind: "x-slice x-residual" });
  if (one.bias) parts.push({ value: one.bias, name: "bias", kind: "x-slice x-residual" });
  const slices = (list, classes) => make("span", classes, ...list.map((part, i) => {
    const node = make("span", i && list[i - 1].category !== part.category ? `${part.kind} x-next-band` : part.kind);
    node.style.setProperty("--v", String(Math.abs(part.value)));
    node.style.setProperty("--h", String(part.hue ?? 0));
    const label = `${part.name}: ${signed(part.value)}`;
    if (part.id === undefined) node.title = label;
    else Object.assign(node.dataset, { prototype: part.id, label });
    return node;
  }));
  const node = Object.assign(make("button", "x-column", slices(parts.filter((p) => p.value > 0), "x-up"),
    slices(parts.filter((p) => p.value < 0), "x-down"), make("span", "x-token", make("bdi", null, one.target))), { type: "button" });
  const largest = [...parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 3);
  node.setAttribute("aria-label", `${one.target}: logit ${plain(one.logit)}, of ${parts.length} parts the largest ${largest.map((p) => `${p.name} ${signed(p.value)}`).join(", ")}`);
  node.tabIndex = -1;
  return node;
};

// What colours mean: the categories of an answer, by what they carry of it.
const legend = (steps, prototypes) => {
  const sums = new Map();
  for (const one of steps) for (const [id, value] of one.uses) {
    const { category, hue } = prototypes[id];
    const name = category || "no category";
    const known = sums.get(name) ?? { hue, value: 0 };
    sums.set(name, { hue: known.hue, value: known.value + Math.max(0, value) });
  }
  const all = [...sums.values()].reduce((sum, one) => sum + one.value, 0) || 1;
  const keys = [...sums].sort((a, b) => b[1].value - a[1].value).map(([name, { hue, value }]) => {
    const dot = make("i", "x-dot");
    dot.style.setProperty("--h", String(hue));
    return make("li", null, dot, name, make("span", "p-number", percent(value / all)));
  });
  return make("ul", "x-legend", ...keys, make("li", null, make("i", "x-dot x-residual"), "residual: what no prototype says"));
};
