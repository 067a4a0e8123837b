// Auditing: what the predictions over many texts rely on, as they are read, and the files of it.
import { documents, figure, links, make, percent, shares, unpacked } from "./parts.js";
import { api, events } from "./server.js";
import { problem } from "./explorer.js";
import { check, KINDS, textsOf } from "./texts.js";

export const title = "Audit";
const SHOWN = 100;
const PASTED = "pasted text";
const CAVEAT = "Shares show which learned patterns carry a prediction and where they occur in the corpus; they are no proof that removing a document changes the answer.";

/** @type {any} */
let ui = null;

export const show = (root, at, shared) => {
  if (!ui) {
    ui = form(root, shared);
    root.append(ui.form, ui.out);
  }
  command(shared);
};

const command = (shared) => {
  const names = ui.files.length ? ui.files.map((file) => file.name) : ["FILE"];
  shared.command(["prismlm", "audit", shared.model.path, ...names, "--html", "report.html"]);
};

const form = (root, shared) => {
  const most = shared.model.limits.audited;
  const input = Object.assign(make("input", "x-files"), { type: "file", multiple: true, accept: KINDS.join(",") });
  const hint = `Texts, Markdown, JSON, JSON lines or CSV with a column “text”; up to 1,000 texts and ${most.toLocaleString("en")} characters.`;
  const names = make("p", "p-note x-file-names", hint);
  const none = Object.assign(make("button", "x-example", "Remove"), { type: "button", hidden: true });
  const drop = make("div", "x-drop", make("label", "x-file-pick", make("span", null, "Drop files here, or choose them"), input), names, none);
  const text = Object.assign(make("textarea", "x-prompt"), { rows: 3, placeholder: "Or paste a text." });
  text.setAttribute("aria-label", "Text to audit");
  const go = Object.assign(make("button", "x-go", "Audit"), { type: "submit" });
  const stop = Object.assign(make("button", "x-stop", "Stop"), { type: "button", hidden: true });
  const form = make("form", "prismlm x-form", drop, text, make("div", "x-row", go, stop));
  const out = make("div", "x-out");
  const made = { form, text, input, names, go, stop, out, files: /** @type {File[]} */ ([]), abort: null };
  const choose = (files) => {
    made.files = [...files];
    names.replaceChildren(...(made.files.length ? made.files.flatMap((file, i) => [i ? ", " : "", make("bdi", null, file.name)]) : [hint]));
    none.hidden = !made.files.length;
    command(shared);
  };
  none.addEventListener("click", () => { input.value = ""; choose([]); input.focus(); });
  input.addEventListener("change", () => choose(input.files));
  for (const name of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(name, (event) => { event.preventDefault(); drop.toggleAttribute("data-over", name === "dragover"); });
  }
  drop.addEventListener("drop", (event) => {
    if (!event.dataTransfer?.files.length) return;
    choose(event.dataTransfer.files);
    form.requestSubmit();
  });
  form.addEventListener("submit", (event) => { event.preventDefault(); void audited(most); });
  return made;
};

const audited = async (most) => {
  ui.abort?.abort();
  const abort = ui.abort = new AbortController();
  const report = live();
  ui.out.replaceChildren(report.article);
  try {
    const pasted = ui.text.value.trim() ? [{ id: PASTED, text: ui.text.value }] : [];
    const texts = check([...(ui.files.length ? await textsOf(ui.files, most) : []), ...pasted], most);
    Object.assign(ui.stop, { hidden: false, disabled: false });
    ui.stop.onclick = () => {
      ui.stop.disabled = true;
      if (report.id) void api(`/answers/${report.id}/stop`, {});
      else abort.abort();
    };
    await events("/audits", { texts }, abort.signal, {
      waiting: ({ before }) => { report.note.textContent = `Waiting: ${before} before you.`; },
      start: (data) => { report.id = data.id; report.begin(data); },
      progress: ({ predictions }) => report.progress(predictions),
      row: (row) => report.row(row),
      done: (data) => report.finish(data),
      error: ({ error }) => report.fail(new Error(error)),
    });
  } catch (error) {
    report.fail(abort.signal.aborted ? new Error("Stopped before it began.") : error);
  }
  if (ui.abort === abort) ui.stop.hidden = true;
};

/** A report while it comes in, and after. */
const live = () => {
  const note = make("p", "p-note x-note", "Reading…");
  note.setAttribute("role", "status");
  const bar = Object.assign(make("progress", "x-progress"), { max: 1, value: 0 });
  bar.setAttribute("aria-label", "Predictions read");
  const head = make("header", "p-head", note, bar);
  const whole = make("div", "x-audit-whole");
  const list = make("div", "x-audit-rows");
  const article = make("article", "prismlm x-audit", head, whole, list);
  const rows = [];
  let total = 1, texts = 1, read = 0, began = performance.now();
  const table = texted(rows);
  const said = () => {
    const seconds = (performance.now() - began) / 1000;
    note.textContent = `${rows.length.toLocaleString("en")} of ${texts.toLocaleString("en")} texts, ${Math.round(read / Math.max(seconds, 1e-3)).toLocaleString("en")} tokens a second`;
  };
  const begin = (data) => {
    ({ predictions: total, texts } = data);
    bar.max = Math.max(1, total);
    began = performance.now();
    list.append(table.node);
    said();
  };
  const progress = (predictions) => { read = predictions; bar.value = predictions; said(); };
  const row = (one) => { rows.push(one); table.add(one); said(); };
  const fail = (error) => { note.textContent = ""; bar.hidden = true; article.append(problem(error)); };
  const finish = ({ id, stopped, whole: all }) => {
    if (!all) {
      fail(new Error("Stopped before the first text was read to its end."));
      return;
    }
    head.replaceChildren(figures(all), saved(id));
    if (stopped) whole.append(make("p", "p-note x-stopped", `Stopped after ${all.texts.toLocaleString("en")} of ${texts.toLocaleString("en")} texts; what follows is of these.`));
    const data = unpacked(all.shared);
    whole.append(make("h2", null, "What these texts rely on"), make("div", "p-columns-3", ...all.shares.map(shares)), documents(data, all.documents, "Documents these texts rely on most"));
    article.append(make("p", "p-caveat", CAVEAT));
    table.finish();
  };
  return { article, note, begin, progress, row, finish, fail, id: "" };
};

