// The prototypes that the next token of a prompt relies on most, to choose from.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { signal } from "./vendor/signals-core/signals-core.js";
import { percent, shown } from "./parts.js";
import { api } from "./server.js";
import { dot } from "./controls.js";

/** The prompt, and what `/api/steer/leading` gave for it: null before that, and where it cannot be had. */
const state = signal({ text: "", chat: false, found: /** @type {any} */ (null) });

/** Ask for those of a prompt. @param {string} text @param {boolean} chat whether it is asked as a question */
export const read = async (text, chat) => {
  const same = () => text === state.value.text && chat === state.value.chat;
  if (same()) return;
  state.value = { text, chat, found: null };
  // Why a prompt cannot be read is said when it is steered.
  const found = text.trim() ? await api("/steer/leading", { text, chat }).catch(() => null) : null;
  if (same()) state.value = { text, chat, found };
};

/** @param {number | null} chosen the prototype that is chosen @param {(id: number) => void} take */
export const leading = (chosen, take) => {
  const { found } = state.value;
  if (!found?.prototypes.length) return nothing;
  const [{ share: largest }] = found.prototypes;
  return html`<div class="x-offer" role="group" aria-label="Prototypes that the next token relies on most">
    <p class="p-note">Or take out what the next token, <bdi>${shown(found.token, "x-word")}</bdi> at ${percent(found.probability)}, relies on most.
      Each has its share of all that raises the token’s logit.</p>
    ${found.prototypes.map(({ id, name, colour, share }) => html`<button type="button" class="x-lead" aria-pressed=${id === chosen} @click=${() => take(id)}>
      ${dot(colour)}<bdi>${name}</bdi><span class="p-track"><span class="p-fill" .style=${`width: ${(100 * share) / largest}%`}></span></span>
      <span class="p-number">${percent(share)}</span></button>`)}</div>`;
};
