// Steering: what the model writes under an edit, beside what it writes without, and under a control.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { api, events } from "./server.js";
import { address, asking, change, dot, draw, examples, field, filled, numeric, options, problem, prompts } from "./controls.js";
import { card } from "./hover.js";
import { leading, read } from "./leading.js";
import { picking } from "./pick.js";
import { edited, meaning, signedPercent } from "./edit.js";
import { result } from "./steered.js";

const STRONG = 30;

const BESIDE = "The text with the edit will stand beside the text without it: each token with its probability before and after, " +
  "and under the same change made to random prototypes.";

/** What is asked, the edit's prototype or category with what is shown of it, and what is written: `note` while it is, then `found` or `failed`.
 * @typedef {{ asked: { text: string, chat?: string, strength: string, auto?: string, generate: string, temperature: string, seed: string },
 *   prototype: number | null, category: string | null, chosen: { colour?: string, name: string, href: string } | null,
 *   abort: AbortController | null, id: string, note: string, found: any, failed: unknown }} State */
const state = signal(/** @type {State} */ ({
  asked: { text: "", strength: String(STRONG), auto: "on", generate: "20", temperature: "0", seed: "0" },
  prototype: null, category: null, chosen: null, abort: null, id: "", note: "", found: null, failed: null,
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

/** Put a prompt in. @param {string} text @param {string} [chat] */
const begin = (text, chat = state.value.asked.chat) => { change(state, { asked: { ...state.value.asked, text, chat } }); again(); };
const again = () => { const { text, chat } = state.value.asked; void read(text, Boolean(chat)); };

/** The edit that is chosen; its strength is null where it is to be found. @param {State} now */
const wanted = ({ prototype, category, asked: { strength, auto } }) => ({ prototype, category, strength: auto ? null : +strength });

/** @param {State} now @param {ReturnType<typeof picking>} field_ */
const page = (now, field_, shared) => {
  const { asked, chosen, abort, id, note, found, failed } = now, edit = wanted(now), { categories } = shared.model;
  const none = edit.prototype === null && edit.category === null;
  return html`<form class="prismlm x-form" @input=${(event) => { change(state, { asked: moved(filled(event.currentTarget), event.target.name) }); command(shared); }}
  @change=${link} @submit=${(event) => { event.preventDefault(); void steered(); }}>
  <textarea class="x-prompt" name="text" rows="2" required aria-label="Prompt" .value=${asked.text} @change=${again}
    placeholder=${asked.chat ? "Ask the model something." : "Write the beginning of a text; the model goes on."}></textarea>
  <div class="x-examples" @change=${again}>${asking(shared.model, asked.chat)}${examples(prompts(shared.model, asked.chat), (text) => { begin(text); command(shared); })}</div>
  <div class="x-row">${field_()}${categories.length ? html`<span class="p-note">or</span>
    <select aria-label="Category" @change=${(event) => void changed({ category: event.target.value || null }, shared)}>
      ${options([["", "a category"], ...categories.map(({ name }) => [name, name])], edit.category ?? "")}</select>` : nothing}
    <span class="x-chosen">${chosen ? html`${dot(chosen.colour)}<a href=${chosen.href}><bdi>${chosen.name}</bdi></a>` : nothing}</span></div>
  ${leading(edit.prototype, (prototype) => { change(state, { asked: { ...asked, strength: "-100", auto: undefined } }); void changed({ prototype }, shared); })}
  <div class="x-row">${field("strength", html`<input class="x-strength" type="range" name="strength" min="-100" max="100" step="1" .value=${asked.strength}
      aria-valuetext=${signedPercent(+asked.strength)}><output class="p-number x-percentage">${edit.strength === null ? "" : signedPercent(edit.strength)}</output>`)}
    <label class="x-field x-asking" title="The largest strength at which the text does not begin to repeat itself"><input type="checkbox" name="auto"
      .checked=${Boolean(asked.auto)}><span>as strong as the text allows</span></label></div>
  <p class="p-note" role="status">${meaning(edit)}</p>
  <div class="x-row">${field("tokens", numeric("generate", 20, 0, 256, 1))}${field("temperature", numeric("temperature", 0, 0, 10, 0.1))}
    ${field("seed", numeric("seed", 0, 0, 2 ** 31, 1))}<button type="submit" class="x-go" ?disabled=${none}>Steer</button>
    <button type="button" class="x-stop" ?hidden=${!abort || !id} @click=${() => void api(`/answers/${id}/stop`, {})}>Stop</button></div>
</form>
<div class="x-out">${failed ? problem(failed) : found ? guard([found], () => result(found)) : html`<p class="p-note">${note || BESIDE}</p>`}</div>`;
};

/** What a form holds after one of its fields was changed: a strength that was set is no longer looked for. @param {string} name */
const moved = (asked, name) => (name === "strength" ? { ...asked, auto: undefined } : asked);

/** Say the command that makes the edit. */
const command = (shared) => {
  const edit = wanted(state.value), { text, chat, generate, temperature, seed } = state.value.asked;
  const words = [...edited(edit), ...(chat ? ["--chat"] : []), "--generate", generate];
  if (+temperature) words.push("--temperature", temperature);
  if (+seed) words.push("--seed", seed);
  // The cost on held-out text takes minutes and is not part of this view.
  words.push("--heldout", 0);
  const given = [shared.model.path, text.trim() ? text : "PROMPT"];
  const dashed = given.some((one) => one.startsWith("-"));
  shared.command(["prismlm", "steer", ...(dashed ? [...words, "--", ...given] : [...given, ...words])]);
};

/** Put the edit into the address. */
const link = () => {
  const edit = wanted(state.value);
  if (edit.prototype !== null || edit.category !== null) history.replaceState(null, "", address("steer", edit));
};

/** Choose a prototype or a category, and show which.
 * @param {{ prototype?: number | null, category?: string | null }} which @param {any} shared */
const choose = async ({ prototype = null, category = null }, shared) => {
  if (prototype === null) {
    const colour = shared.model.categories.find(({ name }) => name === category)?.colour;
    change(state, { prototype, category, chosen: category === null ? null : { colour, name: category, href: address("prototypes", { category }) } });
    return;
  }
  const href = `#/prototypes/${prototype}`;
  change(state, { prototype, category: null, chosen: { name: `prototype ${prototype}`, href } });
  const one = await card(prototype).catch(() => null); // without a lens it has no card
  if (!one || state.value.prototype !== prototype) return;
  const name = one.name === `prototype ${prototype}` ? one.name : `${one.name} #${prototype}`;
  change(state, { chosen: { colour: one.colour, name, href } });
};

const changed = async (which, shared) => {
  await choose(which, shared);
  command(shared);
  link();
};

const whole = (value, least, most) => Math.max(least, Math.min(most, Math.round(Number(value)) || 0));

/** Choose what an address names. */
const open = async (query, shared) => {
  const strength = String(query.has("strength") ? whole(query.get("strength"), -100, 100) : STRONG);
  change(state, { asked: { ...state.value.asked, strength, auto: query.has("strength") ? undefined : "on" } });
  const number = query.get("prototype");
  await choose(number !== null && /^\d+$/.test(number) ? { prototype: +number } : { category: query.get("category") || null }, shared);
};

const steered = async () => {
  state.value.abort?.abort();
  const abort = new AbortController(), { text, chat, ...how } = state.value.asked, edit = wanted(state.value);
  const generate = +how.generate, { signal } = abort;
  change(state, { abort, id: "", note: "Reading…", found: null, failed: null });
  const body = { text, chat: Boolean(chat), ...edit, strength: edit.strength === null ? null : edit.strength / 100, generate, temperature: +how.temperature, seed: +how.seed };
  try {
    await events("/steer", body, signal, {
      waiting: ({ before }) => change(state, { note: `Waiting: ${before} before you.` }),
      start: ({ id }) => change(state, { id }),
      written: ({ tokens }) => change(state, { note: `Writing both texts: ${tokens} tokens${edit.strength === null ? ", and some to find the strength" : ` of ${2 * generate}`}…` }),
      done: (found) => change(state, { found }),
      error: ({ error }) => change(state, { failed: new Error(error) }),
    });
  } catch (error) {
    if (!signal.aborted) change(state, { failed: error });
  }
  if (state.value.abort === abort) change(state, { abort: null });
};
