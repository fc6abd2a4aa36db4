"use strict";
// Elements by name, numbers as text, knobs in sentences, canvases.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

/** An element of HTML, or of SVG when the parent is one, appended to `parent`. */
function add(parent, tag, attributes = {}, text = null) {
  const space = tag === "svg" || parent.namespaceURI.endsWith("svg")
    ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  set(element, attributes);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}
function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

/** A number with `digits` decimals, a true minus sign, ∞, NaN. */
function number(x, digits) {
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const text = Math.abs(x).toFixed(digits);
  return x < 0 && Number(text) !== 0 ? `−${text}` : text;
}
const whole = (x) => x.toLocaleString("en-US");
const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
const percent = (share) => `${number(100 * share, 1)}\u00a0%`;
const sum = (numbers) => numbers.reduce((x, y) => x + y, 0);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const largest = (numbers) => Math.max(...numbers.map(Math.abs));

function time(s) {
  const [unit, by] = s < 1e-3 ? ["µs", 1e6] : s < 1 ? ["ms", 1e3] : ["s", 1];
  return `${Number((s * by).toPrecision(3)).toLocaleString("en-US")} ${unit}`;
}

// ---- the page's settings: what knobs turn, and who draws what they change ----

const now = {}, drawers = [];

/** `draw` is called when a setting in `names` has changed: at most once a frame, and while the
 * section is not in sight, later. Without a section, `draw` prepares what others draw. */
function uses(section, names, draw) {
  drawers.push({ section: section && byId(section), names, draw, late: false });
  draw();
}
function drawLate() {
  for (const drawer of drawers.filter(({ late }) => late)) {
    const { top = 0, bottom = 0 } = drawer.section?.getBoundingClientRect() ?? {};
    if (bottom < -200 || top > innerHeight + 200) continue;
    drawer.late = false;
    drawer.draw();
  }
}

const changed = new Set();
let waiting = 0;
function change(name, value) {
  now[name] = value;
  changed.add(name);
  waiting ||= requestAnimationFrame(redraw);
}
function redraw() {
  cancelAnimationFrame(waiting);
  waiting = 0;
  const names = [...changed];
  changed.clear();
  names.forEach(showKnob);
  for (const drawer of drawers) drawer.late ||= names.some((name) => drawer.names.includes(name));
  drawLate();
  keepAddress();
}

const KNOBS = {}, FIRST = {};
/** A setting that is one of `values`; `text` writes it, `label` tells a screen reader what it is. */
function knob(name, values, first, label, text = String) {
  KNOBS[name] = { values, label, text };
  FIRST[name] = now[name] = first;
}
/** Which of its values a setting is, or comes nearest to. */
function placeOf(name) {
  const { values } = KNOBS[name], place = values.indexOf(now[name]);
  const gap = (value) => Math.abs(value - now[name]);
  return place < 0 ? values.reduce((x, value, i) => (gap(value) < gap(values[x]) ? i : x), 0) : place;
}
function showKnob(name) {
  if (!KNOBS[name]) return;
  const { values, text, label } = KNOBS[name], place = placeOf(name);
  for (const element of document.querySelectorAll(`[data-knob="${name}"]`)) {
    element.textContent = text(now[name]);
    set(element, { role: "slider", tabindex: 0, "aria-label": label, "aria-valuemin": 0,
      "aria-valuemax": values.length - 1, "aria-valuenow": place, "aria-valuetext": text(now[name]) });
  }
}
function turn(name, place) {
  const { values } = KNOBS[name], value = values[Math.max(0, Math.min(values.length - 1, place))];
  if (value !== now[name]) change(name, value);
}

const WAYS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 4, PageDown: -4,
  Home: -Infinity, End: Infinity };
const pressed = (event) => (event.ctrlKey || event.altKey || event.metaKey ? undefined : WAYS[event.key]);

/** Dragging, by mouse or finger: `begin` returns what `move` is told beside where the pointer is. */
function draggable(element, begin, move, end = () => {}) {
  let from = null;
  element.addEventListener("pointerdown", (event) => {
    from = begin(event);
    if (from === null) return;
    element.setPointerCapture(event.pointerId);
    element.classList.add("held");
    element.focus({ preventScroll: true });
    event.preventDefault();
  });
  element.addEventListener("pointermove", (event) => from !== null && move(event, from));
  for (const kind of ["pointerup", "pointercancel"]) {
    element.addEventListener(kind, (event) => {
      element.classList.remove("held");
      if (from !== null) end(event, from);
      from = null;
    });
  }
  element.addEventListener("touchstart", (event) => event.cancelable && event.preventDefault(), { passive: false });
}

function makeKnobs() {
  for (const element of document.querySelectorAll("[data-knob]")) {
    const name = element.dataset.knob, place = () => placeOf(name);
    const pixels = Math.max(8, Math.min(24, 260 / KNOBS[name].values.length));
    draggable(element, (event) => [event.clientX, place()],
      (event, [x, first]) => turn(name, first + Math.round((event.clientX - x) / pixels)));
    element.addEventListener("keydown", (event) => {
      const step = pressed(event);
      if (!step) return;
      event.preventDefault();
      turn(name, place() + step);
    });
  }
  Object.keys(KNOBS).forEach(showKnob);
}

/** The settings of the address, #section?a=1&b=2, and a way to write them there. */
function readAddress() {
  const wanted = new URLSearchParams(location.hash.split("?")[1] ?? "");
  for (const [name, { values, free }] of Object.entries(KNOBS)) {
    const text = wanted.get(name), found = free && text ? Number(text) : values.find((value) => String(value) === text);
    if (found !== undefined && !Number.isNaN(found)) now[name] = found;
  }
  return wanted;
}
const kept = {}; // further ones: what writes each, or an empty text
function keepAddress() {
  const turned = Object.keys(KNOBS).filter((name) => now[name] !== FIRST[name]).map((name) => [name, now[name]]);
  const more = Object.entries(kept).map(([name, write]) => [name, write()]).filter(([, text]) => text);
  const settings = new URLSearchParams([...turned, ...more]).toString();
  const place = location.hash.split("?")[0];
  const here = place || location.pathname + location.search; // "#wire" would scroll a page that loads
  try {
    history.replaceState(null, "", settings ? `${place || "#wire"}?${settings}` : here);
  } catch { /* in a frame without an address of its own */ }
}

// ---- colours and canvases ----

let inks = {};
const ink = (name) => inks[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const colour = (r) => `oklch(0.66 0.15 ${(20 + (r * 360) / Math.max(8, now.devices)) % 360})`;

/** The canvas, cleared, as wide as its place: [context, width]. */
function sheet(canvas, height) {
  const width = Math.max(280, canvas.parentNode.clientWidth), scale = Math.max(1, devicePixelRatio);
  const size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return [context, width];
}

/** Everything anew: in other colours, or in another width. */
function drawAll() {
  inks = {};
  for (const drawer of drawers) Object.assign(drawer, { late: false }).draw();
}
function redrawWhen() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("scroll", () => requestAnimationFrame(drawLate), { passive: true });
  let width = innerWidth;
  addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), drawAll()));
  for (const [kind, paper] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(kind, () => {
      document.documentElement.classList.toggle("paper", paper);
      drawAll();
    });
  }
}
