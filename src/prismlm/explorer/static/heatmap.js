// Attention of one head as a picture: rows look at columns. Shades are by the square root of the
// weight, as on the pictures of `prismlm inspect attention`, so that small weights can be seen.
import { make, percent } from "./parts.js";

const LETTERS = 14, LABELLED = 12, LARGEST = 24, FONT = 11;
const label = (token) => {
  const text = token.startsWith("·") && token.length > 1 ? token.slice(1) : token;
  return text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text;
};
// The first token has only itself: its weight would stretch the scale of all others.
export const largestOf = (weights) => {
  let most = 0;
  for (const row of weights.slice(weights.length > 1 ? 1 : 0)) for (const weight of row) most = Math.max(most, weight);
  return most || 1;
};

/** Draw weights into a canvas, cells of a size in pixels, from a corner on. */
const cells = (canvas, weights, most, size, left, top) => {
  const context = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const many = weights.length;
  context.fillStyle = style.backgroundColor;
  context.fillRect(left, top, many * size, many * size);
  context.fillStyle = style.color;
  weights.forEach((row, i) => row.forEach((weight, j) => {
    context.globalAlpha = Math.min(1, Math.sqrt(weight / most));
    context.fillRect(left + j * size, top + i * size, size, size);
  }));
  context.globalAlpha = 1;
  return context;
};

/** A small picture without labels. */
export const thumbnail = (weights, most) => {
  const canvas = make("canvas", "x-thumb");
  const size = Math.max(1, Math.floor(144 / weights.length));
  canvas.width = canvas.height = weights.length * size;
  return { canvas, draw: () => cells(canvas, weights, most, size, 0, 0) };
};

/** A picture with labels where there is room; the pointer or arrow keys say a weight.
 * @param {string[]} tokens @param {{ title: string, weights: number[][] }} map @param {number} one what a weight of 1 is */
export const heatmap = (tokens, map, one) => {
  const canvas = make("canvas", "x-heat");
  const say = make("p", "x-heat-say");
  const most = largestOf(map.weights);
  const many = tokens.length;
  let size = 1, left = 0, at = [many - 1, many - 1];
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Attention of ${map.title} over ${many} tokens; arrow keys move over the weights`);
  say.setAttribute("aria-live", "polite");
  const draw = () => {
    const wide = canvas.parentElement?.clientWidth || 600;
    const names = tokens.map(label);
    const probe = canvas.getContext("2d");
    const font = `${FONT}px ${getComputedStyle(canvas).fontFamily}`;
    probe.font = font;
    const room = Math.ceil(Math.max(...names.map((name) => probe.measureText(name).width))) + 8;
    size = Math.max(1, Math.min(LARGEST, Math.floor((wide - room) / many)));
    const labelled = size >= LABELLED;
    left = labelled ? room : 0;
    if (!labelled) size = Math.max(1, Math.min(LARGEST, Math.floor(wide / many)));
    const sharp = devicePixelRatio || 1;
    const [width, height] = [left + many * size, many * size + (labelled ? room : 0)];
    Object.assign(canvas, { width: width * sharp, height: height * sharp });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = canvas.getContext("2d");
    context.scale(sharp, sharp);
    cells(canvas, map.weights, most, size, left, 0);
    context.strokeStyle = getComputedStyle(say).color;
    context.strokeRect(left + at[1] * size, at[0] * size, size, size);
    if (!labelled) return;
    context.fillStyle = getComputedStyle(say).color;
    Object.assign(context, { font, textBaseline: "middle", textAlign: "right", direction: "ltr" });
    names.forEach((name, i) => {
      context.fillText(name, left - 4, (i + 0.5) * size);
      context.save();
      context.translate(left + (i + 0.5) * size, many * size + 4);
      context.rotate(-Math.PI / 2);
      context.fillText(name, 0, 0);
      context.restore();
    });
  };
  const choose = (row, column) => {
    const i = Math.max(0, Math.min(many - 1, row));
    at = [i, Math.max(0, Math.min(i, column))];
    const weight = map.weights[at[0]][at[1]] / one;
    say.replaceChildren(make("bdi", null, tokens[at[0]]), ` at ${at[0]} gives ${percent(weight)} to `,
      at[0] === at[1] ? "itself" : make("bdi", null, tokens[at[1]]), at[0] === at[1] ? "" : ` at ${at[1]}`);
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [row, column] = [Math.floor((event.clientY - box.top) / size), Math.floor((event.clientX - box.left - left) / size)];
    if (row >= 0 && row < many && column >= 0 && column <= row && (row !== at[0] || column !== at[1])) choose(row, column);
  });
  canvas.addEventListener("keydown", (event) => {
    const to = { ArrowUp: [at[0] - 1, at[1]], ArrowDown: [at[0] + 1, at[1]], ArrowLeft: [at[0], at[1] - 1], ArrowRight: [at[0], at[1] + 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    choose(to[0], to[1]);
  });
  return { node: make("div", "x-heat-box", say, canvas), draw: () => choose(at[0], at[1]) };
};