const figures = (all) => {
  const list = [figure(all.texts.toLocaleString("en"), "texts"), figure(all.predictions.toLocaleString("en"), "predictions"),
    figure(all.ce === null ? "–" : all.ce.toFixed(3), "cross-entropy, nats"),
    figure(all.explained_share === null ? "–" : percent(all.explained_share), "explained share, median"),
    figure(percent(all.shares[0].unattributed), "unattributed")];
  if (all.support) {
    const levels = Object.entries(all.support.levels).map(([level, count]) => `${count} ${level}`);
    list.push(figure(levels.join(", "), "texts by support"));
  }
  return make("div", "p-figures x-audit-figures", ...list);
};

const saved = (id) => make("p", "x-exports", "Save ", ...["html", "parquet", "jsonl", "csv"].map((kind) =>
  Object.assign(make("a", null, kind === "jsonl" ? "JSON lines" : kind === "csv" ? "CSV" : kind === "html" ? "HTML" : "Parquet"),
    { href: `/api/audits/${id}/report.${kind}`, download: `audit.${kind}` })));

const ORDERS = {
  order: ["as given", () => 0],
  support: ["least support", (a, b) => (a.support_score ?? 2) - (b.support_score ?? 2)],
  ce: ["largest cross-entropy", (a, b) => (b.ce ?? -1) - (a.ce ?? -1)],
  explained: ["least explained", (a, b) => (a.explained_share ?? 2) - (b.explained_share ?? 2)],
  unattributed: ["most unattributed", (a, b) => (b.unattributed ?? -1) - (a.unattributed ?? -1)],
};

/** The rows of texts, in an order that can be chosen; of many the first are shown. */
const texted = (rows) => {
  const order = make("select", "x-order", ...Object.entries(ORDERS).map(([value, [label]]) => Object.assign(make("option", null, label), { value })));
  const tbody = make("tbody");
  const columns = ["text", "cross-entropy", "explained", "support", "leans on"];
  const more = Object.assign(make("button", "x-doc-more"), { type: "button", hidden: true });
  const node = make("section", "x-audit-texts", make("div", "x-row", make("h2", null, "Texts"), make("label", "x-field", make("span", null, "order"), order)),
    make("table", "x-text-table", make("thead", null, make("tr", null, ...columns.map((name) => Object.assign(make("th", null, name), { scope: "col" })))), tbody), more);
  let count = SHOWN;
  const draw = () => {
    const [, by] = ORDERS[order.value];
    tbody.replaceChildren(...[...rows].sort(by).slice(0, count).map(line));
    more.hidden = rows.length <= count;
    more.textContent = `Show ${Math.min(SHOWN, rows.length - count)} more of ${(rows.length - count).toLocaleString("en")}`;
  };
  order.addEventListener("change", draw);
  more.addEventListener("click", () => { count += SHOWN; draw(); });
  return { node, add: (row) => { if (order.value !== "order") draw(); else if (rows.length <= count) tbody.append(line(row)); }, finish: draw };
};

const line = (row) => {
  const cell = (label, classes, ...children) => {
    const node = make("td", classes, ...children);
    node.dataset.label = label;
    return node;
  };
  const opening = row.opening.replace(/\s+/g, " ");
  const source = row.source ? [make("bdi", null, row.source[0]), make("small", null, percent(row.source[1]))] : ["–"];
  if (row.document) {
    const [id, name, share, position] = row.document;
    const address = links.document?.({ doc_id: id, position });
    const link = make(address ? "a" : "b", null, make("bdi", null, name || id));
    if (address) link.href = address;
    source.push(make("small", null, link, ` ${percent(share)}`));
  }
  return make("tr", null,
    cell("text", "x-opening", make("bdi", null, opening), make("small", null, make("bdi", null, row.text_id), ` · ${row.tokens.toLocaleString("en")} tokens`)),
    cell("cross-entropy", "p-number", row.ce === null ? "–" : row.ce.toFixed(3)),
    cell("explained", "p-number", row.explained_share === null ? "–" : percent(row.explained_share)),
    cell("support", row.support ? `x-support x-support-${row.support}` : null, row.support ?? "–", row.support ? make("small", null, row.support_score.toFixed(2)) : null),
    cell("leans on", null, ...source));
};
