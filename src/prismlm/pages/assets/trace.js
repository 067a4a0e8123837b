const parsed = (root) => JSON.parse(root.querySelector(':scope > script[type="application/json"]').textContent);
const known = new Map();
const shared = (group) => {
  if (!known.has(group)) known.set(group, unpacked(parsed(group)));
  return known.get(group);
};
const start = (root) => {
  root.dataset.ready = "yes";
  const data = { ...parsed(root), ...shared(root.closest(".p-traces")) };
  const tokens = [...root.querySelectorAll(".p-token")];
  const target = root.querySelector(".p-panel");
  let current = -1;
  const show = (number) => {
    if (number === current) return;
    current = number;
    tokens.forEach((token, i) => token.setAttribute("aria-selected", String(i === number)));
    target.replaceChildren(panel(data, data.steps[number]), behind(data, data.steps[number]));
  };
  if (data.whole) root.querySelector(".p-whole").append(...wholeText(data, root.querySelector(".p-none") ? "none" : ""));
  walk(root.querySelector(".p-text"), tokens, show);
};
document.querySelectorAll(".prismlm:not([data-ready])").forEach((root) => root.querySelector(".p-token") && start(root));
