// Talking to the server: JSON, and events that it sends while a model writes.
const failed = async (response) => {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text); // of OpenAI's routes, one with more than a message
    return new Error(error?.message ?? error ?? text);
  } catch {
    return new Error(text || `the server answered ${response.status}`);
  }
};
/** What is said where the server does not answer. */
export const away = () => new Error("The server cannot be reached. Is `prismlm explore` still running?");
const reached = async (path, options) => {
  try {
    return await fetch(`/api${path}`, options);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw away();
  }
};
const posted = (body, signal) => ({
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
});

/** Return the JSON at a path; with a body it is posted. Throws an Error that says why not.
 * @param {string} path @param {object} [body] @param {AbortSignal} [signal] @returns {Promise<any>} */
export const api = async (path, body, signal) => {
  const response = await reached(path, body ? posted(body, signal) : { signal });
  if (!response.ok) throw await failed(response);
  return response.json();
};

/** Ask, or post a body, and call the handler of each event that comes back, until the last; `chunk` is one of OpenAI's, which have no names.
 * @param {string} path @param {object | null} body @param {AbortSignal} signal
 * @param {Record<string, (data: any) => void>} handlers */
export const events = async (path, body, signal, handlers) => {
  const response = await reached(path, body ? posted(body, signal) : { signal });
  if (!response.ok || !response.body) throw await failed(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw signal.aborted ? error : new Error("The server went away in the middle of the answer.");
    });
    held += value ?? "";
    const blocks = held.split("\n\n");
    held = blocks.pop() ?? "";
    for (const block of blocks) {
      const data = block.match(/^data: (.*)$/m)?.[1] ?? "null", last = data === "[DONE]";
      const name = block.match(/^event: (.*)$/m)?.[1] ?? "chunk";
      ended ||= last || name === "done" || name === "error";
      if (!last) handlers[name]?.(JSON.parse(data));
    }
    if (done) break;
  }
  if (!ended) throw new Error("The server stopped in the middle of the answer.");
};

/** Words of a command as a shell takes them. @param {(string | number)[]} words */
export const shell = (words) => words.map((word) => {
  const text = String(word);
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}).join(" ");
