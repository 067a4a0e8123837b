// Traces on a page of their own, or in a notebook, which has any number of such parts.
import { live } from "./answer.js";

for (const root of document.querySelectorAll(".p-root:not([data-ready])")) {
  const { answers, shared } = JSON.parse(root.querySelector("script").textContent);
  root.dataset.ready = "yes";
  for (const { shared: number, ...one } of answers) {
    const answer = live({ model: { lens: null } });
    root.append(answer.node);
    answer.finish({ ...one, shared: shared[number] });
  }
}
