// The columns of an answer: each a written token, of slices that add up to its logit.
import { make, percent, plain, signed } from "./parts.js";

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

export const column = (one, prototypes) => {
  const parts = banded(one.uses, prototypes).map(([id, value]) => ({ value, id, ...prototypes[id], kind: "x-slice" }));
  parts.push({ value: one.residual, name: "residual", kind: "x-slice x-residual" });
  if (one.bias) parts.push({ value: one.bias, name: "bias", kind: "x-slice x-residual" });
  const slices = (list, classes) => make("span", classes, ...list.map((part, i) => {
    const node = make("span", i && list[i - 1].category !== part.category ? `${part.kind} x-next-band` : part.kind);
    node.style.setProperty("--v", String(Math.abs(part.value)));
    node.style.setProperty("--h", String(part.hue ?? 0));
    const label = `${part.name}: ${signed(part.value)}`;
    if (part.id === undefined) node.title = label;
    else Object.assign(node.dataset, { prototype: part.id, label });
    return node;
  }));
  const node = Object.assign(make("button", "x-column", slices(parts.filter((p) => p.value > 0), "x-up"),
    slices(parts.filter((p) => p.value < 0), "x-down"), make("span", "x-token", make("bdi", null, one.target))), { type: "button" });
  const largest = [...parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 3);
  node.setAttribute("aria-label", `${one.target}: logit ${plain(one.logit)}, of ${parts.length} parts the largest ${largest.map((p) => `${p.name} ${signed(p.value)}`).join(", ")}`);
  node.tabIndex = -1;
  return node;
};

// What colours mean: the categories of an answer, by what they carry of it.
export const legend = (steps, prototypes) => {
  const sums = new Map();
  for (const one of steps) for (const [id, value] of one.uses) {
    const { category, hue } = prototypes[id];
    const name = category || "no category";
    const known = sums.get(name) ?? { hue, value: 0 };
    sums.set(name, { hue: known.hue, value: known.value + Math.max(0, value) });
  }
  const all = [...sums.values()].reduce((sum, one) => sum + one.value, 0) || 1;
  const keys = [...sums].sort((a, b) => b[1].value - a[1].value).map(([name, { hue, value }]) => {
    const dot = make("i", "x-dot");
    dot.style.setProperty("--h", String(hue));
    return make("li", null, dot, name, make("span", "p-number", percent(value / all)));
  });
  return make("ul", "x-legend", ...keys, make("li", null, make("i", "x-dot x-residual"), "residual: what no prototype says"));
};
