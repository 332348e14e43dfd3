// Drives the page of a running `remoe up` in Debian's Chromium: opened while the model sleeps, a chat that wakes it,
// the map of experts, plan, sleep and cost, wide and narrow, light and dark, by keyboard alone. Screenshots go into a
// folder. Ends with 1 at the first thing that is wrong.
//
// CHROMIUM names another one than /usr/bin/chromium.
//
//   remoe up demo/model --remote-ratio 0.5 --idle 8s
//   node tests/browser/page.mjs http://127.0.0.1:8000 FOLDER [KEY]

import { createRequire } from "node:module";
import { mkdirSync } from "node:fs";
import { strict as assert } from "node:assert";

const { chromium } = createRequire(`${process.cwd()}/target/node/`)("playwright-core");
const [endpoint, folder, key] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const problems = [];

async function open(width, height, colorScheme) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme });
  const page = await context.newPage();
  // Violations of the content security policy, exceptions, and requests to other servers.
  page.on("console", (message) => message.type() === "error" && !/401/.test(message.text()) && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(endpoint) && !url.startsWith("data:")) problems.push(`asks ${url}`);
  });
  await page.goto(endpoint);
  if (key) {
    await page.locator("#problem").filter({ hasText: "key" }).waitFor();
    await page.fill("#key", key);
    await page.press("#key", "Enter");
  }
  await page.locator("#state", { hasText: /\w/ }).waitFor();
  return page;
}

/** Waits until the model sleeps. The page's own polls do not keep it awake. */
async function asleep() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  for (;;) {
    const { state, sleep } = await (await fetch(`${endpoint}/v1/placement`, { headers })).json();
    assert.ok(sleep.idle_s, "start `remoe up` with --idle");
    if (state === "asleep") return;
    await new Promise((done) => setTimeout(done, 100));
  }
}

async function ask(page, text) {
  const before = await page.locator(".figures").count();
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
  await page.locator(".figures").nth(before).waitFor();
}

/** Presses Tab until the element with this id has the focus. */
async function tabTo(page, id) {
  for (let presses = 0; presses < 60; presses += 1) {
    if ((await page.evaluate(() => document.activeElement?.id)) === id) return;
    await page.keyboard.press("Tab");
  }
  assert.fail(`#${id} is not reached by Tab`);
}

/** No box lies over one beside it, nothing is cut off, and nothing is wider than the window. */
async function tidy(page) {
  const faults = await page.evaluate(() => {
    const found = [];
    const name = (element) => `${element.tagName.toLowerCase()}#${element.id}.${element.className} "${element.textContent.slice(0, 20)}"`;
    const box = (element) => {
      const { display, position } = getComputedStyle(element);
      const flows = display !== "inline" && !["absolute", "fixed"].includes(position);
      return flows && element.checkVisibility() ? element.getBoundingClientRect() : null;
    };
    for (const parent of document.querySelectorAll("body, body *:not(svg, svg *, select)")) {
      const boxes = [...parent.children].map((child) => [child, box(child)]).filter(([, rect]) => rect?.width && rect.height);
      for (const [at, [child, one]] of boxes.entries()) {
        for (const [sibling, other] of boxes.slice(at + 1)) {
          const beside = one.right <= other.left + 0.5 || other.right <= one.left + 0.5;
          const below = one.bottom <= other.top + 0.5 || other.bottom <= one.top + 0.5;
          if (!beside && !below) found.push(`${name(child)} lies over ${name(sibling)}`);
        }
      }
    }
    const containers = "header, section, .table, .fields, .tiles div, .head, .row, label, button, td, th, dt, dd, li, p, .message, summary";
    for (const place of document.querySelectorAll(containers)) {
      const inline = getComputedStyle(place).display === "inline";
      if (inline || place.closest(".hidden") || !place.checkVisibility()) continue;
      if (place.scrollWidth > place.clientWidth + 1) found.push(`${name(place)} is cut off`);
    }
    const whole = document.documentElement.scrollWidth;
    if (whole > innerWidth) found.push(`the page is ${whole} wide in a window of ${innerWidth}`);
    return found;
  });
  assert.deepEqual(faults, []);
}

