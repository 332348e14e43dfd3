// The placement of the chosen model, polled once a second: its map, functions, plan, sleep, cost and card.

import { apart, colour, experts, forgetMap, name, listing, showMap, whole } from "./map.js";
import { forgetPlan, showPlan } from "./plan.js";
import { askJson, by, Failure, guarded, loadModels, model, problem, session } from "./server.js";
import { showSleep } from "./sleep.js";
import { counted, element, terms, write } from "./words.js";

const LOOK_MS = 1000;
let shownModel = null;
let hasPlacement = false;
/** Whether the model was polled before it had a placement. */
let fromStart = false;

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

function busy(share) {
  const meter = document.createElement("meter");
  meter.value = share;
  const text = `${Math.round(100 * share)} %`;
  meter.textContent = text;
  meter.title = text;
  meter.setAttribute("aria-label", `busy ${text}`);
  return [meter, ` ${text}`];
}

/** A line of the table of functions. */
function row(number, title, note, of, all, use) {
  const line = document.createElement("tr");
  const first = element("th", "");
  first.setAttribute("scope", "row");
  const swatch = element("span", "swatch");
  swatch.style.background = colour(number);
  first.append(swatch, title, element("span", "note", note));
  const last = element("td", "busy");
  last.append(...use);
  const count = element("td", "number", `${experts(of)} of ${all}`);
  // The map shows which; this is the form that flags take.
  count.title = of;
  line.append(first, count, last);
  return line;
}

function functions(page) {
  const all = whole(page);
  const lines = page.main ? [row(0, "main", "beside the engine", page.main.experts, all, busy(page.main.busy))] : [];
  page.groups.forEach((group, number) => {
    const copies = group.replicas > 1 ? ` (${group.replicas} replicas)` : "";
    const note = apart(group) ?? group.functions.map((one) => one.address).join(" ");
    lines.push(row(number + 1, name(page, number + 1) + copies, note, group.experts, all, apart(group) ? [] : busy(group.busy)));
  });
  by("functions").hidden = lines.length === 0;
  by("functions").tBodies[0].replaceChildren(...lines);
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
  const number = (count) => count.toLocaleString("en");
  by("card").replaceChildren(...terms([
    ["name", served],
    ["family", facts.family],
    ["experts", `${counted(facts.moe_layers.length, "layer")} of ${facts.experts}, top-${facts.top_k}` + (facts.shared_experts ? `, ${facts.shared_experts} shared` : "")],
    ["weights", `${bytes(facts.total_bytes)}; ${bytes(facts.expert_bytes)} per expert`],
    ["context", `${number(facts.context_length)} tokens, ${bytes(facts.kv_bytes_per_token)} of KV cache per token`],
    ["vocabulary", `${number(facts.vocab_size)} tokens`],
    ["compute", `${facts.compute_dtype} on ${facts.device}, ${facts.operations} backend`],
    ["numerics", facts.numerics_class],
    ["fingerprint", facts.fingerprint],
  ]));
}

/** Removes what is shown of another model. */
function forget(name) {
  shownModel = name;
  hasPlacement = false;
  fromStart = false;
  forgetMap();
  forgetPlan();
  // The body and not the table, which would lose it.
  by("functions").tBodies[0].replaceChildren();
  by("functions").hidden = true;
  by("card").replaceChildren();
}

function shown(page) {
  write("state", page.state ?? "");
  by("state").dataset.state = page.state ?? "";
  if (shownModel !== page.model) forget(page.model);
  showSleep(page);
  // A model that sleeps keeps its map.
  if (page.generation) {
    page.groups = sorted(page.groups);
    hasPlacement = true;
    showMap(page, fromStart);
    showPlan(page, experts(page.main?.experts), whole(page));
    card(page);
    functions(page);
  } else if (!hasPlacement) {
    fromStart = true;
    write("cell", page.state === "asleep"
      ? "Scaled to zero. The placement appears when the next request wakes the model."
      : "No placement yet. It appears when a main function is ready.");
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
    write("state", "");
    problem(error);
    if (error.status === 401) {
      by("key-form").hidden = false;
      if (document.activeElement === document.body) by("key").focus();
    }
    return;
  }
  shown(page);
}

by("key").value = session.getItem("key") ?? "";
by("key-form").hidden = !by("key").value;
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  session.setItem("key", by("key").value);
  by("model").replaceChildren();
  guarded(look);
});
by("model").addEventListener("change", () => guarded(look));

async function watch() {
  if (!document.hidden) await guarded(look);
  setTimeout(watch, LOOK_MS);
}
watch();
