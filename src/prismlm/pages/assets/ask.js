// Asking: a prompt, and the answer that the model writes to it, through the routes that every client of the server uses.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { api, events } from "./server.js";
import { asking, change, draw, examples, field, filled, numeric, prompts } from "./controls.js";
import { beginning } from "./begin.js";
import { live } from "./answer.js";

/** What is asked (`chat` is not there where it is a text to go on from), the answer that is shown, and the one that is being written.
 * `messages` are those of the chat that is shown, with the answer last: another question may follow.
 * @typedef {{ asked: { text: string, chat?: string, generate: string, temperature: string, seed: string },
 *   answer: ReturnType<typeof live> | null, messages: any[], abort: AbortController | null }} State */
const state = signal(/** @type {State} */ ({ asked: { text: "", generate: "40", temperature: "0.5", seed: "0" }, answer: null, messages: [], abort: null }));
let begun = false;

export const show = async (root, at, shared) => {
  if (!begun) {
    if (shared.model.chat) change(state, { asked: { ...state.value.asked, chat: "on" } });
    draw(root, () => page(state.value, shared));
  }
  begun = true;
  command(shared);
  if (at.path[1] && at.path[1] !== state.value.answer?.id()) await open(at.path[1], shared);
};

/** Show an answer that is there, whoever asked for it. @param {string} id */
const open = async (id, shared) => {
  const answer = live(shared);
  change(state, { answer, messages: [] });
  try {
    const { question, messages } = await finished(answer, id);
    change(state, { asked: { ...state.value.asked, text: question, chat: messages.length ? "on" : undefined } });
    command(shared);
  } catch (error) {
    answer.fail(error);
  }
};

/** @param {ReturnType<typeof live>} answer @param {string} id @param {AbortSignal} [signal] */
const finished = async (answer, id, signal) => {
  const data = await api(`/answers/${encodeURIComponent(id)}`, undefined, signal);
  answer.finish(data);
  if (state.value.answer !== answer) return data;
  change(state, { messages: data.messages });
  if (location.hash.startsWith("#/ask") || !location.hash) history.replaceState(null, "", `#/ask/${id}`);
  return data;
};

/** @param {any} shared @param {boolean} [followed] whether it is of more than one question, which a file has: the one that can be saved */
const command = (shared, followed) => {
  const { text, chat, generate, temperature, seed } = state.value.asked;
  const words = ["prismlm", "explain", shared.model.path, ...(followed ? ["--file", "chat.jsonl"] : [text.trim() || "TEXT"])];
  if (chat && !followed) words.push("--chat");
  if (chat || +generate) words.push("--generate", generate);
  if (+temperature) words.push("--temperature", temperature, "--seed", seed);
  shared.command(words);
};

/** @param {State} now */
const page = ({ asked, answer, messages, abort }, shared) => html`
<form id="x-ask" class="prismlm x-form" @input=${(event) => { change(state, { asked: filled(event.currentTarget) }); command(shared); }}
  @submit=${(event) => { event.preventDefault(); void write(shared, event.submitter?.name === "follow" ? messages : []); }}>
  <textarea class="x-prompt" name="text" rows="2" required aria-label="Prompt" .value=${asked.text} @keydown=${entered}
    placeholder=${asked.chat ? "Ask the model something." : "Write the beginning of a text; the model goes on."}></textarea>
  <div class="x-row">${asking(shared.model, asked.chat)}${field("tokens", numeric("generate", 40, asked.chat ? 1 : 0, 1024, 1))}${field("temperature", numeric("temperature", 0.5, 0, 10, 0.1))}
    ${field("seed", numeric("seed", 0, 0, 2 ** 31, 1))}<button type="submit" class="x-go">Ask</button>
    ${messages.length && asked.chat && !abort ? html`<button type="submit" name="follow" title="The model reads what was said before, too">Follow up</button>` : nothing}
    <button type="button" class="x-stop" ?hidden=${!abort} @click=${() => answer?.id() && api(`/answers/${answer.id()}/stop`, {})}>Stop</button></div>
  ${answer ? html`<div class="x-examples"><span class="p-note">Try</span>${examples(prompts(shared.model, asked.chat), tried(shared.model))}</div>` : nothing}
</form>
<div class="x-out">${answer?.node ?? guard([shared.model, asked.chat], () => beginning({ ...shared.model, prompts: prompts(shared.model, asked.chat) }, "x-ask", tried(shared.model)))}</div>`;

// Without questions to try they are beginnings of texts, which nobody asks.
const tried = ({ questions }) => (text, form) => {
  const { chat } = state.value.asked;
  change(state, { asked: { ...state.value.asked, text, chat: Object.keys(questions).length ? chat : undefined } });
  form.requestSubmit();
};
const entered = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
};

/** @param {any} shared @param {any[]} before messages that the question follows */
const write = async (shared, before) => {
  state.value.abort?.abort();
  const { text, chat, generate, temperature, seed } = state.value.asked;
  const abort = new AbortController(), answer = live(shared), { signal } = abort;
  change(state, { abort, answer, messages: [] });
  history.replaceState(null, "", "#/ask");
  command(shared, before.length > 0);
  const model = shared.model.name, how = { model, stream: true, max_tokens: +generate, temperature: +temperature, seed: +seed };
  let id = "";
  const chunk = ({ error, choices, ...one }) => {
    if (error) throw new Error(error.message);
    answer.write(id = one.id, (chat ? choices[0].delta.content : choices[0].text) ?? "");
  };
  try {
    if (chat) await events("/v1/chat/completions", { ...how, messages: [...before, { role: "user", content: text }] }, signal, { chunk });
    else if (+generate) await events("/v1/completions", { ...how, prompt: text }, signal, { chunk });
    else ({ id } = await api("/v1/attributions", { model, prompt: "", answer: text }, signal));
    await finished(answer, id, signal);
  } catch (error) {
    if (!signal.aborted) answer.fail(error);
  }
  if (state.value.abort === abort) change(state, { abort: null });
};
