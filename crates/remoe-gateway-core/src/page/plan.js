// The plan in words, then beside its baselines and what was measured, as a table.

import { by } from "./server.js";
import { counted, element, latency, money } from "./words.js";

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

const million = (cost) => `$${(1e6 * cost).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
const took = ({ ttft_s: first, tpot_s: each }) =>
  `first token after ${latency(first)}${each == null ? "" : `, then one every ${latency(each)}`}`;

/** The cheapest of `rivals` that keeps all limits. */
const cheapest = (rivals) =>
  rivals.filter(({ violations }) => violations.length === 0).sort((one, other) => one.cost - other.cost)[0];

function againstRivals(expected, rivals) {
  if (rivals.length === 0) return "";
  const rival = cheapest(rivals);
  if (!rival) return "No baseline meets all limits.";
  const difference = rival.cost - expected.cost;
  const share = `${Math.abs((100 * difference) / Math.max(rival.cost, expected.cost)).toFixed(0)} %`;
  if (Math.abs(difference) < 0.005 * rival.cost) return `The best baseline, ${rival.name}, costs the same.`;
  return difference > 0
    ? `That is ${money(1e6 * difference)} (${share}) less than the best baseline that meets all limits, ${rival.name}.`
    : `The baseline ${rival.name} would cost ${money(-1e6 * difference)} (${share}) less: remote experts do not pay for these requests.`;
}

/** Sentences about the placement, its cost and what was measured. `here` of `all` experts are in the main function. */
export function sentences({ planned, expected, measured, rivals, groups }, here, all) {
  const functions = groups.reduce((sum, { replicas }) => sum + replicas, 0);
  const said = [
    all > here
      ? `${here} of ${counted(all, "expert")} are in the main function, ${all - here} in ${counted(functions, "remote function")}.`
      : `All ${counted(all, "expert")} are in the main function.`,
  ];
  if (planned && expected) {
    said.push(`Expected of a typical request: ${took(expected)}; a million of them cost ${million(expected.cost)}.`);
    said.push(againstRivals(expected, rivals));
  } else {
    said.push("The placement was given by hand, so there is no estimate. Start without placement flags to plan one.");
  }
  if (measured) said.push(`Measured over ${counted(measured.requests, "request")}: ${took(measured)}.`);
  return said.filter(Boolean);
}

function row(name, note, violated, figures) {
  const line = document.createElement("tr");
  const first = element("th", "", name);
  first.setAttribute("scope", "row");
  if (note) first.append(element("span", violated ? "note violated" : "note", note));
  const { ttft_s: ttft, tpot_s: tpot, cost } = figures;
  const cells = [latency(ttft), latency(tpot), cost == null ? "" : million(cost)];
  line.append(first, ...cells.map((text) => element("td", "number", text)));
  return line;
}

/** Shows the plan of the polled placement. */
export function showPlan(page, here, all) {
  const { expected, measured, rivals } = page;
  by("plan").replaceChildren(...sentences(page, here, all).map((text) => element("li", "", text)));
  const lines = [];
  if (expected) lines.push(row("plan", "expected of a typical request", false, expected));
  if (measured?.expected) lines.push(row("plan", "expected of the requests so far", false, measured.expected));
  if (measured) lines.push(row("measured", `mean of ${counted(measured.requests, "request")}`, false, measured));
  for (const rival of rivals) {
    const violated = rival.violations.map((limit) => LIMITS[limit] ?? limit).join(", ");
    lines.push(row(rival.name, violated ? `violates limits: ${violated}` : "meets all limits", Boolean(violated), rival));
  }
  by("rivals").hidden = lines.length === 0;
  by("rivals").tBodies[0].replaceChildren(...lines);
}

/** Removes the plan of another model. */
export function forgetPlan() {
  by("plan").replaceChildren();
  // The body and not the table, which would lose it.
  by("rivals").tBodies[0].replaceChildren();
  by("rivals").hidden = true;
}
