// The columns of an answer: each a written token, of slices that add up to its logit.
import { html } from "./vendor/lit-html/lit-html.js";
import { percent, plain, signed } from "./parts.js";
import { dot } from "./controls.js";

const NONE = "no category";

// Slices of one category stand together, the weightiest category first: bands that can be seen.
const banded = (uses, prototypes) => {
  const weights = new Map();
  for (const [id, value] of uses) {
    const { category } = prototypes[id];
    weights.set(category, (weights.get(category) ?? 0) + Math.abs(value));
  }
  const order = ([id, value]) => [-(weights.get(prototypes[id].category) ?? 0), -value];
  return [...uses].sort((a, b) => {
    const [[first, second], [third, fourth]] = [order(a), order(b)];
    return first - third || second - fourth;
  });
};

const slice = (part, before) => {
  const label = `${part.name}: ${signed(part.value)}`, style = `--v: ${Math.abs(part.value)}; --h: ${part.hue ?? 0}`;
  const next = before && before.category !== part.category ? " x-next-band" : "";
  return part.id === undefined ? html`<span class=${`x-slice x-residual${next}`} title=${label} .style=${style}></span>`
    : html`<span class=${`x-slice${next}`} data-prototype=${part.id} data-label=${label} .style=${style}></span>`;
};
const slices = (parts) => parts.map((part, i) => slice(part, parts[i - 1]));

/** @param {any} one a step @param {Record<string, any>} prototypes @param {boolean} chosen @param {() => void} choose */
export const column = (one, prototypes, chosen, choose) => {
  const parts = banded(one.uses, prototypes).map(([id, value]) => ({ value, id, ...prototypes[id] }));
  parts.push({ value: one.residual, name: "residual" });
  if (one.bias) parts.push({ value: one.bias, name: "bias" });
  const largest = [...parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 3);
  const label = `${one.target}: logit ${plain(one.logit)}, of ${parts.length} parts the largest ${largest.map((p) => `${p.name} ${signed(p.value)}`).join(", ")}`;
  return html`<button type="button" class="x-column" tabindex="-1" aria-label=${label} ?data-chosen=${chosen} @click=${choose}>
    <span class="x-up">${slices(parts.filter((p) => p.value > 0))}</span>
    <span class="x-down">${slices(parts.filter((p) => p.value < 0))}</span>
    <span class="x-token"><bdi>${one.target}</bdi></span></button>`;
};

// What colours mean: the categories of an answer, by what they carry of it.
export const legend = (steps, prototypes) => {
  const sums = new Map();
  for (const one of steps) for (const [id, value] of one.uses) {
    const { category, hue } = prototypes[id];
    const name = category || NONE;
    const known = sums.get(name) ?? { hue, value: 0 };
    sums.set(name, { hue: known.hue, value: known.value + Math.max(0, value) });
  }
  const all = [...sums.values()].reduce((sum, one) => sum + one.value, 0) || 1;
  // What has no category has a hue of its own each.
  const mark = (name, hue) => (name === NONE ? html`<i class="x-dot x-any"></i>` : dot(hue));
  return html`<ul class="x-legend">${[...sums].sort((a, b) => b[1].value - a[1].value).map(([name, { hue, value }]) =>
    html`<li>${mark(name, hue)}${name}<span class="p-number">${percent(value / all)}</span></li>`)}
    <li><i class="x-dot x-residual"></i>residual: what no prototype says</li></ul>`;
};
