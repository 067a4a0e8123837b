// Steering: what the model writes under an edit, beside what it writes without, and under a control.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { api, events } from "./server.js";
import { address, asking, change, dot, draw, examples, field, filled, numeric, options, problem, prompts } from "./controls.js";
import { card } from "./card.js";
import { percent, shown } from "./parts.js";
import { picking } from "./pick.js";

const STRONG = 30;

const BESIDE = "The text with the edit will stand beside the text without it: each token with its probability before and after, " +
  "and under the same change made to random prototypes.";

/** What is edited; at most one of these is not null.
 * @typedef {{ prototype: number | null, category: string | null, controller: string | null }} Target
 * @typedef {Target & { strength: number | null }} Edit strength in percent, null where it is to be found
 * The form, the target and how it is displayed, and the steered texts: a `note` while they are written, then `data` or `failed`.
 * @typedef {{ request: { text: string, chat?: string, strength: string, auto?: string, generate: string, temperature: string, seed: string },
 *   target: Target, chosen: { colour?: string, name: string, href: string } | null,
 *   abort: AbortController | null, id: string, note: string, data: any, failed: unknown }} State */
const NOTHING = { prototype: null, category: null, controller: null };
const state = signal(/** @type {State} */ ({
  request: { text: "", strength: String(STRONG), auto: "on", generate: "20", temperature: "0", seed: "0" },
  target: NOTHING, chosen: null, abort: null, id: "", note: "", data: null, failed: null,
}));
/** @type {ReturnType<typeof picking> | null} */
let pick = null;

export const show = async (root, at, shared) => {
  if (!pick) {
    const field = pick = picking((prototype) => void changed({ prototype }, shared));
    draw(root, () => page(state.value, field, shared));
    const chat = shared.model.chat ? "on" : undefined;
    begin(String(Object.values(prompts(shared.model, chat))[0] ?? ""), chat);
  }
  if (at.query.size) await open(at.query, shared);
  else link();
  command(shared);
};

/** Fill in a prompt. @param {string} text @param {string} [chat] */
const begin = (text, chat = state.value.request.chat) => { change(state, { request: { ...state.value.request, text, chat } }); again(); };
const again = () => { const { text, chat } = state.value.request; void read(text, Boolean(chat)); };

/** The edit that is chosen. @param {State} now @returns {Edit} */
const wanted = ({ target, request: { strength, auto } }) => ({ ...target, strength: auto || target.controller ? null : +strength });
/** Whether nothing is chosen. @param {Target} target */
const none = ({ prototype, category, controller }) => (prototype ?? category ?? controller) === null;

/** @param {State} now @param {ReturnType<typeof picking>} field_ */
const page = (now, field_, shared) => {
  const { request, chosen, abort, id, note, data, failed } = now, edit = wanted(now), { categories, controllers } = shared.model;
  const select = (kind, label, names) => (names.length ? html`<span class="p-note">or</span>
    <select aria-label=${label} @change=${(event) => void changed({ [kind]: event.target.value || null }, shared)}>
      ${options([["", `a ${kind}`], ...names.map((name) => /** @type {[string, string]} */ ([name, name]))], edit[kind] ?? "")}</select>` : nothing);
  return html`<form class="prismlm x-form" @input=${(event) => { change(state, { request: moved(filled(event.currentTarget), event.target.name) }); command(shared); }}
  @change=${link} @submit=${(event) => { event.preventDefault(); void steered(); }}>
  <textarea class="x-prompt" name="text" rows="2" required aria-label="Prompt" .value=${request.text} @change=${again}
    placeholder=${request.chat ? "Ask the model something." : "Write the beginning of a text; the model goes on."}></textarea>
  <div class="x-examples" @change=${again}>${asking(shared.model, request.chat)}${examples(prompts(shared.model, request.chat), (text) => { begin(text); command(shared); })}</div>
  <div class="x-row">${field_()}${select("category", "Category", categories.map(({ name }) => name))}${select("controller", "Controller", controllers)}
    <span class="x-chosen">${chosen ? html`${dot(chosen.colour)}<a href=${chosen.href}><bdi>${chosen.name}</bdi></a>` : nothing}</span></div>
  ${leading(edit.prototype, (prototype) => { change(state, { request: { ...request, strength: "-100", auto: undefined } }); void changed({ prototype }, shared); })}
  <div class="x-row">${field("strength", html`<input class="x-strength" type="range" name="strength" min="-100" max="100" step="1" .value=${request.strength}
      aria-valuetext=${signedPercent(+request.strength)}><output class="p-number x-percentage">${edit.strength === null ? "" : signedPercent(edit.strength)}</output>`)}
    <label class="x-field x-asking" title="The largest strength at which the text does not begin to repeat itself"><input type="checkbox" name="auto"
      .checked=${Boolean(request.auto)}><span>as strong as the text allows</span></label></div>
  <p class="p-note" role="status">${meaning(edit)}</p>
  <div class="x-row">${field("tokens", numeric("generate", 20, 0, 256, 1))}${field("temperature", numeric("temperature", 0, 0, 10, 0.1))}
    ${field("seed", numeric("seed", 0, 0, 2 ** 31, 1))}<button type="submit" class="x-go" ?disabled=${none(edit)}>Steer</button>
    <button type="button" class="x-stop" ?hidden=${!abort || !id} @click=${() => void api(`/answers/${id}/stop`, {})}>Stop</button></div>
</form>
<div class="x-out">${failed ? problem(failed) : data ? guard([data], () => result(data)) : html`<p class="p-note">${note || BESIDE}</p>`}</div>
${shared.model.lens ? without() : nothing}`;
};

