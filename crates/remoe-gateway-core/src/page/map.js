// The map of experts: a row of cells for each layer, in the colours of functions, with the usage of late as opacity.

import { by } from "./server.js";
import { counted, span, write } from "./words.js";

/** Polls after which usage counts half. */
const HALF_LIFE = 3;
const CELL = 14;
const MARGIN = 26;
/** Columns from which on cells are so small that numbers need larger letters. */
const MANY = 32;
/** Hues of functions: distinct in light and dark themes, and with most kinds of colour blindness. */
const COLOURS = ["#c2571a", "#2f7fc1", "#1f9d73", "#b0449f", "#a58a12", "#6a5fd0", "#cf4d63", "#4c8f2f"];

const unseen = () => ({ pairs: new Map(), heat: new Map(), used: new Map(), cells: new Map(), shape: "" });
let seen = unseen();
let last = null;
let at = { row: 0, column: 0 };

/** "0:0-7,1:8" as a map from layers to lists of experts. */
export function listing(text) {
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

// The first is the main function's alone.
export const colour = (number) => COLOURS[number === 0 ? 0 : 1 + ((number - 1) % (COLOURS.length - 1))];
/** A function by its name; a group that the server cannot name, by its number on this page. */
export const name = (page, number) => (number === 0 ? "main" : page.groups[number - 1]?.name || `unnamed group ${number}`);
/** State of a group that the main function does not call. */
export const apart = (group) => (group?.asleep ? "asleep" : group?.starting ? "starting" : null);

/** Adds the usage of each expert since the last poll to its faded usage before. `fromStart`: the page has seen all of it. */
function warm(page, fromStart) {
  const fade = 0.5 ** (1 / HALF_LIFE);
  const now = Date.now();
  for (const { layer, pairs } of page.experts) {
    pairs.forEach((count, expert) => {
      const key = `${layer}:${expert}`;
      const before = seen.pairs.get(key) ?? (fromStart ? 0 : count);
      // A restarted main function counts from zero.
      const fresh = count >= before ? count - before : count;
      if (fresh > 0) seen.used.set(key, now);
      seen.heat.set(key, (seen.heat.get(key) ?? 0) * fade + fresh);
      seen.pairs.set(key, count);
    });
  }
}

const svg = (tag, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

function label(text, x, y) {
  const place = svg("text", { x, y });
  place.textContent = text;
  return place;
}

/** Draws the cells of a model of another shape. */
function drawCells(page, columns) {
  const map = by("map");
  seen.cells.clear();
  const width = MARGIN + columns * CELL;
  map.setAttribute("viewBox", `0 0 ${width} ${MARGIN / 2 + page.experts.length * CELL}`);
  map.classList.toggle("many", columns > MANY);
  map.style.maxWidth = `${width * 1.6}px`;
  map.style.minWidth = `${Math.min(width, columns * 8)}px`;
  map.replaceChildren();
  page.experts.forEach(({ layer, pairs }, row) => {
    map.append(label(String(layer), 2, MARGIN / 2 + row * CELL + 10));
    pairs.forEach((_, expert) => {
      const place = { x: MARGIN + expert * CELL, y: MARGIN / 2 + row * CELL };
      const cell = svg("rect", { ...place, width: CELL - 2, height: CELL - 2, rx: 2 });
      cell.addEventListener("pointerenter", () => select(row, expert));
      map.append(cell);
      seen.cells.set(`${layer}:${expert}`, cell);
    });
  });
  for (let expert = 0; expert < columns; expert += columns > MANY ? 8 : 4) {
    map.append(label(String(expert), MARGIN + expert * CELL, 9));
  }
}

function draw(page) {
  const columns = Math.max(0, ...page.experts.map((layer) => layer.pairs.length));
  const shape = `${page.experts.length} ${columns}`;
  if (shape !== seen.shape) {
    seen.shape = shape;
    drawCells(page, columns);
  }
  const use = by("span").value === "now" ? seen.heat : seen.pairs;
  let most = 1e-9;
  for (const count of use.values()) most = Math.max(most, count);
  const of = hosts(page);
  for (const [key, cell] of seen.cells) {
    cell.setAttribute("fill", colour(of.get(key) ?? 0));
    cell.classList.toggle("asleep", Boolean(apart(page.groups[(of.get(key) ?? 0) - 1])));
    cell.setAttribute("fill-opacity", (0.2 + 0.8 * Math.sqrt((use.get(key) ?? 0) / most)).toFixed(3));
  }
}

/** When the selected expert was used last, as far as this page has seen. */
function lastUse(key, count) {
  const used = seen.used.get(key);
  if (used) return Date.now() - used < 1500 ? "last used just now" : `last used ${span((Date.now() - used) / 1000)} ago`;
  return count > 0 ? "last used before this page was opened" : "not used since the main function started";
}

/** Facts about the selected expert: its title, then a line each. */
function facts() {
  const layer = last?.experts[at.row];
  if (!layer) return null;
  const key = `${layer.layer}:${at.column}`;
  const count = layer.pairs[at.column];
  const whole = layer.pairs.reduce((sum, pairs) => sum + pairs, 0);
  const number = hosts(last).get(key);
  const state = apart(last.groups[number - 1]);
  return {
    key,
    title: `Layer ${layer.layer}, expert ${at.column}`,
    lines: [
      number === undefined ? "in no function" : `in ${name(last, number)}${state ? `, which is ${state}` : ""}`,
      `used ${counted(count, "time")}, ${whole ? ((100 * count) / whole).toFixed(1) : "0.0"} % of its layer`,
      lastUse(key, count),
    ],
  };
}

function line(text, tag = "span") {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

/** Shows the tooltip beside its cell, within the map. */
function tip(shown) {
  const place = by("tip");
  place.replaceChildren(line(shown.title, "strong"), ...shown.lines.map((text) => line(text)));
  place.hidden = false;
  const [box, cell] = [by("map-box"), seen.cells.get(shown.key)].map((one) => one.getBoundingClientRect());
  const own = place.getBoundingClientRect();
  const left = Math.max(0, Math.min(cell.left - box.left + cell.width / 2 - own.width / 2, box.width - own.width));
  place.style.left = `${left}px`;
  // Below its cell: what is above it stays readable.
  place.style.top = `${cell.bottom - box.top + 6}px`;
}

const hideTip = () => (by("tip").hidden = true);

/** Selects an expert and describes it. */
function select(row, column) {
  const layer = last?.experts[row];
  if (!layer) return;
  at = { row, column: Math.max(0, Math.min(column, layer.pairs.length - 1)) };
  for (const cell of by("map").querySelectorAll(".at")) cell.classList.remove("at");
  const shown = facts();
  seen.cells.get(shown.key)?.classList.add("at");
  write("cell", `${shown.title}: ${shown.lines.join("; ")}`);
  tip(shown);
}

by("map").addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step || !last) return;
  event.preventDefault();
  select(Math.max(0, Math.min(at.row + step[0], last.experts.length - 1)), at.column + step[1]);
});
by("map").addEventListener("focus", () => select(at.row, at.column));
by("map").addEventListener("blur", hideTip);
by("map").addEventListener("pointerleave", hideTip);
by("map-scroll").addEventListener("scroll", hideTip);
by("span").addEventListener("change", () => last && draw(last));

/** Experts of a function, and of the model. */
export const experts = (text) => [...listing(text).values()].reduce((sum, layer) => sum + layer.length, 0);
export const whole = (page) => page.experts.reduce((sum, { pairs }) => sum + pairs.length, 0);

/** Shows the polled placement; `fromStart` if the page was open before there was one. */
export function showMap(page, fromStart) {
  if (!last) {
    write("cell", "");
    by("map-hint").hidden = false;
    // The tooltip shows the same from now on: this is for screen readers.
    by("cell").className = "hidden";
  }
  last = page;
  warm(page, fromStart);
  draw(page);
  if (!by("tip").hidden) tip(facts());
}

/** Removes the map of another model. */
export function forgetMap() {
  seen = unseen();
  last = null;
  at = { row: 0, column: 0 };
  hideTip();
  by("map-hint").hidden = true;
  by("cell").className = "";
  by("map").replaceChildren();
}
