// Inside the model along one text: channels, attention, and the uncertainty that is fed back.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { percent } from "./parts.js";
import { channels } from "./channels.js";
import { api } from "./server.js";
import { change, count, draw, problem } from "./controls.js";
import * as heads from "./attention.js";

/** What the model has of these, the text, the section that the command is of, and what was found of each.
 * @typedef {{ parts: any, text: string, section: string, sections: { name: string, data: any, failed: unknown }[], abort: AbortController | null }} State */
const state = signal(/** @type {State} */ ({ parts: null, text: "", section: "", sections: [], abort: null }));
/** The place of the view, what all views share, what the address says, and what shows that.
 * @type {{ root: HTMLElement, shared: any, query: URLSearchParams, follow: (() => void) | null } | null} */
let frame = null;
/** The heads whose small pictures are on the page. @type {any[] | null} */
let pictured = null;

export const show = async (root, at, shared) => {
  if (!frame) {
    const parts = await api("/inside");
    // Opened twice while it was fetched, the page is made once.
    if (!frame) begin(root, shared, parts, at.query);
  }
  if (!frame) return;
  frame.query = at.query;
  frame.follow?.();
  command();
};

const begin = (root, shared, parts, query) => {
  frame = { root, shared, query, follow: null };
  const section = parts.channels ? "channels" : parts.attention ? "attention" : "feedback";
  change(state, { parts, section, text: String(Object.values(shared.model.prompts)[0] ?? "") });
  draw(root, () => page(state.value), () => {
    heads.pictures(root, heads.state.value.maps !== pictured);
    pictured = root.querySelector(".x-thumb") ? heads.state.value.maps : null;
  });
  redrawn(root);
  if (state.value.text) void read();
};

/** Colours of pictures are drawn, so they are drawn again where they change, and where the width does. @param {HTMLElement} root */
const redrawn = (root) => {
  const again = () => { if (root.isConnected) heads.pictures(root); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", again);
  addEventListener("hashchange", () => setTimeout(again));
};

const command = (section = state.value.section) => {
  if (section !== state.value.section) change(state, { section });
  // What is read while another view is looked at says nothing there.
  if (!frame?.root.isConnected) return;
  const { layer, head } = heads.state.value, text = state.value.text || "TEXT", path = frame.shared.model.path;
  frame.shared.command({
    channels: ["prismlm", "inspect", "channels", path, "--text", text],
    attention: ["prismlm", "inspect", "attention", path, text, "--layer", layer, "--head", head],
    feedback: ["prismlm", "inspect", "uncertainty-feedback", path, "--text", text, "--signal", "recursion"],
  }[section]);
};

/** The address says which channel and head are chosen. */
const addressed = (name, first, second) => {
  frame?.query.set(name, `${first}.${second}`);
  history.replaceState(null, "", `#/inside?${frame?.query}`);
};
const chosen = (name) => (frame?.query.get(name) ?? "").split(".");

/** @param {State} now */
const page = ({ parts, text, sections }) => html`
<form class="prismlm x-form" @submit=${(event) => { event.preventDefault(); void read(); }}>
  <textarea class="x-prompt" rows="3" required placeholder="A text to look inside with." aria-label="Text to look inside with" .value=${text}
    @input=${(event) => { change(state, { text: event.target.value }); command(); }}></textarea>
  <div class="x-row"><button type="submit" class="x-go">Read</button><span class="p-note">${lacking(parts)}</span></div>
</form>
<div class="x-out x-inside-out">${sections.map(({ name, data, failed }) => 
  html`<section class=${`x-inside-${name}`} @focusin=${() => command(name)} @pointerdown=${() => command(name)}>${
    failed ? problem(failed) : data ? KINDS[name].page(data) : html`<p class="p-note">Reading…</p>`}</section>`)}</div>`;

const NAMES = { channels: "channels", attention: "attention", feedback: "uncertainty feedback" };
const lacking = (parts) => {
  const absent = Object.keys(NAMES).filter((name) => !parts[name]).map((name) => NAMES[name]);
  const there = Object.keys(NAMES).filter((name) => parts[name]).map((name) => NAMES[name]);
  return absent.length ? `This model has no ${absent.join(" and no ")}.${there.length ? ` Read shows its ${there.join(" and ")}.` : ""}` : nothing;
};

const read = async () => {
  state.value.abort?.abort();
  const abort = new AbortController(), { parts, text } = state.value, names = Object.keys(KINDS).filter((name) => parts[name]);
  if (frame) frame.follow = null;
  change(state, { abort, sections: names.map((name) => ({ name, data: null, failed: null })) });
  command();
  for (const name of names) {
    const part = await KINDS[name].read(text, abort.signal).then((data) => ({ data }), (failed) => ({ failed }));
    if (abort.signal.aborted) return;
    change(state, { sections: state.value.sections.map((one) => (one.name === name ? { ...one, ...part } : one)) });
  }
};

const heading = (name, note) => html`<header class="p-head"><h2>${name}</h2><p class="p-note">${note}</p></header>`;

const channelled = async (text, signal) => {
  const data = await api("/inside/channels", { text }, signal), address = { read: () => chosen("channel"), write: (layer, channel) => addressed("channel", layer, channel) };
  const own = channels(data, address, heading("Channels", "What each position writes into a channel, how long it stays, and what a later one finds there."));
  if (frame) frame.follow = own.follow;
  return own;
};

const attended = async (text, signal) => {
  const { layers } = state.value.parts.attention, [layer, head] = chosen("head").map(Number);
  if (layer < layers) change(heads.state, { layer, head: head || 0 });
  await heads.read(text, heads.state.value.layer, signal);
  command("attention");
  return true;
};
const head = () => {
  addressed("head", heads.state.value.layer, heads.state.value.head);
  command("attention");
};
const attention = () => html`<article class="prismlm x-attention">
  ${heading("Attention", "A row's token gives its weight to the columns. Shades are by the square root of the weight; a first token has only itself.")}
  ${heads.attention(state.value.parts.attention.layers, head)}</article>`;

const FED = "To each token's input, when the model writes this text token by token: the entropy of the prediction before it, as a share of the largest possible.";
const feedback = ({ tokens, fed }) => html`<article class="prismlm">
  ${heading("Uncertainty fed back", FED)}
  <div class="x-fed-text">${tokens.map((token, i) => {
    const [share, code] = fed[i];
    const why = share === null ? "the first token: nothing is fed back"
      : `entropy of the prediction before it: ${percent(share)} of the largest, code ${count(code)}`;
    return html`<span class="x-fed" title=${why} .style=${`--u: ${share ?? 0}`}><span class="x-fed-bar"></span>
      <bdi>${token}</bdi><small>${share === null ? "–" : percent(share)}</small></span>`;
  })}</div></article>`;

/** What a section asks for, and what it shows.
 * @type {Record<string, { read: (text: string, signal: AbortSignal) => Promise<any>, page: (data: any) => unknown }>} */
const KINDS = {
  channels: { read: channelled, page: ({ node }) => node },
  attention: { read: attended, page: attention },
  feedback: { read: (text, signal) => api("/inside/feedback", { text }, signal), page: feedback },
};
