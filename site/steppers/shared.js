"use strict";
// What the steppers use: elements by name, SVG, numbers as text, and the keys that step.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

/** An element of HTML, or of SVG when the parent is one, appended to `parent`. */
function add(parent, tag, attributes = {}, text = null) {
  const space = tag === "svg" || parent.namespaceURI.endsWith("svg")
    ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

/** A number with `digits` decimals, a true minus sign, and ∞. */
function number(x, digits) {
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const text = Math.abs(x).toFixed(digits);
  return x < 0 && Number(text) !== 0 ? `−${text}` : text;
}

/** A row of column heads; a corner without a name is no head. */
function addHeads(table, names) {
  const row = add(add(table, "thead"), "tr");
  return names.map((name) => name ? add(row, "th", { scope: "col" }, name) : add(row, "td"));
}

const whole = (x) => x.toLocaleString("en-US");
const plural = (n, noun) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;

/** `text`, cut to about `width` pixels of 11-pixel type. */
function cut(text, width) {
  const most = Math.max(1, Math.floor(width / 6));
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

/** Arrow keys and the like, wherever the focus is, but for fields that need them. */
function onKeys(actions) {
  document.addEventListener("keydown", (event) => {
    const name = (event.shiftKey ? "Shift+" : "") + event.key;
    if (event.ctrlKey || event.altKey || event.metaKey || !actions[name]) return;
    if (event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    actions[name]();
  });
}

/** The settings of the address (#a=1&b=2), and a way to write them there. */
const fromAddress = () => new URLSearchParams(location.hash.slice(1));
function toAddress(settings) {
  try {
    history.replaceState(null, "", `#${new URLSearchParams(settings)}`);
  } catch { /* an embedded page may not have an address of its own */ }
}

// In a frame the page around it is told how high this one is, and may ask for less of it.
if (parent !== window) {
  const tell = () => parent.postMessage({ height: document.body.offsetHeight }, "*");
  new ResizeObserver(tell).observe(document.body);
  document.body.classList.toggle("short", location.search === "?short");
}

// What the button "play" has running, or null.
let timer = null;

function start(next, milliseconds) {
  byId("play").textContent = "Pause";
  timer = setInterval(next, milliseconds);
}

function stop() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "▶ Play";
}