/** What the prompt's answer would be without some documents: a `note` while it is estimated, then `data` or `failed`. */
const removal = signal(/** @type {{ note: string, data: any, failed: unknown }} */ ({ note: "", data: null, failed: null }));

const remove = async (form) => {
  const { text, chat, generate } = state.value.request;
  removal.value = { note: "Estimating…", data: null, failed: null };
  try {
    const body = { text, chat: Boolean(chat), without: [filled(form).without.trim()], generate: Math.max(1, +generate) };
    removal.value = { note: "", data: await api("/steer/without", body), failed: null };
  } catch (error) {
    removal.value = { note: "", data: null, failed: error };
  }
};

const without = () => {
  const { note, data, failed } = removal.value;
  return html`<form class="prismlm x-form x-removal" @submit=${(event) => { event.preventDefault(); void remove(event.currentTarget); }}>
    <div class="x-row">${field("or without", html`<input name="without" required placeholder="a document’s id, source=… or license=…">`)}
      <button type="submit">Estimate</button></div>
    ${failed ? problem(failed) : data ? removed(data) : html`<p class="p-note" role="status">${note || "What would the answer be, had the model never read it?"}</p>`}</form>`;
};

const removed = ({ answer, log_probability, tokens, documents, estimates, calibrated }) => html`<p><bdi>${answer}</bdi></p>
  <div class="x-scroll"><table class="x-table"><thead><tr>${["estimate", "log-probability", "90 % interval of the change", "it would begin"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
  <tbody>${estimates.map(({ method, change, low, high, text }) => html`<tr><th>${method}</th><td class="p-number">${nats(log_probability)} → ${nats(log_probability + change)}</td>
    <td class="p-number">${nats(low)} to ${nats(high)}</td><td><bdi>${text ?? "the same"}</bdi></td></tr>`)}</tbody></table></div>
  <p class="p-note">Of ${tokens} tokens, without ${documents} documents. ${calibrated ? "The intervals are calibrated on such answers of SmolLM2-135M with LoRA, by training again."
    : "The intervals are calibrated on other answers or smaller removals, of SmolLM2-135M with LoRA, and may not hold: what is known by heart may lose much more."}</p>`;

/** The form after one of its fields was changed: with a strength that was set, none is searched for. @param {string} name */
const moved = (request, name) => (name === "strength" ? { ...request, auto: undefined } : request);

/** Update the equivalent command. */
const command = (shared) => {
  const chosen = wanted(state.value), { text, chat, generate, temperature, seed } = state.value.request;
  const edit = { ...chosen, controller: chosen.controller && `${shared.model.path}/${chosen.controller}` };
  const words = [...edited(edit), ...(chat ? ["--chat"] : []), "--generate", generate];
  if (+temperature) words.push("--temperature", temperature);
  if (+seed) words.push("--seed", seed);
  // The cost on held-out text takes minutes and is not part of this view.
  words.push("--heldout", 0);
  const inputs = [shared.model.path, text.trim() ? text : "PROMPT"];
  const dashed = inputs.some((one) => one.startsWith("-"));
  shared.command(["prismlm", "steer", ...(dashed ? [...words, "--", ...inputs] : [...inputs, ...words])]);
};

/** Put the edit into the address. */
const link = () => {
  const edit = wanted(state.value);
  if (!none(edit)) history.replaceState(null, "", address("steer", edit));
};

