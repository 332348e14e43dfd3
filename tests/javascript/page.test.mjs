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

const ASLEEP = { model: "m", state: "asleep", generation: null, main: null, card: null, groups: [], experts: [], rivals: [] };
const AWAKE = {
  ...ASLEEP,
  state: "active",
  generation: 3,
  planned: true,
  main: { experts: "0:0-1", busy: 0.25 },
  groups: [{ name: "group-0", experts: "0:2-3", replicas: 1, busy: 0.5, functions: [{ address: "127.0.0.1:9001", busy: 0.5 }] }],
  experts: [{ layer: 0, pairs: [4, 3, 2, 1] }],
  expected: { ttft_s: 0.1, tpot_s: 0.01, cost: 0.00001 },
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
  assert.match(lines.slice(1).join(), /^main0:0-1local.*25 %,group-00:2-3127\.0\.0\.1:9001.*50 %$/);
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

test("limits_that_a_baseline_violates_stand_below_its_name", async () => {
  const page = await open(serving({ now: AWAKE }));
  const lines = page.by("rivals").querySelectorAll("tr").map((line) => line.children.map((cell) => cell.textContent));
  assert.deepEqual(lines.at(-1), ["CPU onlyviolates limits: TTFT", "200 ms", "20.0 ms", "$20.00"]);
  assert.ok(lines.every((cells) => cells.length === 4));
  // No rule about how an element is displayed shows one that is hidden.
  assert.match(readFileSync(join(FILES, "style.css"), "utf8"), /\[hidden\] \{ display: none !important; \}/);
  page.close();
});
