// The chat: turns of the one that is open, the list of those that are kept, streaming, stop and retry.

import { drop, fresh, keep, list, read, title } from "./chats.js";
import { growing } from "./markdown.js";
import { ask, by, cutOff, Failure, FAILURES, guarded, model, session } from "./server.js";

/** Time between two writes of an answer that arrives, in ms. */
const KEEP_MS = 1000;
/** Distance from the end, in pixels, within which the conversation follows an answer. */
const NEAR = 60;

let chat = fresh();
/** Answer that arrives: its turn and what stops it. */
let running = null;

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

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
  user.append(element("span", "who", "you"), element("div", "said", turn.user));
  const place = element("div", "message assistant");
  const who = element("span", "who");
  const thoughts = element("details", "thoughts");
  const thought = element("div", "said");
  thoughts.append(element("summary", "", "Thoughts"), thought);
  const said = element("div", "rich");
  const grow = growing(said);
  const notes = element("div", "notes");
  place.append(who, thoughts, said, notes);
  const update = () => {
    who.textContent = turn.model ?? "";
    thoughts.hidden = !turn.thoughts;
    thought.textContent = turn.thoughts ?? "";
    grow(turn.answer);
  };
  const finish = () => {
    update();
    notes.replaceChildren();
    if (turn.ended) notes.append(element("span", "ended", turn.ended));
    if (turn.figures) notes.append(element("span", "figures", turn.figures));
    if (turn.error) notes.append(element("span", "error", turn.error));
    if (turn !== chat.turns.at(-1) || running?.turn === turn) return;
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
  const cost = remoe.cost ? `; $${(remoe.cost.total / 1e9).toLocaleString("en", { maximumSignificantDigits: 3 })}` : "";
  return `${count}, TTFT ${Math.round(1000 * remoe.ttft_s)} ms, ${Math.round(rate)} tokens/s; ` +
    `expert calls: ${local} local, ${remote} remote (${share} %)${fallback ? `, ${fallback} by fallback` : ""}${cost}`;
}

/** A number that the user has set; undefined, which leaves it to the model, if the field is empty. */
const set = (id) => (Number.isFinite(by(id).valueAsNumber) ? by(id).valueAsNumber : undefined);

/** The request for the open chat's last turn. Turns before it that have no answer are left out. */
function request() {
  const system = by("system").value.trim();
  const said = chat.turns.slice(0, -1).filter((turn) => turn.answer);
  return {
    model: model(),
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...said.flatMap(({ user, answer }) => [{ role: "user", content: user }, { role: "assistant", content: answer }]),
      { role: "user", content: chat.turns.at(-1).user },
    ],
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

/** Streams the answer of the open chat's last turn. */
async function answer(turn, view) {
  Object.assign(turn, { answer: "", thoughts: "", figures: "", ended: "", error: "", model: model() });
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
      body: JSON.stringify(request()),
      signal: mine.abort.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Failure(event.error.message);
      const choice = event.choices?.[0];
      turn.answer += choice?.delta?.content ?? "";
      turn.thoughts += choice?.delta?.reasoning_content ?? "";
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

function send(text) {
  // Only the last turn is asked again.
  for (const retry of by("messages").querySelectorAll(".retry")) retry.remove();
  const turn = { user: text, answer: "", model: model() };
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
  if (running || !text.trim()) return;
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
