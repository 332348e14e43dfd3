// Markdown of answers, as elements. The text of a model is hostile: it becomes text nodes and the elements below, never
// HTML. Reading takes time linear in the text, whatever the text is; text that is not Markdown stays as it is.

/** Elements that an answer can have, and their attributes; `tests/javascript/page.test.mjs` holds them. */
export const ALLOWED = {
  p: [], h3: [], h4: [], h5: [], h6: [], hr: [], br: [], strong: [], em: [], ul: [], ol: ["start"], li: [], blockquote: [],
  code: [], pre: ["tabindex"], table: [], thead: [], tbody: [], tr: [], th: ["scope"], td: [],
  div: ["class"], span: ["class"], button: ["type", "class"], a: ["href", "rel", "target"],
};
/** Lists and quotes within each other, and emphasis within emphasis; what is deeper stays text. */
const DEPTH = 6;
const OPEN = 16;
const COLUMNS = 64;
/** Characters beyond which an answer is shown as plain text. */
const LONGEST = 1 << 20;

// Blocks

const indentOf = (line) => {
  let at = 0;
  while (line[at] === " ") at += 1;
  return at;
};

const blank = (line) => line.trim() === "";

/** The fence that a line opens: its mark, length, indentation and language; else null. */
function fenceOf(line) {
  const indent = indentOf(line);
  const mark = line[indent];
  if (mark !== "`" && mark !== "~") return null;
  let end = indent;
  while (line[end] === mark) end += 1;
  const info = line.slice(end).trim();
  if (end - indent < 3 || (mark === "`" && info.includes("`"))) return null;
  return { mark, length: end - indent, indent, language: /^[\w+#.-]{1,20}/.exec(info)?.[0] ?? "" };
}

function closes(line, { mark, length }) {
  const text = line.trim();
  if (text.length < length) return false;
  for (const letter of text) if (letter !== mark) return false;
  return true;
}

function headingOf(line) {
  const found = /^ {0,3}(#{1,6})(?:[ \t]+|$)/.exec(line);
  return found && { level: found[1].length, text: line.slice(found[0].length).trim() };
}

function isRule(line) {
  const marks = line.trim();
  if (!"-*_".includes(marks[0] ?? "x")) return false;
  let count = 0;
  for (const letter of marks) {
    if (letter === marks[0]) count += 1;
    else if (letter !== " ") return false;
  }
  return count >= 3;
}

/** The item that a line begins: whether it is numbered, its number, and where its text begins; else null. */
function itemOf(line) {
  const indent = indentOf(line);
  const found = /^(?:[-*+]|(\d{1,9})[.)])(?: +|$)/.exec(line.slice(indent, indent + 16));
  if (!found) return null;
  const ordered = found[1] !== undefined;
  return { indent, ordered, number: ordered ? Number(found[1]) : 0, width: indent + found[0].length };
}

const isQuote = (line) => /^ {0,3}>/.test(line);

/** True if a line ends a paragraph above it. */
const interrupts = (line) => blank(line) || fenceOf(line) || headingOf(line) || isRule(line) || isQuote(line) || itemOf(line);

/** Cells of a row, at most COLUMNS. A bar behind a backslash is text. */
function cellsOf(line) {
  const cells = [""];
  const text = line.trim();
  const end = text.endsWith("|") && !text.endsWith("\\|") ? text.length - 1 : text.length;
  let from = text.startsWith("|") ? 1 : 0;
  for (let at = from; at <= end; at += 1) {
    if (at < end && text[at] === "\\" && text[at + 1] === "|") {
      cells[cells.length - 1] += `${text.slice(from, at)}|`;
      from = at + 2;
      at += 1;
    } else if (at === end || text[at] === "|") {
      cells[cells.length - 1] += text.slice(from, at);
      from = at + 1;
      if (at < end) cells.push("");
    }
  }
  return cells.slice(0, COLUMNS).map((cell) => cell.trim());
}

const isDelimiter = (line) => line !== undefined && line.includes("-") && line.includes("|") && /^[\s|:-]+$/.test(line);

/** Blocks of `lines`; each knows the number of its first line. */
function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  const add = (block, end) => {
    blocks.push({ ...block, line: at });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (blank(line)) {
      at += 1;
      continue;
    }
    const fence = fenceOf(line);
    const heading = headingOf(line);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !closes(lines[end], fence)) end += 1;
      const code = lines.slice(at + 1, end).map((text) => text.slice(Math.min(indentOf(text), fence.indent)));
      add({ kind: "code", language: fence.language, text: code.join("\n") }, end + 1);
    } else if (heading) add({ kind: "heading", ...heading }, at + 1);
    else if (isRule(line)) add({ kind: "rule" }, at + 1);
    else if (isQuote(line) && depth < DEPTH) {
      let end = at + 1;
      while (end < lines.length && (isQuote(lines[end]) || !interrupts(lines[end]))) end += 1;
      const inner = lines.slice(at, end).map((text) => text.replace(/^ {0,3}> ?/, ""));
      add({ kind: "quote", blocks: blocksOf(inner, depth + 1) }, end);
    } else if (itemOf(line) && depth < DEPTH) {
      const [list, end] = listAt(lines, at, depth);
      add(list, end);
    } else if (line.includes("|") && isDelimiter(lines[at + 1])) {
      let end = at + 2;
      while (end < lines.length && lines[end].includes("|") && !blank(lines[end])) end += 1;
      add({ kind: "table", head: cellsOf(line), rows: lines.slice(at + 2, end).map(cellsOf) }, end);
    } else {
      let end = at + 1;
      while (end < lines.length && !interrupts(lines[end])) end += 1;
      add({ kind: "paragraph", text: lines.slice(at, end).map((text) => text.trim()).join("\n") }, end);
    }
  }
  return blocks;
}

