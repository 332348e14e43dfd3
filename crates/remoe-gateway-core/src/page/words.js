// Figures in words, and texts that change.

import { by } from "./server.js";

/** "1 request", "2 requests". */
export const counted = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

/** A latency: "36.4 ms", "1.20 s". */
export const latency = (seconds) =>
  seconds == null ? "" : seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toPrecision(3)} ms`;

/** A time that passes: "42 s", "3 min", "2 h 5 min". */
export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  const minutes = Math.round(whole / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** An amount in dollars: two decimals, or three digits if it is smaller. */
export function money(dollars) {
  const digits = Math.abs(dollars) >= 0.1 || dollars === 0
    ? { minimumFractionDigits: 2, maximumFractionDigits: 2 }
    : { maximumSignificantDigits: 3 };
  return `${dollars < 0 ? "-" : ""}$${Math.abs(dollars).toLocaleString("en", digits)}`;
}

/** Sets the text of an element if it differs: screen readers announce what is set. */
export function write(id, text) {
  if (by(id).textContent !== text) by(id).textContent = text;
}

/** An element with a class and a text. */
export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Terms and texts as the content of a list of definitions. */
export const terms = (pairs) => pairs.flatMap(([term, text]) => [element("dt", "", term), element("dd", "", text)]);
