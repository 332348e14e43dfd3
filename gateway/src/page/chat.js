// The chat.

import { ask, by, cutOff, FAILURES, Failure, guarded, model } from "./server.js";

let messages = [];
let running = null;

function show(role, text) {
  const place = document.createElement("div");
  place.className = `message ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "you" : model();
  const said = document.createElement("span");
  said.textContent = text;
  place.append(who, said);
  by("messages").append(place);
  by("messages").scrollTop = by("messages").scrollHeight;
  return { place, said };
}

function note(place, text, kind) {
  const line = document.createElement("span");
  line.className = kind;
  line.textContent = text;
  place.append(line);
  by("messages").scrollTop = by("messages").scrollHeight;
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
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield parsed(data);
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

function request() {
  const system = by("system").value.trim();
  return {
    model: model(),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    max_tokens: by("max-tokens").valueAsNumber || 256,
    temperature: by("temperature").valueAsNumber || 0,
    seed: by("seed").valueAsNumber || 0,
    stream: true,
    stream_options: { include_usage: true },
    include_figures: true,
  };
}

async function send(text) {
  const mine = messages;
  mine.push({ role: "user", content: text });
  show("user", text);
  const { place, said } = show("assistant", "");
  running = new AbortController();
  by("send").disabled = true;
  by("stop").disabled = false;
  let answer = "";
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Failure(event.error.message);
      answer += event.choices?.[0]?.delta?.content ?? "";
      said.textContent = answer;
      by("messages").scrollTop = by("messages").scrollHeight;
      if (event.usage) note(place, figures(event.usage), "figures");
    }
  } catch (error) {
    if (error.name === "AbortError") note(place, "stopped", "figures");
    else if (error instanceof Failure) note(place, error.message, "error");
    else throw error;
  } finally {
    // A request without an answer is dropped from the conversation.
    if (answer) mine.push({ role: "assistant", content: answer });
    else mine.pop();
    running = null;
    by("send").disabled = false;
    by("stop").disabled = true;
  }
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
by("stop").addEventListener("click", () => running?.abort());
by("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  by("messages").replaceChildren();
  by("prompt").focus();
});
