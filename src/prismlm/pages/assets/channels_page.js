// The page of channels: its data stand in it, and its address says which channel is chosen.
import { html, render } from "./vendor/lit-html/lit-html.js";
import { channels } from "./channels.js";
import { facts } from "./controls.js";

const CAVEAT = "Sequences are those that write most into a channel; they show what it holds, and are no proof of what the model uses it for. " +
  "Masking a channel is the test of that.";
const root = /** @type {HTMLElement} */ (document.querySelector(".p-root"));
const data = JSON.parse(root.querySelector("script").textContent);

const address = {
  read: () => (location.hash.match(/^#l(\d+)c(\d+)$/) || []).slice(1),
  write: (layer, channel) => {
    try {
      history.replaceState(null, "", `#l${layer}c${channel}`);
    } catch {
      // A page that is framed may not change its address.
    }
  },
};
const { node, follow } = channels(data, address, html`<header class="p-head">${facts(data.facts)}</header>`,
  html`<p class="p-caveat">${CAVEAT}</p>`);
render(node, root);
addEventListener("hashchange", follow);
root.dataset.ready = "yes";
