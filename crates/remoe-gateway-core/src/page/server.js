// Requests to the server, and how their failures and errors of the page itself are shown: each in its own place and words.

export const by = (id) => document.getElementById(id);

/** A request that the server refused or that never reached it. Every other error is one of the page. */
export class Failure extends Error {}

export const FAILURES = {
  network:
    "Cannot reach the server. Check that it runs and that this computer has a connection; the page tries again every second.",
  cut: "The connection broke off before the answer was complete. Send the request again.",
  answer:
    "Cannot read the server's answer. Check that no proxy changes it and that the page is as new as the server: reload the page.",
};

/** The failure of an answer whose body ended early; an answer that was stopped stays as it is. */
export const cutOff = (cause) => (cause.name === "AbortError" ? cause : new Failure(FAILURES.cut, { cause }));

/** What this tab remembers; as long as it is open where the browser refuses storage. */
export const session = (() => {
  try {
    sessionStorage.getItem("key");
    return sessionStorage;
  } catch {
    const kept = new Map();
    return { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value) };
  }
})();

/** Sends a request; throws a Failure with the server's message if it was refused. */
export async function ask(path, options = {}) {
  const key = session.getItem("key");
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers }).catch((cause) => {
    throw cause.name === "AbortError" ? cause : new Failure(FAILURES.network, { cause });
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? `The server answered with HTTP ${response.status}. Its log says why.`;
  throw Object.assign(new Failure(said), { status: response.status });
}

/** Sends a request and returns its answer, parsed. */
export async function askJson(path) {
  const response = await ask(path);
  const text = await response.text().catch((cause) => Promise.reject(cutOff(cause)));
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw new Failure(FAILURES.answer, { cause });
  }
}

/** Shows `text`, or nothing if it is empty; true if that changed. */
function show(id, text) {
  // A screen reader announces what changes: the same text is not set twice.
  if (by(id).textContent === text) return false;
  by(id).textContent = text;
  by(id).hidden = !text;
  return true;
}

/** Shows a failure of the last poll; null if it had none. */
export const problem = (failure) => show("problem", failure ? failure.message : "");

/** Shows an error of the page's own script, which says nothing about the server. It stays until the page is reloaded. */
export function fault(error) {
  const said = error instanceof Error ? `${error.name}: ${error.message}` : String(error);
  const text =
    `This page has an error: ${said}. The server is not affected. Reload the page; if the error comes back, report it with ` +
    "the lines of the browser's console.";
  if (show("fault", text)) console.error(error);
}

/** Runs `step`, and shows its error as one of the page. */
export async function guarded(step) {
  try {
    await step();
  } catch (error) {
    fault(error);
  }
}

addEventListener("error", (event) => fault(event.error ?? event.message));
addEventListener("unhandledrejection", (event) => fault(event.reason));

export const model = () => by("model").value;

/** Fills the list of models; true if there is one. */
export async function loadModels() {
  const { data } = await askJson("/v1/models");
  const before = model();
  by("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === before)));
  return data.length > 0;
}