/** Choose a prototype, a category or a controller, and show which. @param {Partial<Target>} which @param {any} shared */
const choose = async (which, shared) => {
  const target = { ...NOTHING, ...which }, { prototype, category } = target;
  if (prototype === null) {
    const colour = shared.model.categories.find(({ name }) => name === category)?.colour;
    change(state, { target, chosen: category === null ? null : { colour, name: category, href: address("prototypes", { category }) } });
    return;
  }
  const href = `#/prototypes/${prototype}`;
  change(state, { target, chosen: { name: `prototype ${prototype}`, href } });
  const one = await card(prototype).catch(() => null); // without a lens it has no card
  if (!one || state.value.target !== target) return;
  const name = one.name === `prototype ${prototype}` ? one.name : `${one.name} #${prototype}`;
  change(state, { chosen: { colour: one.colour, name, href } });
};

const changed = async (which, shared) => {
  await choose(which, shared);
  command(shared);
  link();
};

const whole = (value, least, most) => Math.max(least, Math.min(most, Math.round(Number(value)) || 0));

/** Choose the edit that an address names. */
const open = async (query, shared) => {
  const strength = String(query.has("strength") ? whole(query.get("strength"), -100, 100) : STRONG);
  change(state, { request: { ...state.value.request, strength, auto: query.has("strength") ? undefined : "on" } });
  const number = query.get("prototype");
  await choose(number !== null && /^\d+$/.test(number) ? { prototype: +number } : { category: query.get("category") || null, controller: query.get("controller") || null }, shared);
};

const steered = async () => {
  state.value.abort?.abort();
  const abort = new AbortController(), { text, chat, ...how } = state.value.request, edit = wanted(state.value);
  const generate = +how.generate, { signal } = abort;
  change(state, { abort, id: "", note: "Reading…", data: null, failed: null });
  const body = { text, chat: Boolean(chat), ...edit, strength: edit.strength === null ? null : edit.strength / 100, generate, temperature: +how.temperature, seed: +how.seed };
  try {
    await events("/steer", body, signal, {
      start: ({ id }) => change(state, { id }),
      written: ({ tokens }) => change(state, { note: `Writing both texts: ${tokens} tokens${edit.strength === null ? ", and some to find the strength" : ` of ${2 * generate}`}…` }),
      done: (data) => change(state, { data }),
      error: ({ error }) => change(state, { failed: new Error(error) }),
    });
  } catch (error) {
    if (!signal.aborted) change(state, { failed: error });
  }
  if (state.value.abort === abort) change(state, { abort: null });
};

/** @param {number} x */
const signedPercent = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x)} %`;

/** What an edit does, in one line. @param {Edit} edit */
const meaning = ({ prototype, category, controller, strength }) => {
  if (controller !== null) return "Gives each of the controller's prototypes its own scale, wherever it is active.";
  if (prototype === null && category === null) return "Choose a prototype or a category.";
  if (strength === 0) return "Changes nothing: both texts are the same.";
  const size = strength === null ? "as much as the text allows before it repeats itself" : `${Math.abs(strength)} %`;
  if (prototype === null) {
    return strength === null || strength > 0
      ? `Raises the category's own tokens that its active prototypes raise, ${strength === null ? size : `to ${size} of the unedited top logit`}.`
      : `Takes out ${strength === -100 ? "all" : size} of what the category's active prototypes give.`;
  }
  if (strength === null) return "Holds what the prototype gives to the first token of its card as high as the text allows before it repeats itself (clamp).";
  if (strength > 0) return `Holds what the prototype gives to the first token of its card at ${size} of the unedited top logit, at every position (clamp).`;
  if (strength === -100) return "Takes out all that the prototype gives, wherever it is active (ablation).";
  return `Leaves ${100 + strength} % of what the prototype gives, wherever it is active (scale).`;
};

/** The options of `prismlm steer` that make the same edit; ID stands for what is still to be chosen. @param {Edit} edit @returns {(string | number)[]} */
const edited = ({ prototype, category, controller, strength }) => {
  if (controller !== null) return ["--controller", controller];
  const which = category !== null ? ["--category", category] : ["--prototype", prototype ?? "ID"];
  if (strength === null) return which;
  if (category !== null || strength > 0) return [...which, "--strength", strength / 100];
  if (strength === -100) return [...which, "--edit", "ablate"];
  return [...which, "--edit", "scale", "--strength", (100 + strength) / 100];
};

/** The prompt, and the result of `/api/steer/leading` for it; until it comes, that of the prompt before: what stands below must not move
 * under a click that leaves the prompt. */
