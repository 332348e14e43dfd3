// Expert placement, load of functions, plan, baselines and model card: polled once a second.

import { askJson, by, Failure, guarded, loadModels, model, problem, session } from "./server.js";

const LOOK_MS = 1000;
/** Polls after which usage counts half. */
const HALF_LIFE = 3;
const CELL = 14;
const MARGIN = 26;
/** Hues of functions: distinct in light and dark themes, and with most kinds of colour blindness. */
const COLOURS = ["#c2571a", "#2f7fc1", "#1f9d73", "#b0449f", "#a58a12", "#6a5fd0", "#cf4d63", "#4c8f2f"];

const unseen = (name) => ({ model: name, pairs: new Map(), heat: new Map(), cells: new Map(), shape: "" });
let seen = unseen(null);
let last = null;
let at = { row: 0, column: 0 };

/** "0:0-7,1:8" as a map from layers to lists of experts. */
function listing(text) {
  const layers = new Map();
  let layer = null;
  for (const part of (text ?? "").split(",").filter(Boolean)) {
    const colon = part.indexOf(":");
    if (colon >= 0) layer = Number(part.slice(0, colon));
    const [first, end] = part.slice(colon + 1).split("-").map(Number);
    const experts = layers.get(layer) ?? [];
    for (let expert = first; expert <= (end ?? first); expert += 1) experts.push(expert);
    layers.set(layer, experts);
  }
  return layers;
}

/** "layer:expert" to the number of its function; 0 is the main function. */
function hosts(page) {
  const of = new Map();
  [page.main?.experts, ...page.groups.map((group) => group.experts)].forEach((text, number) => {
    for (const [layer, experts] of listing(text)) for (const expert of experts) of.set(`${layer}:${expert}`, number);
  });
  return of;
}

/** Groups by name, then by their first expert: they keep their rows and colours when they sleep and wake. */
function sorted(groups) {
  const first = (group) => {
    const [layer, experts] = listing(group.experts).entries().next().value ?? [Infinity, [Infinity]];
    return [layer, experts[0]];
  };
  return groups
    .map((group) => [first(group), group])
    .sort(
      ([[layer, expert], group], [[other, another], second]) =>
        (group.name ?? "").localeCompare(second.name ?? "", "en", { numeric: true }) || layer - other || expert - another,
    )
    .map(([, group]) => group);
}

// The first is the main function's alone.
const colour = (number) => COLOURS[number === 0 ? 0 : 1 + ((number - 1) % (COLOURS.length - 1))];
/** A function by its name; a group that the server cannot name, by its number on this page. */
const name = (page, number) => (number === 0 ? "main" : page.groups[number - 1]?.name || `unnamed group ${number}`);

/** State of a group that the main function does not call. */
const apart = (group) => (group?.asleep ? "asleep" : group?.starting ? "starting" : null);

/** Adds the usage of each expert since the last poll to its faded usage before. */
function warm(page) {
  const fade = 0.5 ** (1 / HALF_LIFE);
  for (const { layer, pairs } of page.experts) {
    pairs.forEach((count, expert) => {
      const key = `${layer}:${expert}`;
      const before = seen.pairs.get(key) ?? count;
      // A restarted main function counts from zero.
      const fresh = count >= before ? count - before : count;
      seen.heat.set(key, (seen.heat.get(key) ?? 0) * fade + fresh);
      seen.pairs.set(key, count);
    });
  }
}

function draw(page) {
  const map = by("map");
  const columns = Math.max(0, ...page.experts.map((layer) => layer.pairs.length));
  const shape = `${page.model} ${page.experts.length} ${columns}`;
  if (shape !== seen.shape) {
    seen.shape = shape;
    seen.cells.clear();
    const width = MARGIN + columns * CELL;
    map.setAttribute("viewBox", `0 0 ${width} ${MARGIN / 2 + page.experts.length * CELL}`);
    map.style.maxWidth = `${width * 1.8}px`;
    map.style.minWidth = `${Math.min(width, columns * 8)}px`;
    map.replaceChildren();
    page.experts.forEach(({ layer, pairs }, row) => {
      map.append(label(String(layer), 2, MARGIN / 2 + row * CELL + 10));
      pairs.forEach((_, expert) => {
        const cell = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        const attributes = { x: MARGIN + expert * CELL, y: MARGIN / 2 + row * CELL, width: CELL - 2, height: CELL - 2, rx: 2 };
        for (const [key, value] of Object.entries(attributes)) cell.setAttribute(key, value);
        cell.addEventListener("pointerenter", () => move(row, expert));
        map.append(cell);
        seen.cells.set(`${layer}:${expert}`, cell);
      });
    });
    for (let expert = 0; expert < columns; expert += columns > 32 ? 16 : 4) {
      map.append(label(String(expert), MARGIN + expert * CELL, 9));
    }
  }
  const use = by("span").value === "now" ? seen.heat : seen.pairs;
  let most = 1e-9;
  for (const count of use.values()) most = Math.max(most, count);
  const of = hosts(page);
  for (const [key, cell] of seen.cells) {
    cell.setAttribute("fill", colour(of.get(key) ?? 0));
    cell.classList.toggle("asleep", Boolean(apart(page.groups[(of.get(key) ?? 0) - 1])));
    cell.setAttribute("fill-opacity", (0.16 + 0.84 * Math.sqrt((use.get(key) ?? 0) / most)).toFixed(3));
  }
}

