// Asking: a prompt, and the answer that the model writes to it, through the routes that every client of the server uses.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { api, events } from "./server.js";
import { bar, heading } from "./parts.js";
import { asking, change, count, draw, examples, facts, field, filled, numeric, prompts } from "./controls.js";
import { live } from "./answer.js";

/** The form (without `chat`, its text is to be continued), the current answer, and the request under way.
 * `messages` are the chat up to the answer, which comes last, for a follow-up question.
 * @typedef {{ request: { text: string, chat?: string, generate: string, temperature: string, seed: string },
 *   answer: ReturnType<typeof live> | null, messages: any[], command: (string | number)[] | null, abort: AbortController | null }} State */
const state = signal(/** @type {State} */ ({ request: { text: "", generate: "40", temperature: "0.5", seed: "0" }, answer: null, messages: [], command: null, abort: null }));
let begun = false;

export const show = async (root, at, shared) => {
  if (!begun) {
    if (shared.model.chat) change(state, { request: { ...state.value.request, chat: "on" } });
    draw(root, () => page(state.value, shared));
    command(shared);
  }
  begun = true;
  shared.command(state.value.command);
  const id = state.value.answer?.id();
  if (at.path[1] && at.path[1] !== id) await open(at.path[1], shared);
  else if (id && id === shared.answer?.id) history.replaceState(null, "", `#/ask/${id}`);
};

/** Show an existing answer, whoever requested it; its command is unknown. @param {string} id */
const open = async (id, shared) => {
  command(shared, false);
  const question = await showAnswer(shared, () => id);
  if (question) change(state, { request: { ...state.value.request, text: question.text, chat: question.messages.length ? "on" : undefined } });
};

/** Replace the answer by the one whose id `work` returns; return its question, undefined if that failed.
 * @param {any} shared @param {(answer: ReturnType<typeof live>, signal: AbortSignal) => string | Promise<string>} work */
const showAnswer = async (shared, work) => {
  state.value.abort?.abort();
  const abort = new AbortController(), answer = live(shared), { signal } = abort;
  let question;
  change(state, { abort, answer, messages: [] });
  try {
    const id = await work(answer, signal), path = `/answers/${encodeURIComponent(id)}`;
    const [data, asked] = await Promise.all([api(path, undefined, signal), api(`${path}/asked`, undefined, signal)]);
    answer.finish(data);
    change(state, { messages: asked.messages });
    if (location.hash.startsWith("#/ask") || !location.hash) history.replaceState(null, "", `#/ask/${id}`);
    question = asked;
  } catch (error) {
    answer.fail(signal.aborted ? new Error("Stopped before there was an answer.") : error);
  }
  if (state.value.abort === abort) change(state, { abort: null });
  return question;
};

/** End the answer after its current token, or cancel it if it has not begun. @param {State} now */
const stop = ({ answer, abort }) => {
  if (answer?.id()) api(`/answers/${answer.id()}/stop`, {}).catch(() => abort?.abort());
  else abort?.abort();
};

/** Update the equivalent command. @param {any} shared @param {boolean} [known] not after more than one question, or of an answer that others asked for */
const command = (shared, known = true) => {
  const { text, chat, generate, temperature, seed } = state.value.request;
  const words = ["prismlm", "explain", shared.model.path, text.trim() || "TEXT"];
  if (chat) words.push("--chat");
  if (chat || +generate) words.push("--generate", generate);
  if (+temperature) words.push("--temperature", temperature, "--seed", seed);
  change(state, { command: known ? words : null });
  shared.command(state.value.command);
};

