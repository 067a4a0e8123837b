// Files to texts, as `prismlm audit` reads them: an id and a text each, or the messages of a chat.

/** Of a chat the text is what its messages say, to be counted.
 * @typedef {{ id: string, text: string, messages?: { role: string, content: string }[] }} Text */

const WHOLE = [".txt", ".md"];
export const KINDS = [...WHOLE, ".json", ".jsonl", ".ndjson", ".csv"];
const kindOf = (name) => KINDS.find((kind) => name.toLowerCase().endsWith(kind));

/** Return the texts of files; one that has too many characters is not read.
 * @param {File[]} files @param {number} most characters @returns {Promise<Text[]>} */
export const textsOf = async (files, most) => {
  const unknown = files.find((file) => !kindOf(file.name));
  if (unknown) throw new Error(`${unknown.name}: expected a name that ends with ${KINDS.join(", ")}.`);
  // A character takes at most four bytes, of which a file of this size has more.
  const large = files.find((file) => file.size > 4 * most);
  if (large) throw tooLong(`${large.name} has ${large.size.toLocaleString("en")} bytes`, most);
  const found = [];
  for (const file of files) found.push(...rowsOf(file.name, await decoded(file)));
  return check(found, most);
};

/** Return texts that may be sent; throw an Error that says why not. @param {Text[]} texts @param {number} most */
export const check = (texts, most) => {
  const kept = texts.filter(({ text }) => text.trim());
  if (!kept.length) throw new Error("No text: what was given is empty.");
  if (kept.length > 1000) throw new Error(`${kept.length.toLocaleString("en")} texts: 1,000 are read here at once. Use the command below for more.`);
  const characters = kept.reduce((sum, { text }) => sum + text.length, 0);
  if (characters > most) throw tooLong(`The texts have ${characters.toLocaleString("en")} characters`, most);
  const seen = new Set();
  for (const { id } of kept) {
    if (seen.has(id)) throw new Error(`Two texts are called “${id}”: give each an id of its own.`);
    seen.add(id);
  }
  return kept;
};

const tooLong = (what, most) =>
  new Error(`${what}: ${most.toLocaleString("en")} characters are read here at once. Use the command below, which has no such limit.`);

const decoded = async (file) => {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not UTF-8 text. Write it again in UTF-8.`);
  }
};

const rowsOf = (name, content) => {
  const kind = kindOf(name) ?? "";
  if (WHOLE.includes(kind)) return [{ id: name, text: content }];
  if (kind === ".csv") return csvRows(content, name).map((record, i) => asText(record, `${name}:${i + 1}`));
  if (kind === ".json") {
    const value = parsed(content, name, "an object or a list of objects; JSON lines are in a file called .jsonl");
    return (Array.isArray(value) ? value : [value]).map((record, i) => asText(record, `${name}:${i + 1}`));
  }
  return content.split("\n").flatMap((line, i) =>
    line.trim() ? [asText(parsed(line, `${name}:${i + 1}`, "one JSON object on each line"), `${name}:${i + 1}`)] : []);
};

const parsed = (text, where, expected) => {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${where} is not valid JSON (${error instanceof Error ? error.message : error}). Expected ${expected}.`);
  }
};

const asText = (record, where) => {
  if (record === null || typeof record !== "object" || Array.isArray(record)) throw new Error(`${where}: expected an object with a “text”.`);
  const id = record.id === null || record.id === undefined || record.id === "" ? where : String(record.id);
  const chat = record.messages ?? record.conversations;
  if (!("text" in record) && Array.isArray(chat)) return { id, ...asChat(chat, where) };
  if (!("text" in record)) {
    throw new Error(`${where}: there is no “text”; there is ${Object.keys(record).join(", ") || "nothing"}. The command below takes another name: --text-column.`);
  }
  if (typeof record.text !== "string") throw new Error(`${where}: the text is no string.`);
  return { id, text: record.text };
};

// As prismlm.corpus.chat has them.
const ROLES = /** @type {Record<string, string>} */ ({ human: "user", gpt: "assistant" });
const asChat = (given, where) => {
  const messages = given.map((one) => ({ role: one?.role ?? ROLES[one?.from] ?? one?.from, content: one?.content ?? one?.value }));
  if (!messages.every(({ role, content }) => typeof role === "string" && typeof content === "string")) {
    throw new Error(`${where}: expected messages that each have a “role” and a “content”, both of them text.`);
  }
  return { text: messages.map(({ content }) => content).join("\n"), messages };
};

/** Rows of a CSV by the names of its first; quoted cells may hold anything. */
export const csvRows = (content, where) => {
  const rows = /** @type {string[][]} */ ([[]]);
  let cell = "", quoted = false, was = false;
  const end = () => { rows[rows.length - 1].push(cell); cell = ""; was = false; };
  for (let i = 0; i < content.length; i++) {
    const letter = content[i];
    if (quoted) {
      if (letter !== '"') cell += letter;
      else if (content[i + 1] === '"') { cell += '"'; i++; } else quoted = false;
    } else if (letter === '"' && cell === "" && !was) quoted = was = true;
    else if (letter === ",") end();
    else if (letter === "\n" || letter === "\r") {
      if (letter === "\r" && content[i + 1] === "\n") i++;
      end();
      rows.push([]);
    } else cell += letter;
  }
  if (quoted) throw new Error(`${where} is not valid CSV: a quoted cell does not end.`);
  end();
  const [names, ...records] = rows.filter((row) => row.length > 1 || row[0] !== "");
  if (!names) throw new Error(`${where} is empty.`);
  return records.map((row) => Object.fromEntries(names.map((name, i) => [name, row[i] ?? null])));
};