/** The list that begins at a line, and the line behind it. */
function listAt(lines, start, depth) {
  const first = itemOf(lines[start]);
  const items = [];
  let inner = [];
  let width = 0;
  let [at, end, gap, fence] = [start, start, false, null];
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const item = fence ? null : itemOf(line);
    if (item && item.indent < first.indent + 2) {
      const ends = item.ordered !== first.ordered || item.indent < first.indent || isRule(line);
      if (ends) break;
      inner = [line.slice(item.width)];
      width = item.width;
      items.push(inner);
      fence = fenceOf(inner[0]);
    } else if (blank(line)) {
      inner.push("");
      gap = true;
      continue;
    } else {
      const indent = indentOf(line);
      const within = indent >= Math.min(width, first.indent + 2);
      // A line that is not indented continues the paragraph right above it.
      if (!within && (gap || fence || interrupts(line))) break;
      const text = line.slice(Math.min(indent, width));
      inner.push(text);
      if (fence && closes(text, fence)) fence = null;
      else if (!fence) fence = fenceOf(text);
    }
    gap = false;
    end = at + 1;
  }
  const blocks = items.map((item) => blocksOf(item, depth + 1));
  return [{ kind: "list", ordered: first.ordered, start: first.number, items: blocks }, end];
}

// Text within blocks

const space = (letter) => letter === undefined || /\s/.test(letter);
const word = (letter) => letter !== undefined && /[\p{L}\p{N}]/u.test(letter);
const PUNCTUATION = /[!-/:-@[-`{-~]/;

/** The address if it is one of the web, else null. */
export function webAddress(text) {
  if (text.length > 2048 || !/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/** Where an address of the web that begins at `at` ends: before spaces, marks and punctuation that closes a sentence. */
function addressEnd(text, at) {
  let end = at;
  let depth = 0;
  while (end < text.length && !/[\s<>"'`*[\]|]/.test(text[end])) {
    if (text[end] === "(") depth += 1;
    if (text[end] === ")" && --depth < 0) break;
    end += 1;
  }
  while (end > at && /[.,;:!?_]/.test(text[end - 1])) end -= 1;
  return end;
}

