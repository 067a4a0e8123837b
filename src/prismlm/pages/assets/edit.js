// What an edit of Steer is, in words and as options of the command.
/** @typedef {{ prototype: number | null, category: string | null, strength: number | null }} Edit strength in percent, null where it is to be found */

/** @param {number} x */
export const signedPercent = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x)} %`;

/** What an edit does, in one line. @param {Edit} edit */
export const meaning = ({ prototype, category, strength }) => {
  if (prototype === null && category === null) return "Choose a prototype or a category.";
  if (strength === 0) return "Changes nothing: both texts are the same.";
  const size = strength === null ? "as much as the text allows before it repeats itself" : `${Math.abs(strength)} %`;
  if (prototype === null) {
    return strength === null || strength > 0
      ? `Raises the category's own tokens that its active prototypes raise, ${strength === null ? size : `to ${size} of the unedited top logit`}.`
      : `Takes out ${strength === -100 ? "all" : size} of what the category's active prototypes give.`;
  }
  if (strength === null) return "Holds what the prototype gives to the first token of its card as high as the text allows before it repeats itself (clamp).";
  if (strength > 0) return `Holds what the prototype gives to the first token of its card at ${size} of the unedited top logit, at every position (clamp).`;
  if (strength === -100) return "Takes out all that the prototype gives, wherever it is active (ablation).";
  return `Leaves ${100 + strength} % of what the prototype gives, wherever it is active (scale).`;
};

/** The options of `prismlm steer` that make the same edit; ID stands for what is still to be chosen. @param {Edit} edit @returns {(string | number)[]} */
export const edited = ({ prototype, category, strength }) => {
  const which = category !== null ? ["--category", category] : ["--prototype", prototype ?? "ID"];
  if (strength === null) return which;
  if (category !== null || strength > 0) return [...which, "--strength", strength / 100];
  if (strength === -100) return [...which, "--edit", "ablate"];
  return [...which, "--edit", "scale", "--strength", (100 + strength) / 100];
};
