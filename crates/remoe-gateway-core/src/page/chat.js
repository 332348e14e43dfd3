// The chat: turns of the one that is open, the list of those that are kept, streaming, stop and retry.

import { collect, inMessage, resultsForm, showCalls, showResults, toolsOf } from "./calls.js";
import { drop, fresh, keep, list, read, title } from "./chats.js";
import { growing } from "./markdown.js";
import { ask, by, cutOff, Failure, FAILURES, guarded, model, session } from "./server.js";
import { element, latency, money } from "./words.js";

/** Time between two writes of an answer that arrives, in ms. */
const KEEP_MS = 1000;
/** Distance from the end, in pixels, within which the conversation follows an answer. */
const NEAR = 60;

let chat = fresh();
/** Answer that arrives: its turn and what stops it. */
let running = null;

/** Runs `change`, and follows the end of the conversation if it was in sight. */
function following(change) {
  const log = by("messages");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

/** Shows a turn; returns what updates it. */
function show(turn) {
  const user = element("div", "message user");
  const asked = element("div", "said", turn.user);
  if (turn.results) showResults(asked, turn.results);
  user.append(element("span", "who", "you"), asked);
  const place = element("div", "message assistant");
  const who = element("span", "who");
  const thoughts = element("details", "thoughts");
  const thought = element("div", "said");
  thoughts.append(element("summary", "", "Thoughts"), thought);
  const said = element("div", "rich");
  const grow = growing(said);
  const calls = element("div", "calls");
  const notes = element("div", "notes");
  place.append(who, thoughts, said, calls, notes);
  const update = () => {
    who.textContent = turn.model ?? "";
    thoughts.hidden = !turn.thoughts;
    thought.textContent = turn.thoughts ?? "";
    grow(turn.answer);
    if (turn.calls) showCalls(calls, turn.calls);
    else calls.replaceChildren();
  };
  const finish = () => {
    update();
    notes.replaceChildren();
    if (turn.ended) notes.append(element("span", "ended", turn.ended));
    if (turn.figures) notes.append(element("span", "figures", turn.figures));
    if (turn.error) notes.append(element("span", "error", turn.error));
    if (turn !== chat.turns.at(-1) || running?.turn === turn) return;
    if (turn.calls) notes.append(resultsForm(turn.calls, (results) => !running && guarded(() => send("", results))));
    const retry = element("button", "retry", "Retry");
    retry.type = "button";
    retry.addEventListener("click", () => {
      if (running) return;
      // The button goes, and the focus with it.
      by("prompt").focus();
      guarded(() => answer(turn, { update, finish }));
    });
    notes.append(retry);
  };
  finish();
  by("messages").append(user, place);
  return { update, finish };
}

/** Shows all turns of the open chat, and its place in the list. */
function showChat() {
  by("messages").replaceChildren();
  for (const turn of chat.turns) show(turn);
  by("messages").scrollTop = by("messages").scrollHeight;
  session.setItem("chat", chat.id);
  listChats();
}

function listChats() {
  const kept = list();
  const all = kept.some(({ id }) => id === chat.id) ? kept : [chat, ...kept];
  by("chats").replaceChildren(...all.map((one) => new Option(title(one), one.id, false, one.id === chat.id)));
  by("delete").disabled = chat.turns.length === 0;
}

function keepChat() {
  by("unkept").hidden = keep(chat);
}

/** Opens a chat. An answer that arrives for another one stops. */
function openChat(next) {
  stop();
  chat = next;
  by("unkept").hidden = true;
  showChat();
}

function stop() {
  if (!running) return;
  running.turn.ended = "stopped";
  running.abort.abort();
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch (cause) {
    throw new Failure(FAILURES.answer, { cause });
  }
}

/** Yields the parsed events of a stream. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => Promise.reject(cutOff(error)));
    if (done) throw new Failure(FAILURES.cut);
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield parsed(data);
    }
  }
}

function figures({ completion_tokens: tokens, remoe }) {
  const count = `${tokens} ${tokens === 1 ? "token" : "tokens"}`;
  if (!remoe) return count;
  const { local, remote, fallback } = remoe.experts;
  const rate = remoe.decode_s > 0 ? (tokens - 1) / remoe.decode_s : 0;
  const share = Math.round((100 * remote) / Math.max(1, local + remote + fallback));
  const cost = remoe.cost ? `; ${money(remoe.cost.total / 1e9)}` : "";
  return `${count}, TTFT ${latency(remoe.ttft_s)}, ${Math.round(rate)} tokens/s; ` +
    `expert calls: ${local} local, ${remote} remote (${share} %)${fallback ? `, ${fallback} by fallback` : ""}${cost}`;
}

/** A number that the user has set; undefined, which leaves it to the model, if the field is empty. */
const set = (id) => (Number.isFinite(by(id).valueAsNumber) ? by(id).valueAsNumber : undefined);

/** A turn's question: a prompt, or results of tools. */
const question = ({ user, results }) =>
  results
    ? results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }))
    : [{ role: "user", content: user }];

