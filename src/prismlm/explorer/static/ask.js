// Asking: a prompt, and the answer that the model writes to it.
import { make } from "./parts.js";
import { api, events } from "./server.js";
import { problem } from "./explorer.js";
import { begin, finish, live, step } from "./answer.js";

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
      start: ({ id, tokens }) => { answer.id = id; begin(answer, tokens); },
      step: (one) => step(answer, one),
      done: (data) => finish(answer, data),
      error: ({ error }) => answer.article.append(problem(new Error(error))),
    });
  } catch (error) {
    if (!abort.signal.aborted) answer.article.append(problem(error));
  }
  if (ui.abort === abort) ui.stop.hidden = true;
};
