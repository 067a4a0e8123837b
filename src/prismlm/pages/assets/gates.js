// What the gates of channels are along the kept texts, from the bytes that a page carries.
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

export const bytesOf = (gates) => Uint8Array.from(atob(gates), (letter) => letter.charCodeAt(0));

// A byte holds √(gate / largest).
const decoded = (bytes, largest) => Float64Array.from(bytes, (level) => largest * (level / 255) ** 2);
// Where β depends on the token, a byte holds the logarithm of −ln β within the range.
const decays = (bytes, [least, most]) =>
  Float64Array.from(bytes, (level) => Math.exp(-least * Math.exp((Math.log(most / least) * level) / 255)));

/** The write gate, read gate and β of a channel along each of its texts.
 * @param {Uint8Array} bytes @param {any} data @param {any} layer @param {any} channel
 * @returns {{ write: Float64Array, read: Float64Array, decay: Float64Array }[]} */
export const gatesOf = (bytes, data, layer, channel) => {
  let at = channel.at;
  const next = (length) => {
    at += length;
    return bytes.subarray(at - length, at);
  };
  return channel.texts.map(([number]) => {
    const { length } = data.texts[number];
    const write = decoded(next(length), channel.largest[0]);
    const read = layer.shared ? write : decoded(next(length), channel.largest[1]);
    const decay = channel.decay === null ? decays(next(length), data.rates) : new Float64Array(length).fill(channel.decay);
    return { write, read, decay };
  });
};

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