function label(text, x, y) {
  const place = document.createElementNS("http://www.w3.org/2000/svg", "text");
  place.setAttribute("x", x);
  place.setAttribute("y", y);
  place.textContent = text;
  return place;
}

/** Selects an expert and describes it. */
function move(row, column) {
  const layer = last?.experts[row];
  if (!layer) return;
  at = { row, column: Math.max(0, Math.min(column, layer.pairs.length - 1)) };
  for (const cell of by("map").querySelectorAll(".at")) cell.classList.remove("at");
  const key = `${layer.layer}:${at.column}`;
  seen.cells.get(key)?.classList.add("at");
  const number = hosts(last).get(key);
  const whole = layer.pairs.reduce((sum, count) => sum + count, 0);
  const share = whole ? ((100 * layer.pairs[at.column]) / whole).toFixed(1) : "0.0";
  const state = apart(last.groups[number - 1]);
  const sleeps = state ? `, which is ${state}` : "";
  const where = number === undefined ? "in no function" : `in ${name(last, number)}${sleeps}`;
  by("cell").textContent =
    `Layer ${layer.layer}, expert ${at.column}: ${where}, used ${counted(layer.pairs[at.column], "time")} (${share} % of its layer)`;
}

by("map").addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step || !last) return;
  event.preventDefault();
  move(Math.max(0, Math.min(at.row + step[0], last.experts.length - 1)), at.column + step[1]);
});
by("map").addEventListener("focus", () => move(at.row, at.column));

function row(cells) {
  const line = document.createElement("tr");
  for (const content of cells) {
    const cell = document.createElement("td");
    if (content?.number !== undefined) {
      cell.className = "number";
      cell.textContent = content.number;
    } else cell.append(...[content].flat());
    line.append(cell);
  }
  return line;
}

function busy(share) {
  const meter = document.createElement("meter");
  meter.value = share;
  const text = `${Math.round(100 * share)} %`;
  meter.textContent = text;
  meter.title = text;
  meter.setAttribute("aria-label", `busy ${text}`);
  return [meter, ` ${text}`];
}

function swatch(number, text) {
  const place = document.createElement("span");
  place.className = "swatch";
  place.style.background = colour(number);
  return [place, text];
}

function functions(page) {
  const lines = page.main ? [row([swatch(0, "main"), page.main.experts, "local", busy(page.main.busy)])] : [];
  page.groups.forEach((group, number) => {
    const copies = group.replicas > 1 ? ` (${group.replicas} replicas)` : "";
    const addresses = apart(group) ?? group.functions.map((one) => one.address).join(" ");
    const use = apart(group) ? "" : busy(group.busy);
    lines.push(row([swatch(number + 1, name(page, number + 1) + copies), group.experts, addresses, use]));
  });
  by("functions").tBodies[0].replaceChildren(...lines);
}

