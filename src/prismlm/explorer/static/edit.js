// What an edit of Steer is, in words and as options of the command.
/** @typedef {{ prototype: number | null, category: string | null, strength: number, target: string }} Edit */

/** @param {number} x */
export const signedPercent = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x)} %`;

/** What an edit does, in one line. @param {Edit} edit */
export const meaning = ({ prototype, category, strength, target }) => {
  const size = `${Math.abs(strength)} %`;
  if (prototype === null && category === null) return "Choose a prototype or a category.";
  if (strength === 0) return "Changes nothing: both texts are the same.";
  if (prototype === null) {
    const all = Math.abs(strength) === 100, reach = "among the 16 most active of each position; weaker ones stay as they are";
    return strength > 0
      ? `Adds ${all ? "once more" : size + " of"} what the category's prototypes give, ${reach}.`
      : `Takes out ${all ? "all" : size} of what the category's prototypes give, ${reach}.`;
  }
  if (strength > 0) {
    const where = target === "top" ? "the token that the unedited model puts first" : "the first token of its card";
    return `Holds what the prototype gives to ${where} at ${size} of the unedited top logit, at every position (clamp).`;
  }
  if (strength === -100) return "Takes out all that the prototype gives, wherever it is active (ablation).";
  return `Leaves ${100 + strength} % of what the prototype gives, wherever it is active (scale).`;
};

/** The options of `prismlm steer` that make the same edit; ID stands for what is still to be chosen. @param {Edit} edit @returns {(string | number)[]} */
export const edited = ({ prototype, category, strength, target }) => {
  if (category !== null) return ["--category", category, "--strength", strength / 100];
  const which = ["--prototype", prototype ?? "ID"];
  if (strength > 0) return [...which, "--strength", strength / 100, "--target", target];
  if (strength === -100) return [...which, "--edit", "ablate"];
  return [...which, "--edit", "scale", "--strength", (100 + strength) / 100];
};