const offered = signal({ text: "", chat: false, data: /** @type {any} */ (null) });

/** Fetch those of a prompt. @param {string} text @param {boolean} chat whether it is asked as a question */
const read = async (text, chat) => {
  const same = () => text === offered.value.text && chat === offered.value.chat;
  if (same()) return;
  change(offered, { text, chat });
  // Errors in the prompt are shown when it is steered.
  const data = text.trim() ? await api("/steer/leading", { text, chat }).catch(() => null) : null;
  if (same()) change(offered, { data });
};

/** @param {number | null} chosen the prototype that is chosen @param {(id: number) => void} take */
const leading = (chosen, take) => {
  const { data } = offered.value;
  if (!data?.prototypes.length) return nothing;
  const [{ share: largest }] = data.prototypes;
  return html`<div class="x-offer" role="group" aria-label="Prototypes that the next token relies on most">
    <p class="p-note">Or take out what the next token, <bdi>${shown(data.token, "x-word")}</bdi> at ${percent(data.probability)}, relies on most.
      Each has its share of all that raises the token’s logit.</p>
    ${data.prototypes.map(({ id, name, colour, share }) => html`<button type="button" class="x-lead" aria-pressed=${id === chosen} @click=${() => take(id)}>
      ${dot(colour)}<bdi>${name}</bdi><span class="p-track"><span class="p-fill" .style=${`width: ${(100 * share) / largest}%`}></span></span>
      <span class="p-number">${percent(share)}</span></button>`)}</div>`;
};

const nats = (x) => `${x < 0 ? "−" : "+"}${Math.abs(x).toFixed(2)}`;

/** A sentence on the effect and its control. */
const summary = ({ change, control, draws, prompt, text, unedited }) => {
  if (change === null) return "Nothing was written: the text ends here.";
  const what = Math.abs(change) < 0.005 ? "left the tokens below as probable as they were"
    : `made the tokens below ${change > 0 ? "more" : "less"} probable`;
  const beside = control === null ? "" : `; the same change on random prototypes: ${nats(control)} (mean of ${draws} draws)`;
  const same = text === unedited && text !== prompt;
  return `${same ? "The text stays the same; on" : "On"} average the edit ${what}: ${nats(change)} in log-probability${beside}.`;
};

/** The result of `/api/steer`. */
const result = (data) => {
  const after = (text) => (text.startsWith(data.prompt) ? text.slice(data.prompt.length) : text);
  const column = (title, text) => html`<section class="x-written"><h3>${title}</h3>
    <p><bdi><span class="p-note">${data.prompt}</span><span>${after(text)}</span></bdi></p></section>`;
  return html`<article class="prismlm x-steered">
    <div class="x-sides">${column("With the edit", data.text)}${column("Without", data.unedited)}</div>
    <p class="x-summary">${[...data.cautions, summary(data)].join(" ")}</p>
    ${data.tokens.length ? table(data.tokens) : nothing}
    <p class="p-note">${data.strength === null ? "" : `Strength: ${signedPercent(Math.round(100 * data.strength))}. `}These tokens were written under
      the edit, which by itself favours them. The control gives the same change to random prototypes of equal activation: what any such push does.</p>
  </article>`;
};

const table = (tokens) => html`<div class="x-scroll"><table class="x-table">
  <thead><tr>${["token", "without → with the edit", "control", "leads"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
  <tbody>${tokens.map(row)}</tbody></table></div>`;

const bar = (share, side) => html`<span class=${`p-track ${side}`}><span class="p-fill" .style=${`width: ${100 * share}%`}></span></span>`;

const row = (token) => html`<tr><th><bdi>${shown(token.token, "x-word")}</bdi></th>
  <td><div class="x-change"><div class="x-both">${bar(token.before, "x-before")}${bar(token.after, "x-after")}</div>
    <span class="p-number">${percent(token.before)} → ${percent(token.after)}</span></div></td>
  <td class="p-number">${token.control === null ? "–" : percent(token.control)}</td>
  <td>${leads(token.leading_before, token.leading_after)}</td></tr>`;

const leads = (before, after) => {
  const one = (leading) => leading === null ? html`<span class="p-note">none</span>`
    : html`<span class="x-leads">${dot(leading.colour)}<a href=${`#/prototypes/${leading.prototype}`}>
      <bdi>${leading.name}</bdi></a></span>`;
  return after?.prototype === before?.prototype ? one(after) : [one(before), " → ", one(after)];
};