/** Messages of a turn that `next` follows. One without an answer is left out, and so are calls without results. */
function messages(turn, next) {
  const calls = next.results && turn.calls ? { tool_calls: inMessage(turn.calls) } : {};
  if (!turn.answer && !calls.tool_calls) return turn.results ? question(turn) : [];
  return [...question(turn), { role: "assistant", content: turn.answer, ...calls }];
}

/** The request for the open chat's last turn, with `tools`. */
function request(tools) {
  const system = by("system").value.trim();
  // Results whose calls are not kept any more mean nothing.
  const turns = chat.turns.slice(Math.max(0, chat.turns.findIndex((turn) => !turn.results)));
  return {
    model: model(),
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...turns.slice(0, -1).flatMap((turn, at) => messages(turn, turns[at + 1])),
      ...question(turns.at(-1)),
    ],
    tools,
    max_tokens: set("max-tokens"),
    temperature: set("temperature"),
    top_p: set("top-p"),
    seed: set("seed"),
    stream: true,
    stream_options: { include_usage: true },
    include_figures: true,
  };
}

const ENDS = { length: "ended at the limit of tokens", content_filter: "ended by a filter" };

/** The tools that the user has set; null, and said beside their field, if they cannot be read. */
function tools() {
  let said = "";
  try {
    return toolsOf(by("tools").value);
  } catch (error) {
    said = error.message;
    by("settings").open = true;
    return null;
  } finally {
    by("tools-problem").textContent = said;
    by("tools-problem").hidden = !said;
  }
}

/** Streams the answer of the open chat's last turn. */
async function answer(turn, view) {
  const given = tools();
  if (given === null) return by("tools").focus();
  Object.assign(turn, { answer: "", thoughts: "", figures: "", ended: "", error: "", model: model() });
  delete turn.calls;
  const mine = { turn, abort: new AbortController() };
  running = mine;
  const owner = chat;
  by("send").disabled = true;
  by("stop").disabled = false;
  by("messages").setAttribute("aria-busy", "true");
  let drawn = true;
  const draw = () => {
    if (!drawn) following(view.update);
    drawn = true;
  };
  let kept = Date.now();
  try {
    view.finish();
    keepChat();
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request(given)),
      signal: mine.abort.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Failure(event.error.message);
      const choice = event.choices?.[0];
      turn.answer += choice?.delta?.content ?? "";
      turn.thoughts += choice?.delta?.reasoning_content ?? "";
      if (choice?.delta?.tool_calls) collect((turn.calls ??= []), choice.delta.tool_calls);
      if (event.usage) turn.figures = figures(event.usage);
      if (ENDS[choice?.finish_reason]) turn.ended = ENDS[choice.finish_reason];
      if (drawn) requestAnimationFrame(() => guarded(draw));
      drawn = false;
      if (Date.now() - kept > KEEP_MS) {
        keepChat();
        kept = Date.now();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") turn.ended = "stopped";
    else if (error instanceof Failure) turn.error = error.message;
    else throw error;
  } finally {
    drawn = true;
    if (running === mine) running = null;
    by("send").disabled = running !== null;
    by("stop").disabled = running === null;
    by("messages").setAttribute("aria-busy", String(running !== null));
    // Another chat may be open, and this one deleted.
    if (chat === owner) {
      following(view.finish);
      keepChat();
    } else if (read(owner.id)) keep(owner);
  }
}

/** Sends a prompt, or `results` of the calls before. */
function send(text, results) {
  // Only the last turn is asked again, and its calls are answered once.
  for (const old of [".retry", ".results"]) for (const one of by("messages").querySelectorAll(old)) one.remove();
  const turn = { user: text, answer: "", model: model(), ...(results ? { results } : {}) };
  chat.turns.push(turn);
  const view = show(turn);
  by("messages").scrollTop = by("messages").scrollHeight;
  const streaming = answer(turn, view);
  listChats();
  return streaming;
}

by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = by("prompt").value;
  if (running || !text.trim() || tools() === null) return;
  by("prompt").value = "";
  guarded(() => send(text));
});
by("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  by("ask").requestSubmit();
});
by("stop").addEventListener("click", stop);
by("new").addEventListener("click", () => {
  openChat(fresh());
  by("prompt").focus();
});
by("delete").addEventListener("click", () => {
  if (!confirm("Delete this chat?")) return;
  drop(chat.id);
  openChat(list()[0] ?? fresh());
});
by("chats").addEventListener("change", () => openChat(read(by("chats").value) ?? fresh()));
// Another tab has kept or deleted one.
addEventListener("storage", () => guarded(listChats));
addEventListener("pagehide", () => {
  if (!running) return;
  running.turn.ended = "stopped";
  keep(chat);
});

guarded(() => {
  chat = read(session.getItem("chat")) ?? chat;
  showChat();
});
