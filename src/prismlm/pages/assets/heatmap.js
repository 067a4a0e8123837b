// Attention of one head as a picture: rows look at columns. Shades are by the square root of the
// weight, as on the pictures of `prismlm inspect attention`, so that small weights can be seen.
const LETTERS = 14, LABELLED = 12, LARGEST = 24, FONT = 11, THUMB = 144;
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

/** Draw a small picture without labels. @param {HTMLCanvasElement} canvas @param {number[][]} weights @param {number} most */
export const thumbnail = (canvas, weights, most) => {
  const size = Math.max(1, Math.floor(THUMB / weights.length));
  canvas.width = canvas.height = weights.length * size;
  cells(canvas, weights, most, size, 0, 0);
};

/** How large a cell is on a canvas, and how much room there is before the first; there are labels where there is room. */
const laid = (canvas, names, font) => {
  const wide = canvas.parentElement?.clientWidth || 600, room = widest(canvas, names, font) + 8;
  const fitting = (width) => Math.max(1, Math.min(LARGEST, Math.floor(width / names.length)));
  const left = fitting(wide - room) >= LABELLED ? room : 0;
  return { left, size: fitting(wide - left) };
};
const fontOf = (canvas) => `${FONT}px ${getComputedStyle(canvas).fontFamily}`;

/** The row and column that a pointer is at, or null. @param {HTMLCanvasElement} canvas @param {string[]} tokens @param {PointerEvent} event */
export const cellAt = (canvas, tokens, event) => {
  const box = canvas.getBoundingClientRect(), { size, left } = laid(canvas, tokens.map(label), fontOf(canvas));
  const [row, column] = [Math.floor((event.clientY - box.top) / size), Math.floor((event.clientX - box.left - left) / size)];
  return row >= 0 && row < tokens.length && column >= 0 && column <= row ? [row, column] : null;
};

/** Draw a picture with labels where there is room, and a frame around one weight.
 * @param {HTMLCanvasElement} canvas @param {string[]} tokens @param {number[][]} weights @param {number[]} at its row and column */
export const heatmap = (canvas, tokens, weights, at) => {
  const many = tokens.length, names = tokens.map(label), font = fontOf(canvas), { left, size } = laid(canvas, names, font);
  const sharp = devicePixelRatio || 1;
  const [width, height] = [left + many * size, many * size + left];
  Object.assign(canvas, { width: width * sharp, height: height * sharp });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  canvas.getContext("2d")?.scale(sharp, sharp);
  const context = cells(canvas, weights, largestOf(weights), size, left, 0);
  context.strokeStyle = context.fillStyle = getComputedStyle(canvas.parentElement ?? canvas).color;
  context.strokeRect(left + at[1] * size, at[0] * size, size, size);
  if (!left) return;
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
