// What the gates of channels are along the kept texts.
const EMPTY_BELOW = 1e-30;

/** Give texts the tokens of their words: counts[w] make word w; ends[w] is the number of tokens up to its end. */
export const measure = (texts) => {
  for (const text of texts) {
    let end = 0;
    text.counts = text.words.map((_, word) => text.many[word] ?? 1);
    text.ends = text.counts.map((count) => (end += count));
    text.length = end;
  }
};

/** The write gate, read gate and β of a channel along each of its texts, from thousandths of its largest gates.
 * @param {any} layer @param {any} channel @returns {{ write: Float64Array, read: Float64Array, decay: Float64Array }[]} */
export const gatesOf = (layer, { gates, largest, decay: constant }) => gates.map(({ write, read, decay }) => {
  const scaled = (levels, most) => Float64Array.from(levels, (level) => (most * level) / 1000), own = scaled(write, largest[0]);
  return { write: own, read: layer.shared ? own : scaled(read, largest[1]), decay: decay ? Float64Array.from(decay) : new Float64Array(write.length).fill(constant) };
});

/** What position i finds in the channel: β_j ⋯ β_(i−1) write_j / M_i for j < i. */
export const memory = (write, decay, i) => {
  const weights = new Float64Array(write.length);
  let mass = 0;
  for (let j = i - 1, left = 1; j >= 0; j--) mass += weights[j] = (left *= decay[j]) * write[j];
  if (mass < EMPTY_BELOW) return { weights: weights.fill(0), mass: 0 };
  return { weights: weights.map((x) => x / mass), mass };
};

/** Values of tokens as values of words. */
export const byWord = (text, values, combine) => text.ends.map((end, word) => {
  const part = values.subarray(end - text.counts[word], end);
  return part.reduce((a, b) => combine(a, b), 0);
});
