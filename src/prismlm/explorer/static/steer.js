// Steering: what the model writes under an edit, beside what it writes without, and under a control.
import { make, percent, shown } from "./parts.js";
import { api, events } from "./server.js";
import { problem } from "./explorer.js";
import { card } from "./hover.js";
import { address, dot } from "./card.js";
import { picking } from "./pick.js";

export const title = "Steer";
const STRONG = 30;

/** The form, what is chosen in it, and what is being written. @type {any} */
let ui = null;

export const show = async (root, at, shared) => {
  ui ??= made(root, shared);
  if (at.query.size) await open(at.query, shared);
  else link();
  tell(shared);
};

const whole = (value, least, most) => Math.max(least, Math.min(most, Math.round(Number(value)) || 0));

/** What an edit does, in one line. */
const meaning = ({ prototype, category, strength, target }) => {
  const size = `${Math.abs(strength)} %`;
  if (prototype === null && category === null) return "Choose a prototype or a category.";
  if (strength === 0) return "Changes nothing: both texts are the same.";
  if (prototype === null) {
    const all = Math.abs(strength) === 100;
    return strength > 0
      ? `Adds ${all ? "once more" : size + " of"} what the category's prototypes give, among the 16 most active of each position.`
      : `Takes out ${all ? "all" : size} of what the category's prototypes give, among the 16 most active of each position.`;
  }
  if (strength > 0) {
    const where = target === "top" ? "the token that the unedited model puts first" : "the token that it raises most";
    return `Holds what the prototype gives to ${where} at ${size} of the unedited top logit, at every position (clamp).`;
  }
  if (strength === -100) return "Takes out all that the prototype gives, wherever it is active (ablation).";
  return `Leaves ${100 + strength} % of what the prototype gives, wherever it is active (scale).`;
};

/** The options of `prismlm steer` that make the same edit. */
const options = ({ prototype, category, strength, target }) => {
  if (prototype === null) return ["--category", category, "--strength", strength / 100];
  const which = ["--prototype", prototype];
  if (strength > 0) return [...which, "--strength", strength / 100, "--target", target];
  if (strength === -100) return [...which, "--edit", "ablate"];
  return [...which, "--edit", "scale", "--strength", (100 + strength) / 100];
};

const numeric = (value, least, most, step) =>
  Object.assign(make("input"), { type: "number", value: String(value), min: String(least), max: String(most), step: String(step), required: true });
const field = (label, ...nodes) => make("label", "x-field", make("span", null, label), ...nodes);
const choice = (...options) => make("select", null,
  ...options.map(([value, words]) => Object.assign(make("option", null, words), { value })));

const prompt = (shared) => {
  const text = Object.assign(make("textarea", "x-prompt"), { rows: 2, required: true, placeholder: "Write the beginning of a text; the model goes on." });
  text.setAttribute("aria-label", "Prompt");
  text.value = /** @type {string} */ (Object.values(shared.model.prompts)[0] ?? "");
  return text;
};

/** Buttons that put a prompt of a domain in. */
const examples = (text, shared) => make("div", "x-examples", ...Object.entries(shared.model.prompts).map(([domain, words]) => {
  const chip = Object.assign(make("button", "x-example", domain), { type: "button", title: words });
  chip.addEventListener("click", () => { text.value = words; tell(shared); });
  return chip;
}));