/** Asleep, then a chat that wakes the model: functions are listed, and no error is shown. */
async function wakes(width, height, scheme) {
  await asleep();
  const page = await open(width, height, scheme);
  assert.equal(await page.locator("#state").innerText(), "asleep");
  assert.match(await page.locator("#cell").innerText(), /^Scaled to zero/);
  assert.match(await page.locator("#sleep").innerText(), /^Asleep, for /);
  await tidy(page);
  await ask(page, "What is a lake?");
  await page.locator("#functions", { hasText: /main[\s\S]*group-0[\s\S]*127\.0\.0\.1:\d+/ }).waitFor();
  await page.locator("#wake", { hasText: /^Last wake, \d+ s ago: first token after/ }).waitFor();
  assert.equal(await page.locator("#state").innerText(), "active");
  for (const place of ["#fault", "#problem"]) assert.ok(await page.locator(place).isHidden(), place);
  // A reload keeps the conversation.
  const before = await page.locator("#messages").innerText();
  await page.reload();
  await page.locator(".figures").waitFor();
  assert.equal(await page.locator("#messages").innerText(), before);
  await page.locator("#rivals", { hasText: /measured/ }).waitFor();
  await page.locator("#map rect").nth(9).hover();
  assert.match(await page.locator("#tip").innerText(), /Layer 0, expert 9\s+in group-0\s+used \d+ times?, [\d.]+ % of its layer\s+last used/);
  const tip = await page.locator("#tip").boundingBox();
  assert.ok(tip.x >= 0 && tip.x + tip.width <= width, JSON.stringify(tip));
  await page.mouse.move(0, 0);
  assert.ok(await page.locator("#tip").isHidden());
  await tidy(page);
  await page.locator("#settings summary").click();
  await page.locator("#sleep-section summary").click();
  await tidy(page);
  // What has the focus is outlined.
  await tabTo(page, "temperature");
  assert.equal(await page.evaluate(() => getComputedStyle(document.activeElement).outlineWidth), "3px");
  await page.screenshot({ path: `${folder}/page-${width}-${scheme}.png`, fullPage: true });
  await page.context().close();
}

const delta = (delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\n\n`;
const ANSWER = "## Lakes\n\nA *lake* is a **body of water**:\n\n| lake | depth |\n|---|---|\n| Como | 425 m |\n\n" +
  "```python\ndef depth(lake):\n    return {\"Como\": 425}[lake]  # a long line that the block scrolls and that widens no window\n```\n";
const STREAM = [
  delta({ reasoning_content: "The user asks about a lake." }),
  delta({ content: ANSWER }),
  delta({ tool_calls: [{ index: 0, id: "call-1", function: { name: "depth", arguments: '{"lake": "Como", "unit": "metre"}' } }] }),
  `data: ${JSON.stringify({ choices: [], usage: { completion_tokens: 40 } })}\n\n`,
  "data: [DONE]\n\n",
].join("");

/** Markdown, thoughts and tool calls of an answer that the demo model cannot give. */
async function rich(width, height, scheme) {
  const page = await open(width, height, scheme);
  await page.route("**/v1/chat/completions", (route) => route.fulfill({ contentType: "text/event-stream", body: STREAM }));
  await ask(page, "How deep is Como?");
  assert.equal(await page.locator(".rich table td").first().innerText(), "Como");
  assert.equal(await page.locator(".language").innerText(), "python");
  assert.ok(await page.locator(".thoughts .said").isHidden(), "thoughts are folded");
  assert.match(await page.locator(".call").innerText(), /Tool call: depth[\s\S]*"lake": "Como"/);
  await page.getByLabel("Result of depth").fill("425");
  await tidy(page);
  await page.screenshot({ path: `${folder}/rich-${width}-${scheme}.png` });
  await page.getByRole("button", { name: "Send result" }).click();
  await page.locator(".figures").nth(1).waitFor();
  assert.match(await page.locator(".message.user").nth(1).innerText(), /Tool result: depth/);
  await page.context().close();
}

/** By keyboard alone: a prompt, its answer, the map. */
async function keyboard() {
  const page = await open(1280, 900, "light");
  await tabTo(page, "prompt");
  await page.keyboard.type("What is a lake?");
  await page.keyboard.press("Enter");
  await page.locator(".figures", { hasText: "tokens/s" }).waitFor();
  assert.match(await page.locator(".message.assistant").innerText(), /\d+ tokens, TTFT [\d.]+ m?s/);
  await page.locator("#map rect").first().waitFor();
  await tabTo(page, "map");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator("#cell").textContent(), /^Layer 1, expert 1: in main; used \d+ times?/);
  for (let steps = 0; steps < 9; steps += 1) await page.keyboard.press("ArrowRight");
  assert.match(await page.locator("#cell").textContent(), /expert 10: in group-0/);
  await page.keyboard.press("Escape");
  assert.ok(await page.locator("#tip").isHidden());
  assert.match(await page.locator("#card").innerText(), /6 layers of 16/);
  await page.context().close();
}

/** The page as the documentation shows it. */
async function pictures(scheme) {
  const page = await open(1280, 900, scheme);
  await ask(page, "What is a lake?");
  await ask(page, "Read Genesis 1:1.");
  await page.locator("#rivals", { hasText: "measured" }).waitFor();
  await page.locator("#map rect").nth(26).hover();
  await page.screenshot({ path: `${folder}/page-${scheme}.png` });
  await page.context().close();
}

try {
  for (const [width, height] of [[1280, 900], [390, 844]]) {
    for (const scheme of ["light", "dark"]) {
      await wakes(width, height, scheme);
      await rich(width, height, scheme);
    }
  }
  await keyboard();
  for (const scheme of ["light", "dark"]) await pictures(scheme);
  const dark = await open(1280, 900, "dark");
  const ground = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.ok(ground.match(/\d+/g).slice(0, 3).every((part) => part < 60), `dark is ${ground}`);
  assert.deepEqual(problems, []);
  console.log("page: ok");
} finally {
  await browser.close();
}
