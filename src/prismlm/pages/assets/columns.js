// The columns of an answer: each a token, of slices that add up to its logit, beside an axis of logits.
import { html, nothing } from "./vendor/lit-html/lit-html.js";
import { guard } from "./vendor/lit-html/directives/guard.js";
import { partsOf, plain, ranked, signed } from "./parts.js";
import { dot } from "./controls.js";

const NONE = "no category", TICKS = 6;

const reach = (all, sign) => all.reduce((sum, { value }) => sum + Math.max(0, sign * value), 0);

/** The chart of all columns. @param {any[]} steps @param {Record<string, any>} prototypes @param {number} chosen the position that is looked at
 * @param {(position: number) => void} choose */
export const chart = (steps, prototypes, chosen, choose) => {
  if (!steps.length) return nothing;
  const all = steps.map((one) => partsOf(one, prototypes));
  const up = Math.max(1, ...all.map((one) => reach(one, 1))), down = Math.max(0.5, ...all.map((one) => reach(one, -1)));
  return html`<div class="x-chart" .style=${`--up: ${up}; --down: ${down}`}>
    <div class="x-axis" aria-hidden="true"><span class="x-axis-name">logit</span>${ticks(-down, up).map((value) =>
      html`<span class="x-tick" .style=${`--v: ${value}`}>${value < 0 ? `−${-value}` : value}</span>`)}</div>
    ${steps.map((one, i) => guard([one, one.position === chosen], () => column(one, all[i], one.position === chosen, () => choose(one.position))))}</div>`;
};

/** Round values from one to another, some six. */
const ticks = (from, to) => {
  const least = (to - from) / TICKS, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= least) ?? least;
  const first = Math.ceil(from / step), count = Math.floor(to / step) - first + 1;
  return Array.from({ length: count }, (_, i) => +((first + i) * step).toPrecision(6));
};

const slice = ({ id, value, name, colour, role }) => {
  const label = `${name}: ${signed(value)}`, style = `--v: ${Math.abs(value)}; --k: ${colour ?? "var(--grey)"}`;
  return id === undefined ? html`<span class=${`x-slice ${role === "more" ? "x-rest-of" : "x-residual"}`} title=${label} .style=${style}></span>`
    : html`<span class="x-slice" data-prototype=${id} data-label=${label} .style=${style}></span>`;
};

const column = (one, all, chosen, choose) => {
  const largest = all.slice(0, 3).map(({ name, value }) => `${name} ${signed(value)}`).join(", ");
  const label = `${one.target}: logit ${plain(one.logit)}, of which ${largest}`;
  return html`<button type="button" class="x-column" tabindex="-1" aria-label=${label} ?data-chosen=${chosen} @click=${choose}>
    <span class="x-up">${all.filter(({ value }) => value > 0).map(slice)}</span>
    <span class="x-down">${all.filter(({ value }) => value < 0).map(slice)}</span>
    <span class="x-token"><bdi>${one.target}</bdi></span></button>`;
};

/** What height and colours mean: the categories that are drawn, those that carry most first. */
export const legend = (steps, prototypes) => {
  const sums = new Map();
  for (const { use: [id, value] } of steps.flatMap((one) => ranked(one.uses)[0])) {
    const { category, colour } = prototypes[id], known = sums.get(category || NONE);
    sums.set(category || NONE, { colour, value: (known?.value ?? 0) + Math.abs(value) });
  }
  return html`<p class="p-note">The height of a slice is what a prototype adds to the logit of the token below, or, under the line, takes away:
    one logit more multiplies the token’s odds by 2.7. The five prototypes that weigh most are in the colour of their category; all others are one slice.</p>
    <ul class="x-legend">${[...sums].sort((a, b) => b[1].value - a[1].value).map(([name, { colour }]) => html`<li>${dot(colour)}${name}</li>`)}
    <li><i class="x-dot x-rest-of"></i>all other prototypes</li><li><i class="x-dot x-residual"></i>residual: what no prototype explains</li></ul>`;
};