const made = (root, shared) => {
  const text = prompt(shared);
  const strength = Object.assign(make("input", "x-strength"), { type: "range", min: "-100", max: "100", step: "1", value: String(STRONG) });
  const percentage = make("output", "p-number x-percentage");
  const [generate, temperature, seed] = [numeric(20, 0, 256, 1), numeric(0, 0, 10, 0.1), numeric(0, 0, 2 ** 31, 1)];
  const category = choice(["", "a category"], ...shared.model.categories.map(({ name }) => [name, name]));
  category.setAttribute("aria-label", "Category");
  category.hidden = !shared.model.categories.length;
  const target = choice(["signature", "the token it raises most"], ["top", "the model's top token"]);
  const aim = field("measured at", target);
  const chosen = make("span", "x-chosen");
  const go = Object.assign(make("button", "x-go", "Steer"), { type: "submit" });
  const stop = Object.assign(make("button", "x-stop", "Stop"), { type: "button", hidden: true });
  const says = make("p", "p-note");
  says.setAttribute("role", "status");
  const out = make("div", "x-out");
  const form = make("form", "prismlm x-form", text, examples(text, shared),
    make("div", "x-row", picking((id) => { void changed({ prototype: id }, shared); }), category.hidden ? null : make("span", "p-note", "or"), category, chosen),
    make("div", "x-row", field("strength", strength, percentage), aim),
    says,
    make("div", "x-row", field("tokens", generate), field("temperature", temperature), field("seed", seed), go, stop));
  root.append(form, out);
  category.addEventListener("change", () => { void changed({ category: category.value || null }, shared); });
  for (const one of [strength, target]) one.addEventListener("change", link);
  form.addEventListener("input", () => tell(shared));
  form.addEventListener("submit", (event) => { event.preventDefault(); void steered(); });
  return { text, strength, percentage, generate, temperature, seed, category, target, aim, chosen, go, stop, says, out,
    prototype: null, kind: null, asking: null };
};

/** The edit that is chosen. */
const wanted = () => ({ prototype: ui.prototype, category: ui.kind, strength: +ui.strength.value, target: ui.target.value });

/** Say what the edit does, and the command that does it. */
const tell = (shared) => {
  const edit = wanted();
  ui.percentage.value = `${edit.strength > 0 ? "+" : edit.strength < 0 ? "−" : ""}${Math.abs(edit.strength)} %`;
  ui.strength.setAttribute("aria-valuetext", ui.percentage.value);
  ui.aim.hidden = edit.prototype === null || edit.strength <= 0;
  ui.says.textContent = meaning(edit);
  ui.go.disabled = edit.prototype === null && edit.category === null;
  if (ui.go.disabled) { shared.command(null); return; }
  const words = [...options(edit), "--generate", ui.generate.value];
  if (+ui.temperature.value) words.push("--temperature", ui.temperature.value);
  if (+ui.seed.value) words.push("--seed", ui.seed.value);
  // The cost on held-out text takes minutes and is not part of this view.
  words.push("--heldout", 0);
  const given = [shared.model.path, ui.text.value.trim() ? ui.text.value : "PROMPT"];
  const dashed = given.some((one) => one.startsWith("-"));
  shared.command(["prismlm", "steer", ...(dashed ? [...words, "--", ...given] : [...given, ...words])]);
};

/** Put the edit into the address. */
const link = () => {
  const { prototype, category, strength, target } = wanted();
  if (prototype === null && category === null) return;
  history.replaceState(null, "", address("steer", { prototype, category, strength, target: target === "signature" ? "" : target }));
};

/** Choose a prototype or a category, and show which.
 * @param {{ prototype?: number | null, category?: string | null }} which @param {any} shared */
const choose = async ({ prototype = null, category = null }, shared) => {
  Object.assign(ui, { prototype, kind: category });
  ui.category.value = category ?? "";
  const put = (hue, name, href) => ui.chosen.replaceChildren(dot(hue), Object.assign(make("a", null, make("bdi", null, name)), { href }));
  if (prototype === null) {
    const hue = shared.model.categories.find(({ name }) => name === category)?.hue ?? 0;
    if (category === null) ui.chosen.replaceChildren();
    else put(hue, category, address("prototypes", { category }));
    return;
  }
  put(0, `prototype ${prototype}`, `#/prototypes/${prototype}`);
  try {
    const one = await card(prototype);
    if (ui.prototype === prototype) put(one.hue, `${one.name} #${prototype}`, `#/prototypes/${prototype}`);
  } catch {
    // Without a lens it has no name.
  }
};

const changed = async (which, shared) => {
  await choose(which, shared);
  tell(shared);
  link();
};

/** Choose what an address names. */
const open = async (query, shared) => {
  ui.strength.value = String(query.has("strength") ? whole(query.get("strength"), -100, 100) : STRONG);
  ui.target.value = query.get("target") === "top" ? "top" : "signature";
  const number = query.get("prototype");
  await choose(number !== null && /^\d+$/.test(number) ? { prototype: +number } : { category: query.get("category") || null }, shared);
};