/** The target in parentheses at `at`: its address and where it ends; else null. It has no brackets, spaces or marks. */
function targetAt(text, at) {
  let end = at;
  let depth = 0;
  for (; end < text.length && !/[\s<>[\]]/.test(text[end]); end += 1) {
    if (text[end] === "(") depth += 1;
    if (text[end] === ")" && --depth < 0) break;
  }
  const address = text.slice(at, end);
  // A title is read over.
  if (text[end] === " " && text[end + 1] === '"') {
    end += 2;
    while (end < text.length && !/["\n[\]]/.test(text[end])) end += 1;
    if (text[end] !== '"') return null;
    end += 1;
  }
  return text[end] === ")" ? { address, end: end + 1 } : null;
}

/**
 * Tokens of a text: strings, and `{open}`, `{close}`, `{code}`, `{link, text}`, `{line}`. What opens is closed, in order.
 * Every opener is taken off its stack once, every run of backticks is passed once, and targets stop at brackets, so that
 * the time is linear.
 */
function tokensOf(text) {
  const tokens = [];
  /** Marks of emphasis that are open: kind, token. */
  const open = [];
  /** Brackets that are open: token, marks open before it. */
  let brackets = [];
  /** Starts of the runs of backticks by length, the next ones last. */
  const runs = new Map();
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] !== "`") continue;
    const start = at;
    while (text[at + 1] === "`") at += 1;
    const length = at + 1 - start;
    if (!runs.has(length)) runs.set(length, []);
    runs.get(length).push(start);
  }
  for (const starts of runs.values()) starts.reverse();

  let plain = 0;
  let at = 0;
  const flush = () => {
    if (plain < at) tokens.push(text.slice(plain, at));
  };
  /** Takes `length` characters as `token`, or as text. */
  const take = (length, token) => {
    flush();
    tokens.push(token ?? text.slice(at, at + length));
    at += length;
    plain = at;
  };
  while (at < text.length) {
    const letter = text[at];
    if (letter === "\\" && at + 1 < text.length && PUNCTUATION.test(text[at + 1])) {
      take(2, text[at + 1]);
    } else if (letter === "\n") take(1, { line: true });
    else if (letter === "`") {
      let end = at;
      while (text[end] === "`") end += 1;
      const length = end - at;
      // Behind a backslash the run is shorter than it was counted.
      const starts = runs.get(length) ?? [];
      while (starts.length > 0 && starts.at(-1) < end) starts.pop();
      const close = starts.at(-1);
      if (close === undefined) take(length);
      else {
        const code = text.slice(end, close).replaceAll("\n", " ");
        const padded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
        take(close + length - at, { code: padded ? code.slice(1, -1) : code });
      }
    } else if (letter === "*" || letter === "_") {
      let end = at;
      while (text[end] === letter) end += 1;
      const length = end - at;
      const [before, after] = [text[at - 1], text[end]];
      const single = letter === "_";
      const mayClose = !space(before) && !(single && word(after));
      const mayOpen = !space(after) && !(single && word(before));
      if (length > 3) {
        take(length);
        continue;
      }
      let left = length;
      for (let step = 0; mayClose && step < 2 && left > 0; step += 1) {
        const fits = (mark) => mark.letter === letter && (length === 3 ? mark.length <= left : mark.length === left);
        const found = open.findLastIndex(fits);
        if (found < 0) break;
        const mark = open[found];
        open.length = found;
        // A link cannot begin within these marks and end behind them.
        while (brackets.length > 0 && brackets.at(-1).token > mark.token) brackets.pop();
        take(mark.length, { close: true });
        tokens[mark.token] = { open: mark.length === 2 ? "strong" : "em" };
        left -= mark.length;
      }
      for (const part of left === 3 ? [2, 1] : left > 0 ? [left] : []) {
        if (mayOpen && open.length < OPEN) {
          flush();
          plain = at;
          open.push({ letter, length: part, token: tokens.length });
        }
        take(part);
      }
    } else if (letter === "[" || (letter === "!" && text[at + 1] === "[")) {
      flush();
      plain = at;
      brackets.push({ token: tokens.length, marks: open.length });
      take(letter === "[" ? 1 : 2);
    } else if (letter === "]") {
      const bracket = brackets.pop();
      const target = bracket && text[at + 1] === "(" ? targetAt(text, at + 2) : null;
      const link = target && webAddress(target.address);
      if (!link) {
        take(1);
        continue;
      }
      open.length = Math.min(open.length, bracket.marks);
      tokens[bracket.token] = { open: "a", link };
      take(target.end - at, { close: true });
      // Links have no links in them.
      brackets = [];
    } else if ((letter === "h" || letter === "H") && !word(text[at - 1]) && /^https?:\/\//i.test(text.slice(at, at + 8))) {
      const end = addressEnd(text, at);
      const link = webAddress(text.slice(at, end));
      if (link) take(end - at, { link, text: text.slice(at, end) });
      else take(Math.max(1, end - at));
    } else at += 1;
  }
  flush();
  return tokens;
}

// Elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  // One by one: a call takes no hundred thousand arguments.
  for (const child of children.flat()) element.append(child);
  return element;
}

const linkTo = (href) => make("a", { href, rel: "noopener noreferrer", target: "_blank" });

/** Appends a text with its emphasis, code and links to `place`. */
function inline(place, text) {
  const open = [place];
  let links = 0;
  for (const token of tokensOf(text)) {
    const top = open.at(-1);
    if (typeof token === "string") top.append(token);
    else if (token.line) top.append(make("br"));
    else if (token.code !== undefined) top.append(make("code", {}, token.code));
    else if (token.text !== undefined) {
      const link = links > 0 ? make("span") : linkTo(token.link);
      link.append(token.text);
      top.append(link);
    } else if (token.open) {
      const element = token.link ? linkTo(token.link) : make(token.open);
      links += token.link ? 1 : 0;
      top.append(element);
      open.push(element);
    } else if (token.close) links -= open.pop().getAttribute("href") === null ? 0 : 1;
  }
  return place;
}

/** Copies `text`; where the browser refuses, selects it for the user to copy. */
async function copy(text, button, place) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(place);
    button.textContent = "Press Ctrl+C to copy";
  }
}

function codeBlock({ language, text }) {
  const button = make("button", { type: "button", class: "copy" }, "Copy");
  const pre = make("pre", { tabindex: "0" }, make("code", {}, text));
  button.addEventListener("click", () => copy(text, button, pre));
  return make("div", { class: "code" }, make("div", { class: "bar" }, make("span", { class: "language" }, language || "code"), button), pre);
}

function element(block) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      // The page has the first two levels itself.
      return inline(make(`h${Math.min(6, block.level + 2)}`), block.text);
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, block.blocks.map(element));
    case "list": {
      const list = block.ordered ? make("ol", block.start === 1 ? {} : { start: String(block.start) }) : make("ul");
      for (const item of block.items) {
        const place = make("li");
        // The text of a short item stands without a paragraph.
        for (const [at, inner] of item.entries()) {
          if (at === 0 && inner.kind === "paragraph") inline(place, inner.text);
          else place.append(element(inner));
        }
        list.append(place);
      }
      return list;
    }
    case "table": {
      const row = (cells, tag, attributes) => {
        const line = make("tr");
        for (const cell of cells) line.append(inline(make(tag, attributes), cell));
        return line;
      };
      const body = make("tbody");
      for (const cells of block.rows) body.append(row(cells, "td"));
      const table = make("table", {}, make("thead", {}, row(block.head, "th", { scope: "col" })), body);
      return make("div", { class: "table" }, table);
    }
    default:
      return inline(make("p"), block.text);
  }
}

const linesOf = (text) => text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");

/**
 * Keeps `place` showing a text that grows. The last line may still become part of the block before it (a row of dashes
 * that becomes a table's), so the last two blocks are made again, and all others keep their elements.
 */
export function growing(place) {
  let [shown, done] = ["", 0];
  let last = [];
  return (text) => {
    if (text === shown) return;
    if (text.length > LONGEST || !text.startsWith(shown)) {
      place.replaceChildren();
      [done, last] = [0, []];
    }
    shown = text;
    if (text.length > LONGEST) {
      place.append(make("pre", { tabindex: "0" }, text));
      return;
    }
    for (const node of last) node.remove();
    const rest = text.slice(done);
    const blocks = blocksOf(linesOf(rest), 0);
    const complete = Math.max(0, blocks.length - 2);
    const made = blocks.map(element);
    for (const node of made) place.append(node);
    last = made.slice(complete);
    let from = 0;
    for (let lines = blocks[complete]?.line ?? 0; lines > 0; lines -= 1) from = rest.indexOf("\n", from) + 1;
    done += from;
  };
}
