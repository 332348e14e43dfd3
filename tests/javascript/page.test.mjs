// The scripts of the gateway's page, in Node without packages:
//
//     node --test tests/javascript/page.test.mjs

import assert from "node:assert/strict";
import { cpSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";
import { Element, parse } from "./dom.mjs";

const FILES = process.env.REMOE_PAGE ?? fileURLToPath(new URL("../../crates/remoe-gateway-core/src/page", import.meta.url));

const HISTORY = [{ state: "waking", ago_s: 90 }, { state: "active", ago_s: 89 }, { state: "asleep", ago_s: 30 }];
const ASLEEP = {
  model: "m", state: "asleep", generation: null, main: null, card: null, groups: [], experts: [], rivals: [],
  sleep: { quiet_s: 40, idle_s: 10, history: HISTORY, wake: null },
  cost: { per_hour: 0, paid: 2_000_000, requests: 1_250, today: 1_250, tenant_today: null },
};
const AWAKE = {
  ...ASLEEP,
  state: "active",
  generation: 3,
  planned: true,
  main: { experts: "0:0-1", busy: 0.25 },
  groups: [{ name: "group-0", experts: "0:2-3", replicas: 1, busy: 0.5, functions: [{ address: "127.0.0.1:9001", busy: 0.5 }] }],
  experts: [{ layer: 0, pairs: [4, 3, 2, 1] }],
  expected: { ttft_s: 0.1, tpot_s: 0.01, cost: 0.00001 },
  sleep: {
    quiet_s: 4,
    idle_s: 10,
    history: [...HISTORY, { state: "waking", ago_s: 5 }, { state: "active", ago_s: 4 }],
    wake: {
      ago_s: 5,
      parts: Object.entries({ decide: 0, schedule: 0.1, start: 0.4, load: 0.2, ready: 0, first: 0.3 }).map(([name, s]) => ({ name, s })),
    },
  },
  rivals: [{ name: "CPU only", ttft_s: 0.2, tpot_s: 0.02, cost: 0.00002, violations: ["ttft"] }],
};

const json = (body, status = 200) => new Response(JSON.stringify(body), { status });
const refused = () => Promise.reject(new TypeError("fetch failed"));

/** Storage of a browser that keeps at most `room` characters. */
class Storage {
  constructor(room = Infinity) {
    Object.defineProperties(this, { kept: { value: new Map() }, room: { value: room, writable: true } });
  }
  get length() {
    return this.kept.size;
  }
  key(at) {
    return [...this.kept.keys()][at] ?? null;
  }
  getItem(name) {
    return this.kept.get(name) ?? null;
  }
  setItem(name, value) {
    const others = [...this.kept].filter(([other]) => other !== name).reduce((sum, [key, text]) => sum + key.length + text.length, 0);
    if (others + name.length + String(value).length > this.room) throw new DOMException("full", "QuotaExceededError");
    this.kept.set(name, String(value));
  }
  removeItem(name) {
    this.kept.delete(name);
  }
}

/**
 * Opens the page in a document of its own. `answers` maps paths to what a request gets; `tick` runs what waits for a
 * timer. Storage is given to open the same browser again.
 */
async function open(answers, { local = new Storage(), session = new Storage() } = {}) {
  const folder = mkdtempSync(join(tmpdir(), "remoe-page-"));
  cpSync(FILES, folder, { recursive: true });
  writeFileSync(join(folder, "package.json"), '{"type": "module"}');
  const document = parse(readFileSync(join(folder, "index.html"), "utf8"));
  const [timers, listeners, requests, logged] = [[], new Map(), [], []];
  const given = {
    document,
    localStorage: local,
    sessionStorage: session,
    setTimeout: (step) => timers.push(step),
    clearTimeout: (number) => delete timers[number - 1],
    requestAnimationFrame: (step) => timers.push(step),
    addEventListener: (kind, listener) => listeners.set(kind, [...(listeners.get(kind) ?? []), listener]),
    Option: function (text, value, _, selected) {
      const option = new Element("option");
      option.textContent = text;
      Object.assign(option, { value, selected });
      return option;
    },
    fetch: async (url, options) => {
      requests.push({ url, body: options.body && JSON.parse(options.body) });
      return answers[url.split("?")[0]](options);
    },
    console: { ...console, error: (error) => logged.push(error) },
  };
  const before = Object.fromEntries(Object.keys(given).map((name) => [name, globalThis[name]]));
  const settle = async () => {
    for (let turns = 0; turns < 20; turns += 1) await new Promise((done) => setImmediate(done));
  };
  Object.assign(globalThis, given);
  // In turn, as a browser runs the modules of a page.
  for (const script of document.querySelectorAll("script")) {
    await import(pathToFileURL(join(folder, script.getAttribute("src").replace("/page/", ""))));
  }
  await settle();
  return {
    document,
    requests,
    logged,
    by: document.getElementById,
    said: (id) => (document.getElementById(id).hidden ? "" : document.getElementById(id).textContent),
    settle,
    tick: async () => {
      for (const step of timers.splice(0)) step?.();
      await settle();
    },
    fire: (kind, event) => listeners.get(kind)?.forEach((listener) => listener(event)),
    close: () => {
      Object.assign(globalThis, before);
      rmSync(folder, { recursive: true });
    },
  };
}

const serving = (placement, more = {}) => ({
  "/v1/models": () => json({ data: [{ id: "m" }] }),
  "/v1/placement": () => json(placement.now),
  ...more,
});

test("page_opened_asleep_lists_functions_after_wake", async () => {
  const placement = { now: ASLEEP };
  const page = await open(serving(placement));
  assert.match(page.said("cell"), /^Scaled to zero/);
  placement.now = AWAKE;
  await page.tick();
  assert.equal(page.said("problem"), "");
  const lines = page.by("functions").querySelectorAll("tr").map((line) => line.textContent);
  assert.match(lines.slice(1).join(), /^mainbeside the engine2 of 4.*25 %,group-0127\.0\.0\.1:90012 of 4.*50 %$/);
  assert.doesNotMatch(page.said("cell"), /Scaled to zero/);
  assert.deepEqual(page.logged, []);
  page.close();
});

test("other_model_that_sleeps_takes_away_the_first_ones_tables", async () => {
  const placement = { now: AWAKE };
  const page = await open(serving(placement));
  assert.equal(page.by("map").querySelectorAll("rect").length, 4);
  placement.now = { ...ASLEEP, model: "n" };
  await page.tick();
  assert.equal(page.by("map").querySelectorAll("rect").length, 0);
  assert.equal(page.by("functions").tBodies[0].children.length, 0);
  assert.ok(page.by("rivals").hidden);
  placement.now = { ...AWAKE, model: "n" };
  await page.tick();
  assert.equal(page.by("rivals").tBodies[0].children.length, 2);
  assert.equal(page.said("fault"), "");
  page.close();
});

test("error_of_the_script_does_not_read_as_a_dead_server", async () => {
  const placement = { now: { ...AWAKE, groups: [{ name: "group-0" }] } };
  const page = await open(serving(placement));
  assert.equal(page.said("problem"), "");
  assert.match(page.said("fault"), /^This page has an error: TypeError: .*The server is not affected\. Reload the page/s);
  assert.equal(page.logged.length, 1);
  // It is polled again all the same, and said once.
  await page.tick();
  assert.equal(page.logged.length, 1);
  placement.now = AWAKE;
  await page.tick();
  assert.equal(page.by("functions").tBodies[0].children.length, 2);
  page.close();
});

test("uncaught_error_is_shown_as_one_of_the_page", async () => {
  const page = await open(serving({ now: ASLEEP }));
  page.fire("error", { error: new RangeError("too deep") });
  assert.match(page.said("fault"), /RangeError: too deep/);
  page.fire("unhandledrejection", { reason: new TypeError("no function") });
  assert.match(page.said("fault"), /TypeError: no function/);
  assert.equal(page.said("problem"), "");
  page.close();
});

test("failures_of_requests_say_what_to_do_and_go_away", async () => {
  const placement = { now: ASLEEP };
  let answer = refused;
  const page = await open(serving(placement, { "/v1/placement": () => answer() }));
  assert.match(page.said("problem"), /^Cannot reach the server\. Check that it runs/);
  assert.equal(page.said("fault"), "");
  answer = () => new Response("<html>proxy</html>");
  await page.tick();
  assert.match(page.said("problem"), /^Cannot read the server's answer\. Check that no proxy/);
  answer = () => json({ error: { message: "wrong key: send another" } }, 401);
  await page.tick();
  assert.equal(page.said("problem"), "wrong key: send another");
  answer = () => new Response("", { status: 502 });
  await page.tick();
  assert.match(page.said("problem"), /HTTP 502/);
  answer = () => json(AWAKE);
  await page.tick();
  assert.equal(page.said("problem"), "");
  assert.equal(page.said("fault"), "");
  page.close();
});

test("chat_without_a_server_says_so_beside_the_prompt", async () => {
  const page = await open(serving({ now: AWAKE }, { "/v1/chat/completions": refused }));
  page.by("prompt").value = "What is a lake?";
  page.by("ask").requestSubmit();
  await page.settle();
  assert.match(page.by("messages").querySelector(".error").textContent, /^Cannot reach the server/);
  assert.equal(page.said("fault"), "");
  assert.ok(!page.by("send").disabled);
  page.close();
});

const chunk = (delta, finish = null) => `data: ${JSON.stringify({ choices: [{ delta, finish_reason: finish }] })}\n\n`;
const DONE = "data: [DONE]\n\n";
const USAGE = `data: ${JSON.stringify({ choices: [], usage: { completion_tokens: 2 } })}\n\n`;

/** A stream that the test feeds, and that ends with an AbortError when it is stopped. */
function stream() {
  let feed;
  const body = new ReadableStream({ start: (controller) => (feed = controller) });
  const bytes = new TextEncoder();
  return {
    answer: ({ signal }) => {
      signal.addEventListener("abort", () => feed.error(new DOMException("aborted", "AbortError")));
      return new Response(body);
    },
    say: (text) => feed.enqueue(bytes.encode(text)),
    end: () => feed.close(),
  };
}

const whole = (...texts) => () => new Response([...texts.map((content) => chunk({ content })), USAGE, DONE].join(""));

async function ask(page, text) {
  page.by("prompt").value = text;
  page.by("ask").requestSubmit();
  await page.settle();
}

const spoken = (page) => {
  const shown = page.by("messages").all().filter(({ className }) => ["said", "rich"].includes(className));
  return shown.map((place) => place.textContent).filter(Boolean);
};
const titles = (page) => page.by("chats").querySelectorAll("option").map((option) => option.textContent);

test("chat_is_there_after_reload_and_others_can_be_chosen", async () => {
  const browser = { local: new Storage(), session: new Storage() };
  const answers = serving({ now: AWAKE }, { "/v1/chat/completions": whole("A body ", "of water.") });
  let page = await open(answers, browser);
  await ask(page, "What is a lake?");
  page.by("new").click();
  await ask(page, "What is a sea?");
  assert.deepEqual(spoken(page), ["What is a sea?", "A body of water."]);
  page.close();
  page = await open(answers, browser);
  assert.deepEqual(spoken(page), ["What is a sea?", "A body of water."]);
  assert.match(page.by("messages").querySelector(".figures").textContent, /^2 tokens/);
  assert.deepEqual(titles(page).sort(), ["What is a lake?", "What is a sea?"]);
  const lake = page.by("chats").querySelectorAll("option").find((option) => option.textContent === "What is a lake?");
  page.by("chats").value = lake.value;
  page.by("chats").fire("change");
  assert.deepEqual(spoken(page), ["What is a lake?", "A body of water."]);
  // What is kept is part of the next request.
  await ask(page, "And a sea?");
  const { messages } = page.requests.at(-1).url.includes("placement") ? {} : page.requests.at(-1).body;
  assert.deepEqual(messages.map(({ role }) => role), ["user", "assistant", "user"]);
  globalThis.confirm = () => true;
  page.by("delete").click();
  assert.deepEqual(titles(page), ["What is a sea?"]);
  assert.equal(page.said("fault"), "");
  page.close();
});

test("sampling_is_the_models_unless_the_user_sets_it", async () => {
  const page = await open(serving({ now: AWAKE }, { "/v1/chat/completions": whole("a") }));
  await ask(page, "one");
  const plain = page.requests.findLast(({ body }) => body).body;
  for (const field of ["temperature", "top_p", "seed", "max_tokens"]) assert.ok(!(field in plain), field);
  page.by("temperature").value = "0";
  page.by("max-tokens").value = "7";
  await ask(page, "two");
  const { temperature, max_tokens: tokens, seed } = page.requests.findLast(({ body }) => body).body;
  assert.deepEqual([temperature, tokens, seed], [0, 7, undefined]);
  page.close();
});

test("stopped_answer_stays_and_is_retried", async () => {
  const browser = { local: new Storage(), session: new Storage() };
  const first = stream();
  let respond = first.answer;
  let page = await open(serving({ now: AWAKE }, { "/v1/chat/completions": (options) => respond(options) }), browser);
  await ask(page, "What is a lake?");
  assert.equal(page.by("messages").querySelectorAll(".retry").length, 0);
  first.say(chunk({ reasoning_content: "hm" }) + chunk({ content: "Half an ans" }));
  await page.settle();
  page.by("stop").click();
  await page.settle();
  assert.deepEqual(spoken(page), ["What is a lake?", "hm", "Half an ans"]);
  assert.equal(page.by("messages").querySelector(".ended").textContent, "stopped");
  assert.ok(page.by("stop").disabled && !page.by("send").disabled);
  respond = whole("Water.");
  page.by("messages").querySelector(".retry").click();
  await page.settle();
  assert.deepEqual(spoken(page), ["What is a lake?", "Water."]);
  assert.equal(page.requests.findLast(({ body }) => body).body.messages.length, 1);
  page.close();
  page = await open({}, browser);
  assert.deepEqual(spoken(page), ["What is a lake?", "Water."]);
  page.close();
});

test("reload_in_the_middle_of_an_answer_keeps_its_part", async () => {
  const browser = { local: new Storage(), session: new Storage() };
  const endless = stream();
  const answers = serving({ now: AWAKE }, { "/v1/chat/completions": endless.answer });
  let page = await open(answers, browser);
  await ask(page, "What is a lake?");
  endless.say(chunk({ content: "Half an ans" }));
  await page.settle();
  page.fire("pagehide");
  page.close();
  page = await open(answers, browser);
  assert.deepEqual(spoken(page), ["What is a lake?", "Half an ans"]);
  assert.equal(page.by("messages").querySelectorAll(".retry").length, 1);
  page.close();
});

test("stream_that_ends_early_says_so_and_is_retried", async () => {
  let texts = [chunk({ content: "Half" })];
  const page = await open(serving({ now: AWAKE }, { "/v1/chat/completions": () => new Response(texts.join("")) }));
  await ask(page, "one");
  assert.match(page.by("messages").querySelector(".error").textContent, /^The connection broke off before the answer was complete/);
  texts = [chunk({ content: "Half a" }), "data: {nonsense\n\n"];
  page.by("messages").querySelector(".retry").click();
  await page.settle();
  assert.match(page.by("messages").querySelector(".error").textContent, /^Cannot read the server's answer/);
  texts = [chunk({ content: "Whole" }, "length"), DONE];
  page.by("messages").querySelector(".retry").click();
  await page.settle();
  assert.deepEqual(spoken(page), ["one", "Whole"]);
  assert.equal(page.by("messages").querySelectorAll(".error").length, 0);
  assert.equal(page.by("messages").querySelector(".ended").textContent, "ended at the limit of tokens");
  assert.equal(page.said("fault"), "");
  page.close();
});

test("turn_without_an_answer_is_left_out_of_the_next_request", async () => {
  let respond = () => json({ error: { message: "queue is full: try again later" } }, 429);
  const page = await open(serving({ now: AWAKE }, { "/v1/chat/completions": () => respond() }));
  await ask(page, "one");
  assert.equal(page.by("messages").querySelector(".error").textContent, "queue is full: try again later");
  respond = whole("a");
  await ask(page, "two");
  assert.deepEqual(page.requests.findLast(({ body }) => body).body.messages, [{ role: "user", content: "two" }]);
  assert.equal(page.by("messages").querySelectorAll(".retry").length, 1);
  page.close();
});

/** A module of the page, alone. */
async function load(name) {
  const folder = mkdtempSync(join(tmpdir(), "remoe-page-"));
  cpSync(FILES, folder, { recursive: true });
  writeFileSync(join(folder, "package.json"), '{"type": "module"}');
  const module = await import(pathToFileURL(join(folder, name)));
  rmSync(folder, { recursive: true });
  return module;
}

/** The module of kept chats beside `local`. */
async function chats(local) {
  globalThis.localStorage = local;
  return load("chats.js");
}

test("kept_chats_stay_within_their_bounds", async () => {
  const local = new Storage();
  const { BOUNDS, fresh, keep, list, read } = await chats(local);
  local.setItem("other", "stays");
  const turn = (size) => ({ user: "u", answer: "x".repeat(size) });
  for (let number = 0; number < 120; number += 1) assert.ok(keep({ id: `${number}-a`, turns: [turn(100)] }));
  assert.deepEqual([list().length, list()[0].id, list().at(-1).id], [BOUNDS.chats, "119-a", "70-a"]);
  // A large one takes the place of older ones, a long one loses its first turns, a huge turn is not kept.
  assert.ok(keep({ id: "200-a", turns: [turn(BOUNDS.characters / 2)] }));
  assert.ok(keep({ id: "201-a", turns: [turn(BOUNDS.characters * 0.6)] }));
  assert.deepEqual(list().map(({ id }) => id), ["201-a"]);
  assert.ok(keep({ id: "202-a", turns: Array.from({ length: 40 }, () => turn(BOUNDS.characters / 30)) }));
  assert.equal(read("202-a").turns.length, 29);
  assert.ok(!keep({ id: "203-a", turns: [turn(BOUNDS.characters)] }));
  const characters = [...local.kept.values()].reduce((sum, text) => sum + text.length, 0);
  assert.ok(characters <= BOUNDS.characters + 5, String(characters));
  assert.equal(local.getItem("other"), "stays");
  assert.ok(fresh().id !== fresh().id);
});

test("full_or_forbidden_storage_and_spoiled_entries_are_no_errors", async () => {
  const local = new Storage(1000);
  const { keep, list, read } = await chats(local);
  const turns = [{ user: "u", answer: "x".repeat(300) }];
  for (const id of ["1-a", "2-a", "3-a", "4-a"]) assert.ok(keep({ id, turns }));
  assert.deepEqual(list().map(({ id }) => id), ["4-a", "3-a"]);
  assert.ok(!keep({ id: "5-a", turns: [{ user: "u", answer: "x".repeat(1000) }] }));
  assert.deepEqual(list().map(({ id }) => id), ["4-a", "3-a"], "what cannot be kept replaces nothing");
  local.room = Infinity;
  for (const id of ["3-a", "4-a"]) local.removeItem(`remoe.chat.${id}`);
  const spoiled = ["", "{", "null", "[]", '{"version":2,"turns":[]}', '{"version":1,"turns":[{"user":1,"answer":""}]}'];
  spoiled.forEach((text, number) => local.setItem(`remoe.chat.9${number}-b`, text));
  assert.ok(spoiled.every((_, number) => read(`9${number}-b`) === null));
  assert.deepEqual(list(), []);
  assert.ok(keep({ id: "6-a", turns: [{ ...turns[0], other: () => 1 }] }));
  assert.deepEqual(read("6-a").turns, turns);
  const page = await open(serving({ now: AWAKE }, { "/v1/chat/completions": whole("a") }), { local: null, session: null });
  await ask(page, "one");
  assert.deepEqual(spoken(page), ["one", "a"]);
  assert.ok(!page.by("unkept").hidden);
  assert.equal(page.said("fault"), "");
  page.close();
});

/** What an element is, as text: tags, attributes and texts. */
function written(node) {
  if (node.tag === undefined) return node.data;
  const attributes = [...node.attributes].filter(([name]) => name !== "tabindex").map(([name, value]) => ` ${name}="${value}"`);
  return `<${node.tag}${attributes.join("")}>${node.children.map(written).join("")}</${node.tag}>`;
}

/** Shows `parts` as an answer that arrives so. */
function rendered({ growing }, ...parts) {
  globalThis.document = parse("");
  const place = new Element("div");
  const grow = growing(place);
  let text = "";
  for (const part of parts) grow((text += part));
  return place;
}

const html = (module, ...parts) => rendered(module, ...parts).children.map(written).join("");

test("markdown_becomes_elements", async () => {
  const module = await load("markdown.js");
  const link = (href, text) => `<a href="${href}" rel="noopener noreferrer" target="_blank">${text}</a>`;
  const code = (language, text) =>
    `<div class="code"><div class="bar"><span class="language">${language}</span><button type="button" class="copy">Copy</button>` +
    `</div><pre><code>${text}</code></pre></div>`;
  const cases = [
    ["plain", "<p>plain</p>"],
    ["one\ntwo\n\nthree", "<p>one<br></br>two</p><p>three</p>"],
    ["# A\n###### b", "<h3>A</h3><h6>b</h6>"],
    ["#tag", "<p>#tag</p>"],
    ["**b** *i* ***both*** __b__ _i_", "<p><strong>b</strong> <em>i</em> <strong><em>both</em></strong> <strong>b</strong> <em>i</em></p>"],
    ["*foo**bar**baz*", "<p><em>foo<strong>bar</strong>baz</em></p>"],
    ["2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"],
    ["a `x < *y*` b ``c`d`` `open", "<p>a <code>x < *y*</code> b <code>c`d</code> `open</p>"],
    ["\\*not\\* \\`code\\`", "<p>*not* `code`</p>"],
    ["- a\n- b\n  - c\n\n  more\n- d\nlazy", "<ul><li>a</li><li>b<ul><li>c</li></ul><p>more</p></li><li>d<br></br>lazy</li></ul>"],
    ["3. a\n4. b\n   ```js\n   f()\n   ```", `<ol start="3"><li>a</li><li>b${code("js", "f()")}</li></ol>`],
    ["1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"],
    ["> q\n> - a\n\nb", "<blockquote><p>q</p><ul><li>a</li></ul></blockquote><p>b</p>"],
    ["---\n* * *", "<hr></hr><hr></hr>"],
    ["```python\ndef f():\n\n    return '<b>'\n```\nend", code("python", "def f():\n\n    return '<b>'") + "<p>end</p>"],
    ["~~~~\n```\n~~~\nopen", code("code", "```\n~~~\nopen")],
    ["a|b\n-|-\n1|`2`\n3 \\| 4", '<div class="table"><table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>' +
      "<tbody><tr><td>1</td><td><code>2</code></td></tr><tr><td>3 | 4</td></tr></tbody></table></div>"],
    ["[a *b*](https://x.org/c_(d) \"t\") ", `<p>${link("https://x.org/c_(d)", "a <em>b</em>")}</p>`],
    ["see https://x.org/a?b=1_2. (http://y.org)", `<p>see ${link("https://x.org/a?b=1_2", "https://x.org/a?b=1_2")}. (${link("http://y.org/", "http://y.org")})</p>`],
    ["![i](https://x.org/i.png)", `<p>${link("https://x.org/i.png", "i")}</p>`],
    ["[https://bank.org](https://x.org)", `<p>${link("https://x.org/", "<span>https://bank.org</span>")}</p>`],
    ["[a](javascript:alert(1)) [b](//x.org) [c](data:text/html,x)", "<p>[a](javascript:alert(1)) [b](//x.org) [c](data:text/html,x)</p>"],
    ["*a [b* c](https://x.org)", `<p><em>a [b</em> c](${link("https://x.org/", "https://x.org")})</p>`],
    ["<script>alert(1)</script>", "<p><script>alert(1)</script></p>"],
  ];
  for (const [text, expected] of cases) assert.equal(html(module, text.trimEnd()), expected, text);
});

/** Numbers from 0 to 1, the same ones in each run. */
function numbers(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

const PIECES = [
  "`", "``", "```", "~~~", "*", "**", "***", "_", "__", "[", "]", "](", "(", ")", "![", "<", ">", "> ", "- ", "1. ", "# ", "|", "|-|-|", "\n",
  "\n\n", "  ", "    ", "\\", "a", "b c", "é", "---", "\t", "\r\n", "https://x.org", "javascript:alert(1)", "](javascript:alert(1))", "](https://x.org)",
  "<script>alert(1)</script>", '<img src=x onerror="alert(1)">', "](https://x.org\" onclick=\"alert(1))", "&lt;", "\0", "\u202e", "[x]: data:a",
];

/** Every element and attribute is allowed, every address is of the web. */
function check(place, { ALLOWED }, text) {
  for (const node of place.all()) {
    if (node.tag === undefined) continue;
    assert.ok(Object.hasOwn(ALLOWED, node.tag), `${node.tag}: ${JSON.stringify(text)}`);
    for (const [name, value] of node.attributes) {
      assert.ok(ALLOWED[node.tag].includes(name), `${node.tag} ${name}: ${JSON.stringify(text)}`);
      if (name === "href") assert.match(value, /^https?:\/\/[^"<>\s]+$/);
      if (name === "rel") assert.equal(value, "noopener noreferrer");
    }
    for (const [kind] of node.listeners) assert.ok(node.tag === "button" && kind === "click");
  }
}

test("hostile_markdown_yields_allowed_elements_alone_however_it_arrives", async () => {
  const module = await load("markdown.js");
  const tags = ["p", "h3", "h4", "h5", "h6", "hr", "br", "strong", "em", "ul", "ol", "li", "blockquote", "code", "pre", "table", "thead",
    "tbody", "tr", "th", "td", "div", "span", "button", "a"];
  assert.deepEqual(Object.keys(module.ALLOWED).sort(), tags.sort());
  const attributes = ["class", "href", "rel", "scope", "start", "tabindex", "target", "type"];
  assert.deepEqual([...new Set(Object.values(module.ALLOWED).flat())].sort(), attributes);
  const number = numbers(49);
  for (let round = 0; round < 1000; round += 1) {
    const parts = Array.from({ length: 1 + Math.floor(number() * 30) }, () => PIECES[Math.floor(number() * PIECES.length)]);
    const text = parts.join("");
    const place = rendered(module, text);
    check(place, module, text);
    // In pieces and letter by letter it becomes the same.
    assert.equal(html(module, ...parts), place.children.map(written).join(""), JSON.stringify(text));
    assert.equal(html(module, ...text), place.children.map(written).join(""), JSON.stringify(text));
  }
});

test("hostile_markdown_takes_linear_time", async () => {
  const module = await load("markdown.js");
  const units = [
    "`", "` ", "`` `", "a`", "```\n", "```x`\n", "*", "* ", "*a ", "**a ", "*a **b ", "_a", "a*", "***a", "[", "![", "[a](", "[](", "](", "[a](b \"",
    "[a](https://x.org)", "*[a*](https://x.org)", "https://", "http://a)", "http://x.org...", "> ", ">\n", "- ", "- a\n", "- a\n  - b\n", "  ", "\n", "1. a\n\n",
    "|", "|\n", "a|b\n", "|-", "|a|\n|-|\n", "#", "# a\n", "\\", "\\`", "<", "<script>", "\t", "~~~\n~~~~\n", " a\n", "-", "- - - ", "_ _", "h", "\\|",
  ];
  const taken = (unit, size) => {
    const text = unit.repeat(Math.ceil(size / unit.length)).slice(0, size);
    const before = process.cpuUsage();
    const place = rendered(module, text);
    const { user, system } = process.cpuUsage(before);
    const time = (user + system) / 1000;
    check(place, module, unit);
    return time;
  };
  for (const unit of units) {
    const small = Math.max(2, taken(unit, 1 << 13), taken(unit, 1 << 13));
    // A busy machine slows one of them at times, but not each of three.
    let factor = Infinity;
    for (let tries = 0; tries < 3 && factor > 64; tries += 1) factor = taken(unit, 1 << 17) / small;
    // Sixteen times the text: some 16 where time is linear, 256 where it is quadratic.
    assert.ok(factor <= 64, `${JSON.stringify(unit)}: 16 times the text takes ${factor} times as long`);
  }
  assert.ok(taken("`", 1 << 20) < 5000);
  // Beyond a limit it is text.
  assert.deepEqual(rendered(module, "*a*".repeat(1 << 20)).children.map(({ tag }) => tag), ["pre"]);
});

test("controls_have_labels_and_scripts_find_what_they_name", () => {
  const document = parse(readFileSync(join(FILES, "index.html"), "utf8"));
  const elements = document.all().filter((node) => node instanceof Element);
  const ids = elements.map(({ id }) => id).filter(Boolean);
  assert.equal(new Set(ids).size, ids.length);
  const labels = elements.filter(({ tag }) => tag === "label");
  for (const control of elements.filter(({ tag }) => ["input", "select", "textarea"].includes(tag))) {
    const label = labels.find((one) => one.getAttribute("for") === control.id || one.all().includes(control));
    assert.match(label?.textContent ?? "", /\w/, control.id);
  }
  for (const button of elements.filter(({ tag }) => tag === "button")) assert.match(button.textContent, /\w/);
  for (const name of elements.flatMap(({ attributes }) => ["aria-labelledby", "aria-describedby", "for"].map((at) => attributes.get(at)))) {
    assert.ok(name === undefined || ids.includes(name), name);
  }
  for (const script of elements.filter(({ tag }) => tag === "script")) {
    const text = readFileSync(join(FILES, script.getAttribute("src").replace("/page/", "")), "utf8");
    for (const [, id] of text.matchAll(/\bby\("([^"]+)"\)/g)) assert.ok(ids.includes(id), id);
    assert.doesNotMatch(text, /innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b/);
  }
});

test("sleep_and_wake_are_told_with_their_times_and_costs", async () => {
  const placement = { now: ASLEEP };
  const page = await open(serving(placement));
  const terms = () => page.by("costs").querySelectorAll("div").map((tile) => tile.textContent);
  assert.equal(page.said("sleep"), "Asleep, for 30 s. It costs nothing now; the next request wakes it.");
  assert.ok(page.by("last-wake").hidden);
  assert.deepEqual(terms(), ["requests today (UTC)$0.00000125", "functions per hour$0.00", "functions in all$0.002", "requests in all$0.00000125"]);
  placement.now = AWAKE;
  await page.tick();
  assert.equal(page.said("sleep"), "Active, for 4 s. It sleeps after 10 s without requests, in 6 s if none comes.");
  assert.equal(page.said("wake"), "Last wake, 5 s ago: first token after 1.00 s.");
  assert.match(page.said("wake-parts"), /^decide 0 ms.*start 400 ms.*first token 300 ms$/);
  const states = page.by("history").querySelectorAll("span").map(({ className }) => className.replace("segment ", ""));
  assert.deepEqual(states, ["waking", "active", "asleep", "waking", "active"]);
  assert.match(page.by("history").getAttribute("aria-label"), /^The last 90 s: asleep since 30 s ago, then waking .* then active since 4 s ago$/);
  assert.equal(page.by("changes").children.length, 5);
  // What a tenant who does not see all is told.
  placement.now = { ...AWAKE, cost: { per_hour: 44_000_000, paid: null, requests: null, today: null, tenant_today: 2_500_000_000 } };
  await page.tick();
  assert.deepEqual(terms(), ["your tenant today$2.50", "functions per hour$0.044"]);
  placement.now = { ...AWAKE, cost: null, sleep: { ...AWAKE.sleep, idle_s: null } };
  await page.tick();
  assert.match(page.said("sleep"), /It never sleeps: no idle window is set\.$/);
  assert.match(page.said("uncosted"), /^No prices are known here/);
  assert.equal(page.said("fault"), "");
  page.close();
});

test("map_tells_function_share_and_last_use_of_an_expert", async () => {
  const placement = { now: AWAKE };
  const page = await open(serving(placement));
  const cell = (number) => page.by("map").querySelectorAll("rect")[number].fire("pointerenter");
  cell(2);
  const lines = () => page.by("tip").children.map(({ textContent }) => textContent);
  assert.deepEqual(lines(), ["Layer 0, expert 2", "in group-0", "used 2 times, 20.0 % of its layer", "last used before this page was opened"]);
  assert.equal(page.said("cell"), "Layer 0, expert 2: in group-0; used 2 times, 20.0 % of its layer; last used before this page was opened");
  // The tooltip follows the polls.
  placement.now = { ...AWAKE, groups: [{ ...AWAKE.groups[0], asleep: true }], experts: [{ layer: 0, pairs: [4, 3, 12, 1] }] };
  await page.tick();
  assert.deepEqual(lines().slice(1), ["in group-0, which is asleep", "used 12 times, 60.0 % of its layer", "last used just now"]);
  page.by("map").fire("pointerleave");
  assert.ok(page.by("tip").hidden);
  page.by("map").fire("focus");
  page.by("map").fire("keydown", { key: "ArrowRight" });
  assert.equal(lines()[0], "Layer 0, expert 3");
  page.by("map").fire("keydown", { key: "Escape" });
  assert.ok(page.by("tip").hidden);
  page.close();
  // A page that was open before the wake has seen all uses.
  placement.now = ASLEEP;
  const early = await open(serving(placement));
  placement.now = { ...AWAKE, experts: [{ layer: 0, pairs: [1, 0, 0, 0] }] };
  await early.tick();
  early.by("map").querySelectorAll("rect")[0].fire("pointerenter");
  assert.match(early.said("cell"), /last used just now$/);
  early.by("map").querySelectorAll("rect")[1].fire("pointerenter");
  assert.match(early.said("cell"), /used 0 times, 0\.0 % of its layer; not used since the main function started$/);
  assert.equal(early.said("fault"), "");
  early.close();
});

test("plan_is_told_in_words_before_its_figures", async () => {
  const rival = { name: "everything on CPUs", ttft_s: 0.2, tpot_s: 0.02, cost: 0.00002, violations: [] };
  const placement = { now: { ...AWAKE, rivals: [...AWAKE.rivals, rival] } };
  const page = await open(serving(placement));
  const said = () => page.by("plan").querySelectorAll("li").map(({ textContent }) => textContent);
  assert.deepEqual(said(), [
    "2 of 4 experts are in the main function, 2 in 1 remote function.",
    "Expected of a typical request: first token after 100 ms, then one every 10.0 ms; a million of them cost $10.00.",
    "That is $10.00 (50 %) less than the best baseline that meets all limits, everything on CPUs.",
  ]);
  placement.now = { ...AWAKE, rivals: [{ ...rival, cost: 0.000005 }] };
  await page.tick();
  assert.equal(said()[2], "The baseline everything on CPUs would cost $5.00 (50 %) less: remote experts do not pay for these requests.");
  placement.now = AWAKE;
  await page.tick();
  assert.equal(said()[2], "No baseline meets all limits.");
  placement.now = { ...AWAKE, planned: false, expected: null, rivals: [], measured: { requests: 3, ttft_s: 0.05, tpot_s: null, cost: null } };
  await page.tick();
  assert.match(said()[1], /^The placement was given by hand, so there is no estimate/);
  assert.equal(said()[2], "Measured over 3 requests: first token after 50.0 ms.");
  page.close();
});

test("tool_calls_are_shown_kept_and_answered", async () => {
  const browser = { local: new Storage(), session: new Storage() };
  const piece = (index, more) => chunk({ tool_calls: [{ index, ...more }] });
  const calling = [
    piece(0, { id: "call-1", function: { name: "depth", arguments: "" } }),
    piece(0, { function: { arguments: '{"lake":' } }),
    piece(0, { function: { arguments: '"Como"}' } }),
    piece(1e9, { id: "call-2" }),
    DONE,
  ];
  let respond = () => new Response(calling.join(""));
  const answers = serving({ now: AWAKE }, { "/v1/chat/completions": (options) => respond(options) });
  let page = await open(answers, browser);
  page.by("tools").value = "{";
  await ask(page, "How deep is Como?");
  assert.match(page.said("tools-problem"), /^Cannot read the tools: .*expected a JSON list such as/);
  assert.ok(page.requests.every(({ body }) => !body), "nothing is sent with tools that cannot be read");
  assert.equal(page.by("prompt").value, "How deep is Como?");
  const tools = [{ type: "function", function: { name: "depth", parameters: {} } }];
  page.by("tools").value = JSON.stringify(tools);
  await ask(page, "How deep is Como?");
  assert.equal(page.said("tools-problem"), "");
  assert.deepEqual(page.requests.findLast(({ body }) => body).body.tools, tools);
  assert.equal(page.by("messages").querySelector(".calls").textContent, 'Tool call: depth{\n  "lake": "Como"\n}');
  page.close();
  page = await open(answers, browser);
  assert.equal(page.by("messages").querySelector(".call").querySelector("code").textContent, "depth");
  respond = whole("425 metres.");
  page.by("messages").querySelector(".results").querySelector("textarea").value = "425";
  page.by("messages").querySelector(".results").requestSubmit();
  await page.settle();
  const call = { id: "call-1", type: "function", function: { name: "depth", arguments: '{"lake":"Como"}' } };
  assert.deepEqual(page.requests.findLast(({ body }) => body).body.messages, [
    { role: "user", content: "How deep is Como?" },
    { role: "assistant", content: "", tool_calls: [call] },
    { role: "tool", tool_call_id: "call-1", content: "425" },
  ]);
  assert.equal(page.by("messages").querySelectorAll(".results").length, 0);
  assert.equal(spoken(page).at(-1), "425 metres.");
  // The next prompt has all of it.
  await ask(page, "Thanks.");
  const roles = page.requests.findLast(({ body }) => body).body.messages.map(({ role }) => role);
  assert.deepEqual(roles, ["user", "assistant", "tool", "assistant", "user"]);
  assert.equal(page.said("fault"), "");
  page.close();
});

test("limits_that_a_baseline_violates_stand_below_its_name", async () => {
  const page = await open(serving({ now: AWAKE }));
  const lines = page.by("rivals").querySelectorAll("tr").map((line) => line.children.map((cell) => cell.textContent));
  assert.deepEqual(lines.at(-1), ["CPU onlyviolates limits: TTFT", "200 ms", "20.0 ms", "$20.00"]);
  assert.ok(lines.every((cells) => cells.length === 4));
  // No rule about how an element is displayed shows one that is hidden.
  assert.match(readFileSync(join(FILES, "style.css"), "utf8"), /\[hidden\] \{ display: none !important; \}/);
  page.close();
});
