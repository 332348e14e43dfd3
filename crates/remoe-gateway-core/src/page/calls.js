// Tool calls of answers: collected from a stream, shown, and answered by the user, whose page runs no tools.

/** Most calls of one answer that are shown. */
const MOST = 64;

/** Adds the pieces of calls in a delta to `calls`. */
export function collect(calls, pieces) {
  for (const piece of pieces ?? []) {
    const at = piece.index ?? calls.length;
    if (!Number.isInteger(at) || at < 0 || at >= MOST) continue;
    while (calls.length <= at) calls.push({ id: "", name: "", arguments: "" });
    const call = calls[at];
    call.id = piece.id ?? call.id;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

/** Calls as the API has them in messages. */
export const inMessage = (calls) =>
  calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));

/** Arguments on several lines; as they came if they are not JSON. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function named(summary, name) {
  const code = document.createElement("code");
  code.textContent = name;
  summary.append(code);
  return summary;
}

/** A folded block: what it is, of which tool, and a text. */
function block(said, name, text, open) {
  const details = document.createElement("details");
  details.className = "call";
  details.open = open;
  const summary = document.createElement("summary");
  summary.textContent = `${said} `;
  const body = document.createElement("pre");
  body.setAttribute("tabindex", "0");
  body.setAttribute("aria-label", `${said} ${name}`);
  body.textContent = text;
  details.append(named(summary, name), body);
  return details;
}

/** Shows `calls` in `place`, unfolded. */
export function showCalls(place, calls) {
  place.replaceChildren(...calls.map((call) => block("Tool call:", call.name, pretty(call.arguments), true)));
}

/** Shows what the user answered, folded. */
export function showResults(place, results) {
  place.replaceChildren(...results.map((result) => block("Tool result:", result.name, result.content, false)));
}

/** A form for the results of `calls`; `send` takes them. */
export function resultsForm(calls, send) {
  const form = document.createElement("form");
  form.className = "results";
  const fields = calls.map((call) => {
    const label = document.createElement("label");
    label.textContent = `Result of ${call.name}`;
    const field = document.createElement("textarea");
    field.rows = 2;
    label.append(field);
    form.append(label);
    return field;
  });
  const button = document.createElement("button");
  button.textContent = calls.length === 1 ? "Send result" : "Send results";
  form.append(button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(calls.map(({ id, name }, at) => ({ id, name, content: fields[at].value })));
  });
  return form;
}

/** The tools that `text` lists; undefined if it is empty. Throws an Error that says what is wrong. */
export function toolsOf(text) {
  if (!text.trim()) return undefined;
  const expected = 'expected a JSON list such as [{"type": "function", "function": {"name": "f", "parameters": {}}}]';
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Cannot read the tools: ${error.message}; ${expected}.`);
  }
  const isTool = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  if (!Array.isArray(tools) || !tools.every(isTool)) throw new Error(`Cannot read the tools: ${expected}.`);
  return tools.length > 0 ? tools : undefined;
}
