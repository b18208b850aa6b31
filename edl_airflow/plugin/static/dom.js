// Builds elements, and changes the page to a newly built tree. Data is only ever text: there is no innerHTML here.

/** Build an element. `props`: attributes, as in {class: "wide", "aria-live": "polite"}; false and null leave one out. */
export function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/**
 * Change `old` into `next`, and keep all that is equal: focus, selection, scroll and open details survive.
 *
 * Siblings with a `data-key` are matched by it.
 */
function morph(old, next) {
  if (places.has(next)) {
    const { version, build } = places.get(next);
    if (versions.get(old) === version) return;
    versions.set(old, version);
    next = build();
  }
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName || keyOf(old) !== keyOf(next)) {
    old.replaceWith(settled(next));
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  morphAttributes(old, next);
  morphChildren(old, next);
}

const places = new WeakMap(); // placeholder → {version, build}
const versions = new WeakMap(); // element → version of which it was built

/** A place in a new tree for an element that lives on, and that another module fills, such as a chart. */
export function place(element) {
  return lazy(element.nodeName, keyOf(element), element, () => element);
}

/** A place in a new tree for an element that is only built if there is none of this key and version. */
export function lazy(tag, key, version, build) {
  const placeholder = el(tag, { "data-key": key, "data-place": true });
  places.set(placeholder, { version, build });
  return placeholder;
}

/** Return `node` with the elements of its places. */
function settled(node) {
  if (places.has(node)) return built(places.get(node));
  if (node.nodeType === Node.ELEMENT_NODE) {
    for (const one of node.querySelectorAll("[data-place]")) one.replaceWith(built(places.get(one)));
  }
  return node;
}

function built({ version, build }) {
  const element = build();
  versions.set(element, version);
  return element;
}

/** Replace the children of `parent` by `next`, and keep all that is equal. */
export function show(parent, ...next) {
  morphChildren(parent, el("div", null, ...next));
}

function morphChildren(old, next) {
  const wanted = new Set([...next.children].map(keyOf));
  for (const child of [...old.children]) if (keyOf(child) && !wanted.has(keyOf(child))) child.remove();
  const keyed = new Map([...old.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let at = old.firstChild;
  for (const child of [...next.childNodes]) {
    const known = keyOf(child) && keyed.get(keyOf(child));
    if (known && known !== at) old.insertBefore(known, at);
    const target = known || (at && !keyOf(at) && !keyOf(child) ? at : null);
    if (target) {
      at = target.nextSibling;
      morph(target, child);
    } else {
      old.insertBefore(settled(child), at);
    }
  }
  while (at) {
    const after = at.nextSibling;
    at.remove();
    at = after;
  }
}

function morphAttributes(old, next) {
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !(old.nodeName === "DETAILS" && name === "open")) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // the page's policy refuses it as an attribute
    else old.setAttribute(name, value);
  }
}

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
}
