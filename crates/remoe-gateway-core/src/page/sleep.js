// When the model slept and woke, where the time of its last wake went, and what it costs.

import { by } from "./server.js";
import { element, latency, money, span, terms, write } from "./words.js";

/** Seconds that the bar shows: at least, at most. */
const WINDOW = { least: 60, most: 1800 };
const STATES = {
  active: "Active",
  waking: "Waking up",
  draining: "Falling asleep: it waits for its last requests",
  asleep: "Asleep",
};
/** Parts of a wake, in their order. */
const PARTS = {
  decide: ["decide", "until the wake was decided"],
  schedule: ["schedule", "until the first process was started"],
  start: ["start", "until all processes listened"],
  load: ["load", "until weights were read and the placement was in force"],
  ready: ["release", "until the main function had the request"],
  first: ["first token", "until the first token of the answer"],
};

/** Where the model is between awake and asleep, as a sentence. */
function sentence({ state, sleep }) {
  const since = sleep.history.at(-1)?.ago_s ?? 0;
  const now = `${STATES[state] ?? state}, for ${span(since)}.`;
  if (state === "asleep") return `${now} It costs nothing now; the next request wakes it.`;
  if (state !== "active") return now;
  if (sleep.idle_s == null) return `${now} It never sleeps: no idle window is set.`;
  const left = sleep.idle_s - Math.min(sleep.quiet_s, sleep.idle_s);
  return `${now} It sleeps after ${span(sleep.idle_s)} without requests, in ${span(left)} if none comes.`;
}

const clock = (ago) => new Date(Date.now() - 1000 * ago).toLocaleTimeString();

function segment(className, share, title) {
  const made = element("span", `segment ${className}`);
  // Shares that add up to less than 1 would leave a rest.
  made.style.flexGrow = String(1000 * share);
  made.title = title;
  return made;
}

function showHistory({ history }) {
  const oldest = history[0]?.ago_s ?? 0;
  const window = Math.min(WINDOW.most, Math.max(WINDOW.least, oldest));
  const parts = window > oldest ? [segment("unknown", window - oldest, "before the start")] : [];
  history.forEach(({ state, ago_s: ago }, at) => {
    const end = history[at + 1]?.ago_s ?? 0;
    const from = Math.min(ago, window);
    if (from > end) parts.push(segment(state, from - end, `${state}, from ${clock(ago)} for ${span(ago - end)}`));
  });
  by("history").replaceChildren(...parts);
  const last = history.slice(-3).map(({ state, ago_s: ago }) => `${state} since ${span(ago)} ago`);
  by("history").setAttribute("aria-label", `The last ${span(window)}: ${last.join(", then ")}`);
  write("history-from", `${span(window)} ago`);
  by("changes").replaceChildren(...history.toReversed().map(({ state, ago_s: ago }) => element("li", "", `${clock(ago)} ${state}`)));
}

function showWake({ wake }) {
  by("last-wake").hidden = !wake;
  if (!wake) return;
  const whole = wake.parts.reduce((sum, { s }) => sum + s, 0);
  write("wake", `Last wake, ${span(wake.ago_s)} ago: first token after ${latency(whole)}.`);
  const known = wake.parts.filter(({ name }) => name in PARTS);
  by("wake-bar").replaceChildren(...known.map(({ name, s }) => segment(`part-${name}`, s, `${PARTS[name][0]} ${latency(s)}`)));
  by("wake-parts").replaceChildren(...known.map(({ name, s }) => {
    const line = element("li", "");
    line.title = PARTS[name][1];
    line.append(element("span", `swatch part-${name}`), `${PARTS[name][0]} ${s < 0.0005 ? "0 ms" : latency(s)}`);
    return line;
  }));
}

const dollars = (nano) => money(nano / 1e9);

function showCosts(cost) {
  by("costs").hidden = !cost;
  by("uncosted").hidden = Boolean(cost);
  if (!cost) return;
  const { today, tenant_today: tenant, per_hour: hour, paid, requests } = cost;
  const lines = [
    ["requests today (UTC)", today],
    ["your tenant today", tenant],
    ["functions per hour", hour],
    ["functions in all", paid],
    ["requests in all", requests],
  ];
  const known = lines.filter(([, amount]) => amount != null).map(([term, amount]) => [term, dollars(amount)]);
  by("costs").replaceChildren(...known.map((line) => {
    const tile = element("div", "");
    tile.append(...terms([line]));
    return tile;
  }));
}

/** Shows the state of the polled model. */
export function showSleep(page) {
  // Main functions alone have neither.
  by("sleep-section").hidden = !page.sleep;
  if (!page.sleep) return;
  write("sleep", sentence(page));
  showHistory(page.sleep);
  showWake(page.sleep);
  showCosts(page.cost);
}
