// Inside the model along one text: channels, attention, and the uncertainty that is fed back.
import { make, percent } from "./parts.js";
import { readChannels } from "./channels.js";
import { api } from "./server.js";
import { problem } from "./explorer.js";
import { heatmap, largestOf, thumbnail } from "./heatmap.js";

export const title = "Inside";
// What a weight of 1 is sent as.
const ONE = 10_000;

/** @type {any} */
let ui = null;

export const show = async (root, at, shared) => {
  if (!ui) {
    const parts = await api("/inside");
    ui = form(shared, parts);
    root.replaceChildren(ui.form, ui.out);
    redrawn();
  }
  ui.query = at.query;
  ui.follow?.();
  ui.say();
};

/** The address says which channel and head are chosen. */
const addressed = (name, first, second) => {
  ui.query.set(name, `${first}.${second}`);
  history.replaceState(null, "", `#/inside?${ui.query}`);
};
const chosen = (name) => (ui.query.get(name) ?? "").split(".");

const form = (shared, parts) => {
  const text = Object.assign(make("textarea", "x-prompt"), { rows: 3, required: true, placeholder: "A text to look inside with.", value: Object.values(shared.model.prompts)[0] ?? "" });
  text.setAttribute("aria-label", "Text to look inside with");
  const go = Object.assign(make("button", "x-go", "Read"), { type: "submit" });
  const form = make("form", "prismlm x-form", text, make("div", "x-row", go, make("span", "p-note", lacking(parts))));
  const out = make("div", "x-out x-inside-out");
  const commands = {
    channels: () => ["prismlm", "inspect", "channels", shared.model.path, "--text", text.value || "TEXT"],
    attention: () => ["prismlm", "inspect", "attention", shared.model.path, text.value || "TEXT", "--layer", made.layer, "--head", made.head],
    feedback: () => ["prismlm", "inspect", "uncertainty-feedback", shared.model.path, "--text", text.value || "TEXT", "--signal", "recursion"],
  };
  const made = {
    form, out, text, parts, query: new URLSearchParams(), abort: null, layer: 0, head: 0, follow: null, redraw: [],
    section: parts.channels ? "channels" : parts.attention ? "attention" : "feedback",
    say: (section) => {
      made.section = section ?? made.section;
      shared.command(commands[made.section]());
    },
  };
  form.addEventListener("input", () => made.say());
  form.addEventListener("submit", (event) => { event.preventDefault(); void read(); });
  return made;
};

const lacking = (parts) => {
  const absent = [parts.channels ? null : "channels", parts.attention ? null : "attention", parts.feedback ? null : "uncertainty feedback"].filter(Boolean);
  return absent.length ? `This model has no ${absent.join(" and no ")}.` : "";
};