const time = (seconds) => ({
  number: seconds == null ? "" : seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toPrecision(3)} ms`,
});
/** "1 request", "2 requests". */
const counted = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
/** Limits that baselines can violate, by the names that the server has for them. */
const LIMITS = {
  ttft: "TTFT",
  tpot: "TPOT",
  cold_ttft: "TTFT of a cold request",
  cold_share: "share of cold requests",
  load: "utilisation of the main functions",
  mains: "number of main functions",
  main: "memory of the main function",
  vcpus_main: "vCPUs of the main function",
  spec_main: "memory of the main function (not an allowed size)",
  gpu: "GPU memory",
};
const limitName = (limit) => LIMITS[limit] ?? limit;
const dollars = (cost) => ({ number: cost == null ? "" : `$${(1e6 * cost).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}` });

function plan(page) {
  const { expected, measured, rivals } = page;
  by("plan").textContent = page.planned
    ? "Planned for this workload and price list. The baselines serve the same requests without remote experts."
    : "Manual placement: no cost estimate. Start without placement flags to plan one.";
  const lines = [];
  if (expected) lines.push(row(["plan, typical request", time(expected.ttft_s), time(expected.tpot_s), dollars(expected.cost)]));
  if (measured?.expected) lines.push(row(["plan, requests so far", time(measured.expected.ttft_s), time(measured.expected.tpot_s), dollars(measured.expected.cost)]));
  if (measured) lines.push(row([`measured, mean of ${counted(measured.requests, "request")}`, time(measured.ttft_s), time(measured.tpot_s), dollars(measured.cost)]));
  for (const rival of rivals) {
    const limits = document.createElement("span");
    limits.className = rival.violations.length ? "limits violated" : "limits";
    limits.textContent = rival.violations.length ? `violates limits: ${rival.violations.map(limitName).join(", ")}` : "meets all limits";
    lines.push(row([[rival.name, limits], time(rival.ttft_s), time(rival.tpot_s), dollars(rival.cost)]));
  }
  by("rivals").hidden = lines.length === 0;
  by("rivals").tBodies[0].replaceChildren(...lines);
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${value.toPrecision(3)} ${units[unit]}`;
}

function card({ card: facts, model: served }) {
  if (!facts) return;
  const pairs = [
    ["name", served],
    ["family", facts.family],
    ["experts", `${facts.moe_layers.length} layers of ${facts.experts}, top-${facts.top_k}` + (facts.shared_experts ? `, ${facts.shared_experts} shared` : "")],
    ["weights", `${bytes(facts.total_bytes)}; ${bytes(facts.expert_bytes)} per expert`],
    ["context", `${facts.context_length} tokens, ${bytes(facts.kv_bytes_per_token)} of KV cache per token`],
    ["vocabulary", `${facts.vocab_size} tokens`],
    ["compute", `${facts.compute_dtype} on ${facts.device}, ${facts.operations} backend`],
    ["numerics", facts.numerics_class],
    ["fingerprint", facts.fingerprint],
  ];
  by("card").replaceChildren(...pairs.flatMap(([term, text]) => {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = term;
    dd.textContent = text;
    return [dt, dd];
  }));
}

/** Removes what is shown of another model. */
function forget(name) {
  seen = unseen(name);
  last = null;
  at = { row: 0, column: 0 };
  by("map").replaceChildren();
  // The bodies and not the tables, which would lose them.
  for (const id of ["functions", "rivals"]) by(id).tBodies[0].replaceChildren();
  by("rivals").hidden = true;
  by("plan").textContent = "";
  by("card").replaceChildren();
}

function shown(page) {
  by("state").textContent = page.state ?? "";
  if (seen.model !== page.model) forget(page.model);
  // A model that sleeps keeps its map.
  if (page.generation) {
    page.groups = sorted(page.groups);
    const first = !last;
    last = page;
    warm(page);
    draw(page);
    plan(page);
    card(page);
    functions(page);
    if (first) by("cell").textContent = "Rows are layers, columns are experts.";
  } else if (!last) {
    by("cell").textContent = page.state === "asleep"
      ? "Scaled to zero. The placement appears when the next request wakes the model."
      : "No placement yet. It appears when a main function is ready.";
  }
}

async function look() {
  let page;
  try {
    if (!model() && !(await loadModels())) throw new Failure("No model is served here that this API key may use.");
    const asked = model();
    page = await askJson(`/v1/placement?model=${encodeURIComponent(asked)}`);
    // Another model was chosen meanwhile; the next poll is about that one.
    if (asked !== model()) return;
    problem(null);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    by("state").textContent = "";
    problem(error);
    if (error.status === 401 && document.activeElement === document.body) by("key").focus();
    return;
  }
  shown(page);
}

by("key").value = session.getItem("key") ?? "";
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  session.setItem("key", by("key").value);
  by("model").replaceChildren();
  guarded(look);
});
by("model").addEventListener("change", () => guarded(look));
by("span").addEventListener("change", () => last && draw(last));

async function watch() {
  if (!document.hidden) await guarded(look);
  setTimeout(watch, LOOK_MS);
}
watch();
