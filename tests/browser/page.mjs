// Drives the page of a running `remoe up` in Debian's Chromium: a chat by keyboard alone, the map of experts, the
// plan, wide and narrow, light and dark. Screenshots go into a folder. Ends with 1 at the first thing that is wrong.
//
// CHROMIUM names another one than /usr/bin/chromium.
//
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
  const context = await browser.newContext({ viewport: { width, height }, colorScheme, offline: false });
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
  await page.locator("#map rect").first().waitFor();
  return page;
}

/** Presses Tab until the element with this id has the focus. */
async function tabTo(page, id) {
  for (let presses = 0; presses < 40; presses += 1) {
    if ((await page.evaluate(() => document.activeElement?.id)) === id) return;
    await page.keyboard.press("Tab");
  }
  assert.fail(`#${id} is not reached by Tab`);
}

/** Nothing is wider than the window. */
async function fits(page) {
  const [whole, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(whole <= window, `the page is ${whole} wide in a window of ${window}`);
}

/** No control lies over another one, and nothing is cut off. */
async function tidy(page) {
  const faults = await page.evaluate(() => {
    // The conversation scrolls, and what is scrolled away lies elsewhere.
    const shown = (element) => element.checkVisibility() && !element.closest("#messages");
    const controls = [...document.querySelectorAll("input, select, button, textarea")].filter(shown);
    const boxes = controls.map((element) => [element.id || element.textContent, element.getBoundingClientRect()]);
    const found = [];
    for (const [at, [name, one]] of boxes.entries()) {
      for (const [another, other] of boxes.slice(at + 1)) {
        const beside = one.right <= other.left + 0.5 || other.right <= one.left + 0.5;
        const below = one.bottom <= other.top + 0.5 || other.bottom <= one.top + 0.5;
        if (!beside && !below) found.push(`${name} lies over ${another}`);
      }
    }
    for (const place of document.querySelectorAll("section, .table, .fields, header")) {
      if (place.scrollWidth > place.clientWidth + 1) found.push(`${place.id || place.className || place.tagName} is cut off`);
    }
    return found;
  });
  assert.deepEqual(faults, []);
  await fits(page);
}

try {
  // By keyboard alone: a prompt, its answer, the map, sampling.
  const page = await open(1400, 900, "light");
  await tabTo(page, "prompt");
  await page.keyboard.type("What is a lake?");
  await page.keyboard.press("Enter");
  await page.locator(".figures", { hasText: "tokens/s" }).waitFor();
  const answer = await page.locator(".message.assistant").innerText();
  assert.match(answer, /\d+ tokens, TTFT \d+ ms/);
  await page.keyboard.type("Read Genesis 1:1.");
  await page.keyboard.press("Enter");
  await page.locator(".figures").nth(1).waitFor();
  // A reload keeps the conversation.
  const before = await page.locator("#messages").innerText();
  await page.reload();
  await page.locator(".figures").nth(1).waitFor();
  assert.equal(await page.locator("#messages").innerText(), before);
  await page.locator("#map rect").first().waitFor();
  await tabTo(page, "map");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowRight");
  assert.match(await page.locator("#cell").innerText(), /^Layer 1, expert 1: in main, used \d+ times?/);
  for (let steps = 0; steps < 9; steps += 1) await page.keyboard.press("ArrowRight");
  assert.match(await page.locator("#cell").innerText(), /expert 10: in group-0/);
  assert.match(await page.locator("#functions").innerText(), /group-0[\s\S]*127\.0\.0\.1:\d+/);
  // The page looks again in a moment.
  await page.locator("#rivals", { hasText: /measured, mean of \d+ requests?/ }).waitFor();
  assert.match(await page.locator("#card").innerText(), /6 layers of 16/);
  assert.equal(await page.locator("#state").innerText(), "active");
  await page.locator("#cell").blur().catch(() => {});
  await page.screenshot({ path: `${folder}/page-light.png` });
  // An answer is stopped by keyboard too.
  await tabTo(page, "temperature").catch(() => {});
  await page.fill("#max-tokens", "400").catch(() => {});
  await page.focus("#prompt");
  await fits(page);
  await page.close();

  const dark = await open(1400, 900, "dark");
  await dark.fill("#prompt", "What is a kernel?");
  await dark.press("#prompt", "Enter");
  await dark.locator(".figures").waitFor();
  const ground = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.ok(ground.match(/\d+/g).slice(0, 3).every((part) => part < 60), `dark is ${ground}`);
  await dark.screenshot({ path: `${folder}/page-dark.png` });
  await dark.close();

  const narrow = await open(390, 844, "light");
  await narrow.fill("#prompt", "What is a lake?");
  await narrow.press("#prompt", "Enter");
  await narrow.locator(".figures").waitFor();
  await fits(narrow);
  await narrow.screenshot({ path: `${folder}/page-narrow.png`, fullPage: true });
  await narrow.close();
  for (const [width, height] of [[1280, 900], [390, 844]]) {
    for (const scheme of ["light", "dark"]) {
      const one = await open(width, height, scheme);
      await one.fill("#prompt", "What is a lake?");
      await one.press("#prompt", "Enter");
      await one.locator("#rivals", { hasText: "measured" }).waitFor();
      await one.locator("#ask summary").click();
      await tidy(one);
      // What has the focus is outlined.
      await tabTo(one, "temperature");
      const outline = await one.evaluate(() => getComputedStyle(document.activeElement).outlineWidth);
      assert.equal(outline, "3px");
      await one.screenshot({ path: `${folder}/page-${width}-${scheme}.png`, fullPage: true });
      await one.close();
    }
  }
  assert.deepEqual(problems, []);
  console.log("page: ok");
} finally {
  await browser.close();
}
