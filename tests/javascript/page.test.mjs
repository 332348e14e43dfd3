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

const FILES = process.env.REMOE_PAGE ?? fileURLToPath(new URL("../../gateway/src/page", import.meta.url));

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
export class Storage {
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
