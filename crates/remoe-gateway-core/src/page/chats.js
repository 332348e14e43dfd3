// Chats that this browser keeps: one entry of localStorage each, so that tabs do not overwrite each other's.

const PREFIX = "remoe.chat.";
const VERSION = 1;
/** Most chats, and most characters of all of them. The oldest are removed first, of a long one its first turns. */
export const BOUNDS = { chats: 50, characters: 1 << 20 };
const TITLE = 40;

/** The browser's storage; null if it refuses, as it may in private windows. */
function storage() {
  try {
    return localStorage;
  } catch {
    return null;
  }
}

/** Identifiers sort by the time at which their chats began. */
export const fresh = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2, 10)}`, turns: [] });

const began = (id) => Number.parseInt(id, 10) || 0;

/** Identifiers of all chats, the oldest first. */
function identifiers() {
  const kept = storage();
  const found = [];
  for (let at = 0; at < (kept?.length ?? 0); at += 1) {
    const name = kept.key(at);
    if (name.startsWith(PREFIX)) found.push(name.slice(PREFIX.length));
  }
  return found.sort((one, other) => began(one) - began(other) || (one < other ? -1 : 1));
}

const FIELDS = ["user", "answer", "thoughts", "model", "figures", "ended", "error"];

/** Lists of a turn, with the fields of their entries. */
const LISTS = { calls: ["id", "name", "arguments"], results: ["id", "name", "content"] };

/** The list with its known fields; undefined if it is not one. */
function listOf(given, fields) {
  const fits = (entry) => fields.every((name) => typeof entry?.[name] === "string");
  if (!Array.isArray(given) || given.length === 0 || !given.every(fits)) return undefined;
  return given.map((entry) => Object.fromEntries(fields.map((name) => [name, entry[name]])));
}

/** A turn with its known fields; null if it is not one. */
function turnOf(given) {
  if (typeof given?.user !== "string" || typeof given.answer !== "string") return null;
  const texts = FIELDS.filter((name) => typeof given[name] === "string").map((name) => [name, given[name]]);
  const lists = Object.entries(LISTS).map(([name, fields]) => [name, listOf(given[name], fields)]);
  return Object.fromEntries([...texts, ...lists.filter(([, list]) => list)]);
}

/** The chat with this identifier; null if it is not kept or cannot be read. */
export function read(id) {
  try {
    const { version, turns } = JSON.parse(storage().getItem(PREFIX + id));
    const known = turns.map(turnOf);
    return version === VERSION && known.length > 0 && !known.includes(null) ? { id, turns: known } : null;
  } catch {
    return null;
  }
}

/** The beginning of a chat's first prompt. */
export function title({ turns }) {
  const letters = [...(turns[0]?.user.slice(0, 4 * TITLE) ?? "").replace(/\s+/g, " ").trim()];
  if (letters.length === 0) return "New chat";
  return letters.length > TITLE ? `${letters.slice(0, TITLE).join("")}…` : letters.join("");
}

/** All chats that can be read, the newest first. */
export const list = () => identifiers().reverse().map(read).filter(Boolean);

export function drop(id) {
  storage()?.removeItem(PREFIX + id);
}

/** The chat as text, without the first turns that are too many; null if its last turn is too long alone. */
function written({ turns }) {
  const texts = turns.map((turn) => JSON.stringify(turn));
  let left = BOUNDS.characters - 100;
  let first = texts.length;
  while (first > 0 && left > texts[first - 1].length) {
    first -= 1;
    left -= texts[first].length + 1;
  }
  return first < texts.length ? `{"version":${VERSION},"turns":[${texts.slice(first).join()}]}` : null;
}

/** Keeps a chat, in place of older ones where they are too many; true if it is kept. */
export function keep(chat) {
  const kept = storage();
  const text = written(chat);
  if (!kept || !text) return false;
  const others = identifiers().filter((id) => id !== chat.id);
  const size = (id) => kept.getItem(PREFIX + id)?.length ?? 0;
  let whole = others.reduce((sum, id) => sum + size(id), text.length);
  const dropped = [];
  const dropOldest = () => {
    whole -= size(others[0]);
    const name = PREFIX + others.shift();
    dropped.push([name, kept.getItem(name)]);
    kept.removeItem(name);
  };
  while (others.length > 0 && (whole > BOUNDS.characters || others.length >= BOUNDS.chats)) dropOldest();
  for (;;) {
    try {
      kept.setItem(PREFIX + chat.id, text);
      return true;
    } catch {
      // The browser's own limit is lower, or other pages of this address need the room.
      if (others.length === 0) {
        dropped.forEach(([name, before]) => kept.setItem(name, before));
        return false;
      }
      dropOldest();
    }
  }
}