/** Colours of pictures are drawn, so they are drawn again where they change, and where the width does. */
const redrawn = () => {
  const again = () => { if (ui.out.isConnected) for (const draw of ui.redraw) draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", again);
  addEventListener("hashchange", () => setTimeout(again));
};

const read = async () => {
  ui.abort?.abort();
  const { signal } = (ui.abort = new AbortController());
  const text = ui.text.value;
  const kinds = { channels, attention, feedback };
  const sections = Object.keys(kinds).filter((name) => ui.parts[name]).map((name) => {
    const section = make("section", `x-inside-${name}`, make("p", "p-note", "Reading…"));
    for (const event of ["focusin", "pointerdown"]) section.addEventListener(event, () => ui.say(name));
    return { name, section };
  });
  ui.follow = null;
  ui.redraw = [];
  ui.out.replaceChildren(...sections.map(({ section }) => section));
  ui.say();
  for (const { name, section } of sections) {
    try {
      await kinds[name](section, text, signal);
    } catch (error) {
      if (signal.aborted) return;
      section.replaceChildren(problem(error));
    }
  }
};

const heading = (name, note) => make("header", "p-head", make("h2", null, name), make("p", "p-note", note));

const channels = async (section, text, signal) => {
  const data = await api("/inside/channels", { text }, signal);
  const list = make("div", "c-list");
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Channels of the layer; arrow keys move");
  const layers = make("div", "c-layers");
  layers.setAttribute("role", "group");
  layers.setAttribute("aria-label", "Layer");
  const article = make("article", "prismlm p-channels", heading("Channels", "What each position writes into a channel, how long it stays, and what a later one finds there."),
    layers, make("div", "c-body", list, make("section", "c-main")));
  section.replaceChildren(article);
  ui.follow = readChannels(article, data, { read: () => chosen("channel"), write: (layer, channel) => addressed("channel", layer, channel) });
};

const attention = async (section, text, signal) => {
  const { layers } = ui.parts.attention;
  const [layer, head] = chosen("head").map(Number);
  if (layer < layers) [ui.layer, ui.head] = [layer, head || 0];
  const select = make("select", null, ...Array.from({ length: layers }, (_, i) => Object.assign(make("option", null, String(i)), { value: String(i) })));
  select.value = String(ui.layer);
  const heads = make("div", "x-heads");
  heads.setAttribute("role", "group");
  heads.setAttribute("aria-label", "Heads of the layer");
  const main = make("div", "x-head-main");
  section.replaceChildren(make("article", "prismlm x-attention",
    heading("Attention", "A row's token gives its weight to the columns. Shades are by the square root of the weight; a first token has only itself."),
    make("div", "x-row x-layer", make("label", "x-field", make("span", null, "layer"), select)), heads, main));
  const fetched = async () => {
    const found = await api("/inside/attention", { text, layer: +select.value }, signal);
    ui.layer = found.layer;
    shown(found, heads, main);
  };
  select.addEventListener("change", async () => {
    try {
      await fetched();
    } catch (error) {
      if (!signal.aborted) main.replaceChildren(problem(error));
    }
  });
  await fetched();
};

const shown = ({ layer, tokens, maps }, heads, main) => {
  // One scale for all heads of the layer.
  const most = Math.max(...maps.map((one) => largestOf(one.weights)));
  const small = maps.map((one) => thumbnail(one.weights, most));
  const buttons = maps.map((one, i) => {
    const name = one.group === "attention" ? `head ${one.number}` : `${one.group} ${one.number}`;
    const button = Object.assign(make("button", `x-head x-head-${one.group}`, small[i].canvas, make("span", null, name)), { type: "button" });
    button.addEventListener("click", () => { choose(i); addressed("head", layer, one.head); });
    return button;
  });
  const choose = (i) => {
    const one = maps[i];
    ui.head = one.head;
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(i === k)));
    const large = heatmap(tokens, one, ONE);
    const links = one.strongest.map(([source, target, weight]) => make("li", null, make("span", "p-number", percent(weight)),
      make("span", null, make("bdi", "x-said", tokens[source]), make("small", null, `${source}`), " → ", make("bdi", "x-said", tokens[target]), make("small", null, `${target}`))));
    main.replaceChildren(make("div", "x-head-map", make("h3", "x-head-title", one.title), large.node),
      make("div", "x-head-side", make("h3", null, "Strongest weights on other tokens"), make("ol", "x-links", ...links),
        make("p", "p-note", one.on_itself === null ? "" : `On itself ${percent(one.on_itself)} on average.${one.group === "noise" ? " A noise head's weights are subtracted, times λ, which is not in them." : ""}`)));
    ui.redraw = [...small.map(({ draw }) => draw), large.draw];
    for (const draw of ui.redraw) draw();
    ui.say("attention");
  };
  heads.replaceChildren(...buttons);
  choose(Math.max(0, maps.findIndex((one) => one.head === ui.head)));
};

const feedback = async (section, text, signal) => {
  const { tokens, fed } = await api("/inside/feedback", { text }, signal);
  const nodes = tokens.map((token, i) => {
    const [share, code] = fed[i];
    const node = make("span", "x-fed", make("span", "x-fed-bar"), make("bdi", null, token), make("small", null, share === null ? "–" : percent(share)));
    node.style.setProperty("--u", String(share ?? 0));
    node.title = share === null ? "the first token: nothing is fed back" : `entropy of the prediction before it: ${percent(share)} of the largest, code ${code.toLocaleString("en")}`;
    return node;
  });
  section.replaceChildren(make("article", "prismlm",
    heading("Uncertainty fed back", "To each token's input, when the model writes this text token by token: the entropy of the prediction before it, as a share of the largest possible."),
    make("div", "x-fed-text", ...nodes)));
};
