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

/** A head's weights as a picture: `size` pixels a cell, `left` those before the first, `at` the row and column that is said.
 * @typedef {{ tokens: string[], weights: number[][], most: number, one: number, canvas: HTMLCanvasElement, say: HTMLElement,
 *   size: number, left: number, at: number[] }} Heat */

/** A picture with labels where there is room; the pointer or arrow keys say a weight.
 * @param {string[]} tokens @param {{ title: string, weights: number[][] }} map @param {number} one what a weight of 1 is */
export const heatmap = (tokens, { title, weights }, one) => {
  const canvas = make("canvas", "x-heat"), say = make("p", "x-heat-say"), many = tokens.length;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Attention of ${title} over ${many} tokens; arrow keys move over the weights`);
  say.setAttribute("aria-live", "polite");
  /** @type {Heat} */
  const heat = { tokens, weights, most: largestOf(weights), one, canvas, say, size: 1, left: 0, at: [many - 1, many - 1] };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), { size, left, at } = heat;
    const [row, column] = [Math.floor((event.clientY - box.top) / size), Math.floor((event.clientX - box.left - left) / size)];
    if (row >= 0 && row < many && column >= 0 && column <= row && (row !== at[0] || column !== at[1])) choose(heat, row, column);
  });
  canvas.addEventListener("keydown", (event) => {
    const [row, column] = heat.at;
    const to = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    choose(heat, to[0], to[1]);
  });
  return { node: make("div", "x-heat-box", say, canvas), draw: () => choose(heat, heat.at[0], heat.at[1]) };
};

/** Say a weight, and draw with a frame around it. @param {Heat} heat */
const choose = (heat, row, column) => {
  const { tokens, weights, one, say } = heat;
  const i = Math.max(0, Math.min(tokens.length - 1, row)), j = Math.max(0, Math.min(i, column));
  heat.at = [i, j];
  say.replaceChildren(make("bdi", null, tokens[i]), ` at ${i} gives ${percent(weights[i][j] / one)} to `,
    i === j ? "itself" : make("bdi", null, tokens[j]), i === j ? "" : ` at ${j}`);
  draw(heat);
};

/** @param {Heat} heat */
const draw = (heat) => {
  const { tokens, weights, most, canvas, say, at } = heat, many = tokens.length;
  const wide = canvas.parentElement?.clientWidth || 600;
  const names = tokens.map(label), font = `${FONT}px ${getComputedStyle(canvas).fontFamily}`;
  const room = widest(canvas, names, font) + 8;
  const fitting = (width) => Math.max(1, Math.min(LARGEST, Math.floor(width / many)));
  const labelled = fitting(wide - room) >= LABELLED;
  const left = heat.left = labelled ? room : 0, size = heat.size = fitting(wide - left);
  const sharp = devicePixelRatio || 1;
  const [width, height] = [left + many * size, many * size + left];
  Object.assign(canvas, { width: width * sharp, height: height * sharp });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  canvas.getContext("2d")?.scale(sharp, sharp);
  const context = cells(canvas, weights, most, size, left, 0);
  context.strokeStyle = context.fillStyle = getComputedStyle(say).color;
  context.strokeRect(left + at[1] * size, at[0] * size, size, size);
  if (!labelled) return;
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

const widest = (canvas, names, font) => {
  const context = canvas.getContext("2d");
  context.font = font;
  return Math.ceil(Math.max(...names.map((name) => context.measureText(name).width)));
};
