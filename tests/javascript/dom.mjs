// As much of a document as the page's scripts use, so that they run in Node without packages. Elements know the methods
// below and no others: a script that uses another one fails its test.

const VOID = new Set(["meta", "link", "input", "br", "hr"]);

export class Text {
  constructor(text) {
    this.data = String(text);
    this.parent = null;
  }
  get textContent() {
    return this.data;
  }
}

const kebab = (name) => name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);

export class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: new Map(), listeners: new Map(), parent: null, style: {} });
    Object.assign(this, { scrollTop: 0, scrollHeight: 0, clientHeight: 0 });
    this.dataset = new Proxy(this, {
      get: (element, name) => element.attributes.get(`data-${kebab(name)}`),
      set: (element, name, value) => element.attributes.set(`data-${kebab(name)}`, String(value)) && true,
    });
  }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }
  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }
  removeAttribute(name) {
    this.attributes.delete(name);
  }
  append(...nodes) {
    for (const given of nodes) {
      const node = given instanceof Text || given instanceof Element ? given : new Text(given);
      if (node.tag === "#fragment") this.append(...node.children.splice(0));
      else {
        node.remove?.();
        node.parent = this;
        this.children.push(node);
      }
    }
  }
  remove() {
    if (!this.parent) return;
    this.parent.children.splice(this.parent.children.indexOf(this), 1);
    this.parent = null;
  }
  replaceChildren(...nodes) {
    for (const child of this.children.splice(0)) child.parent = null;
    this.append(...nodes);
  }
  get textContent() {
    let text = "";
    for (const node of this.all()) if (node instanceof Text) text += node.data;
    return text;
  }
  set textContent(text) {
    this.replaceChildren(...(text === "" ? [] : [new Text(text)]));
  }
  /** All nodes below this one, in order. */
  all() {
    const [found, open] = [[], [...this.children].reverse()];
    for (let node = open.pop(); node; node = open.pop()) {
      found.push(node);
      if (node instanceof Element) for (let at = node.children.length - 1; at >= 0; at -= 1) open.push(node.children[at]);
    }
    return found;
  }
  /** Elements below by `.class` or tag. */
  querySelectorAll(selector) {
    const fits = selector.startsWith(".")
      ? (node) => node.className.split(" ").includes(selector.slice(1))
      : (node) => node.tag === selector;
    return this.all().filter((node) => node instanceof Element && fits(node));
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }
  get tBodies() {
    return this.children.filter((child) => child.tag === "tbody");
  }
  get classList() {
    const names = () => new Set(this.className.split(" ").filter(Boolean));
    const keep = (set) => (this.className = [...set].join(" "));
    return {
      add: (name) => keep(names().add(name)),
      remove: (name) => keep([...names()].filter((other) => other !== name)),
      toggle: (name, on) => keep(on ? names().add(name) : [...names()].filter((other) => other !== name)),
      contains: (name) => names().has(name),
    };
  }
  /** A select has the value of its chosen option, else of its first one. */
  get value() {
    if (this.tag !== "select") return this.attributes.get("value") ?? (this.tag === "option" ? this.textContent : "");
    const options = this.querySelectorAll("option");
    return (options.find((option) => option.selected) ?? options[0])?.value ?? "";
  }
  set value(value) {
    if (this.tag !== "select") this.attributes.set("value", String(value));
    else for (const option of this.querySelectorAll("option")) option.selected = option.value === value;
  }
  get valueAsNumber() {
    return this.value === "" ? NaN : Number(this.value);
  }
  addEventListener(kind, listener) {
    this.listeners.set(kind, [...(this.listeners.get(kind) ?? []), listener]);
  }
  fire(kind, event = {}) {
    for (const listener of this.listeners.get(kind) ?? []) listener({ preventDefault() {}, target: this, ...event });
  }
  click() {
    this.fire("click");
  }
  requestSubmit() {
    this.fire("submit");
  }
  focus() {}
  getBoundingClientRect() {
    return { left: 0, right: 0, top: 0, bottom: 0, width: 0, height: 0 };
  }
}

for (const name of ["id", "title", "type", "href", "rel", "target", "scope", "start", "label"]) {
  Object.defineProperty(Element.prototype, name, {
    get() {
      return this.attributes.get(name) ?? "";
    },
    set(value) {
      this.attributes.set(name, String(value));
    },
  });
}
Object.defineProperty(Element.prototype, "className", {
  get() {
    return this.attributes.get("class") ?? "";
  },
  set(value) {
    this.attributes.set("class", String(value));
  },
});
for (const name of ["hidden", "disabled", "selected", "open"]) {
  Object.defineProperty(Element.prototype, name, {
    get() {
      return this.attributes.has(name);
    },
    set(on) {
      if (on) this.attributes.set(name, "");
      else this.attributes.delete(name);
    },
  });
}

/** The document of `html`, which is well formed as the page's own file is. */
export function parse(html) {
  const root = new Element("#document");
  const open = [root];
  for (const [, end, tag, attributes, text] of html.matchAll(/<(\/?)([a-z0-9]+)((?:\s+[a-z-]+(?:="[^"]*")?)*)>|<![^>]*>|([^<]+)/g)) {
    if (text) open.at(-1).append(text);
    else if (end) open.pop();
    else if (tag) {
      const element = new Element(tag);
      for (const [, name, value] of attributes.matchAll(/([a-z-]+)(?:="([^"]*)")?/g)) element.setAttribute(name, value ?? "");
      open.at(-1).append(element);
      if (!VOID.has(tag)) open.push(element);
    }
  }
  const byId = (id) => root.all().find((node) => node instanceof Element && node.id === id) ?? null;
  return Object.assign(root, {
    body: root.querySelector("body"),
    hidden: false,
    getElementById: byId,
    createElement: (name) => new Element(name),
    createElementNS: (_, name) => new Element(name),
    createTextNode: (data) => new Text(data),
    createDocumentFragment: () => new Element("#fragment"),
  });
}