/** @param {State} now */
const page = ({ request, answer, messages, abort }, shared) => html`
<form id="x-ask" class="prismlm x-form" @input=${(event) => { change(state, { request: filled(event.currentTarget) }); command(shared); }}
  @submit=${(event) => { event.preventDefault(); void write(shared, event.submitter?.name === "follow" ? messages : []); }}>
  <textarea class="x-prompt" name="text" rows="2" required aria-label="Prompt" .value=${request.text} @keydown=${entered}
    placeholder=${request.chat ? "Ask the model something." : "Write the beginning of a text; the model goes on."}></textarea>
  <div class="x-row">${asking(shared.model, request.chat)}${field("tokens", numeric("generate", 40, request.chat ? 1 : 0, 1024, 1))}${field("temperature", numeric("temperature", 0.5, 0, 10, 0.1))}
    ${field("seed", numeric("seed", 0, 0, 2 ** 31, 1))}<button type="submit" class="x-go">Ask</button>
    ${messages.length && request.chat && !abort ? html`<button type="submit" name="follow" title="The model reads what was said before, too">Follow up</button>` : nothing}
    <button type="button" class="x-stop" ?hidden=${!abort} @click=${() => stop(state.value)}>Stop</button></div>
  ${answer ? html`<div class="x-examples"><span class="p-note">Try</span>${examples(prompts(shared.model, request.chat), tried(shared.model))}</div>` : nothing}
</form>
<div class="x-out">${answer?.node ?? guard([shared.model, request.chat], () => beginning({ ...shared.model, prompts: prompts(shared.model, request.chat) }, "x-ask", tried(shared.model)))}</div>`;

// Without example questions, the examples are beginnings of texts, to be continued.
const tried = ({ questions }) => (text, form) => {
  const { chat } = state.value.request;
  change(state, { request: { ...state.value.request, text, chat: Object.keys(questions).length ? chat : undefined } });
  form.requestSubmit();
};
const entered = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
};

/** @param {any} shared @param {any[]} before messages before the question */
const write = async (shared, before) => {
  const { text, chat, generate, temperature, seed } = state.value.request;
  if (!text.trim()) return;
  command(shared, !before.length);
  history.replaceState(null, "", "#/ask");
  const model = shared.model.name, how = { model, stream: true, max_tokens: +generate, temperature: +temperature, seed: +seed };
  await showAnswer(shared, async (answer, signal) => {
    let id = "";
    const chunk = ({ error, choices, id: answerId }) => {
      if (error) throw new Error(error.message);
      answer.write(id = answerId, (chat ? choices[0].delta.content : choices[0].text) ?? "");
    };
    if (chat) await events("/v1/chat/completions", { ...how, messages: [...before, { role: "user", content: text }] }, signal, { chunk });
    else if (+generate) await events("/v1/completions", { ...how, prompt: text }, signal, { chunk });
    else ({ id } = await api("/v1/attributions", { model, prompt: "", answer: text }, signal));
    return id;
  });
};

/** Before anything is asked: prompts to try, and the text that the lens can name. @param {any} model @param {string} form the id of the form that asks
 * @param {(text: string, form: HTMLFormElement) => void} tried called with the prompt that was chosen */
const beginning = ({ prompts, lens }, form, tried) => html`<div class="x-begin">
  <section>${Object.keys(prompts).length ? html`<h2>Begin with one of these</h2>` : nothing}
    <div class="x-prompts">${Object.entries(prompts).map(([domain, words]) => html`<button type="button" class="x-try" form=${form}
      @click=${(event) => putIn(words, event.currentTarget.form, tried)}>${words.startsWith(domain) ? nothing : html`<small><bdi>${domain}</bdi></small>`}<bdi>${words}</bdi></button>`)}</div>
    <p class="p-note">Under each answer stands how far the corpus supports it, and the documents and passages it comes from.
      Unfolded, every token shows the prototypes that made the model write it.</p></section>
  ${lens ? corpusFacts(lens) : nothing}</div>`;

// The chosen card disappears: the keyboard focus moves to the button that asks.
const putIn = (words, form, tried) => {
  tried(words, form);
  form.querySelector(".x-go").focus({ preventScroll: true });
};

const corpusFacts = ({ documents, tokens, sampled, trained_on, shares }) => html`<section class="prismlm x-held"><h2>What the answers can be traced to</h2>
  ${facts([["documents", count(documents)], [sampled ? "tokens, sampled from them" : "tokens", count(tokens)], ["trained on it", trained_on ?? "not known"]])}
  ${shares ? html`<h3>${heading[shares.by]}</h3><ul class="p-bars">${bars(shares)}</ul>` : nothing}</section>`;

const bars = ({ items, others: [number, rest] }) => {
  const most = Math.max(...items.map(({ share }) => share));
  return [...items.map(({ key, share }) => bar(key, share, { most })), ...(number ? [bar(`${number} more`, rest, { kind: "p-rest", most })] : [])];
};