const steered = async () => {
  ui.asking?.abort();
  const own = ui.asking = new AbortController(), edit = wanted(), note = make("p", "p-note", "Reading…"), { out, stop } = ui;
  const how = { generate: +ui.generate.value, temperature: +ui.temperature.value, seed: +ui.seed.value };
  out.replaceChildren(note);
  try {
    await events("/steer", { text: ui.text.value, ...edit, strength: edit.strength / 100, ...how }, own.signal, {
      waiting: ({ before }) => { note.textContent = `Waiting: ${before} before you.`; },
      start: ({ id }) => {
        stop.hidden = false;
        stop.onclick = () => void api(`/answers/${id}/stop`, {});
      },
      written: ({ tokens }) => { note.textContent = `Writing both texts: ${tokens} of ${2 * how.generate} tokens…`; },
      done: (found) => out.replaceChildren(result(found)),
      error: ({ error }) => out.replaceChildren(problem(new Error(error))),
    });
  } catch (error) {
    if (!own.signal.aborted) out.replaceChildren(problem(error));
  }
  if (own === ui.asking) stop.hidden = true;
};

const nats = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(2)}`;

/** What happened in a sentence, and how far to trust it. */
const summary = ({ change, control, draws }) => {
  if (change === null) return "Nothing was written: the text ends here.";
  const what = Math.abs(change) < 0.005 ? "left the tokens below as probable as they were"
    : `made the tokens below ${change > 0 ? "more" : "less"} probable`;
  const beside = control === null ? "" : `; the same change on random prototypes: ${nats(control)} (mean of ${draws} draws)`;
  return `On average the edit ${what}: ${nats(change)} in log-probability${beside}.`;
};

const result = (found) => {
  const after = (text) => (text.startsWith(found.prompt) ? text.slice(found.prompt.length) : text);
  const column = (title, text) => make("section", "x-written", make("h3", null, title),
    make("p", null, make("bdi", null, make("span", "p-note", found.prompt), make("span", null, after(text)))));
  const left = found.tokens.filter((token) => token.left).length;
  const notes = [left ? `At ${left} of ${found.tokens.length} tokens (○) the clamp is undefined and was left out.` : null,
    "These tokens were written under the edit, which by itself favours them. The control gives the same change to random prototypes of equal activation: what any such push does."];
  return make("article", "prismlm x-steered",
    make("div", "x-sides", column("With the edit", found.text), column("Without", found.unedited)),
    make("p", "x-summary", summary(found)),
    found.tokens.length ? table(found.tokens) : null,
    make("p", "p-note", notes.filter(Boolean).join(" ")));
};

const table = (tokens) => {
  const head = make("tr", null, ...["token", "without → with the edit", "control", "leads"].map((name) => {
    const cell = make("th", null, name);
    cell.scope = "col";
    return cell;
  }));
  return make("div", "x-scroll", make("table", "x-table", make("thead", null, head), make("tbody", null, ...tokens.map(row))));
};

const row = (token) => {
  const bar = (share, classes) => {
    const fill = make("span", "p-fill");
    fill.style.width = `${100 * share}%`;
    return make("span", `p-track ${classes}`, fill);
  };
  const both = make("div", "x-both", bar(token.before, "x-before"), bar(token.after, "x-after"));
  const numbers = make("span", "p-number", `${percent(token.before)} → ${percent(token.after)}${token.left ? " ○" : ""}`);
  return make("tr", null, make("th", null, make("bdi", null, shown(token.token, "x-word"))),
    make("td", null, make("div", "x-change", both, numbers)),
    make("td", "p-number", token.control === null ? "–" : percent(token.control)),
    make("td", null, ...leads(token.leading_before, token.leading_after)));
};

const leads = (before, after) => {
  const one = (leading) => leading === null ? make("span", "p-note", "none") : make("span", "x-leads", dot(leading.hue),
    Object.assign(make("a", null, make("bdi", null, leading.name ?? `prototype ${leading.prototype}`)), { href: `#/prototypes/${leading.prototype}` }));
  if (after?.prototype === before?.prototype) return [one(after)];
  return [one(before), " → ", one(after)];
};
