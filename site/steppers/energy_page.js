// ---- pictures: made once, then moved ----

let now, own = [], step = 0, chosen = null; // now: a source, a cross, what else is known
const SOURCES = { name: "sources", low: [-2, -2], high: [2, 2], unit: 110 };
const PLANE = { name: "plane", low: [-1.1, -0.9], high: [5, 4.9], unit: 72 };
const MERGES = { ...PLANE, name: "merges" };

const onPane = ({ low, high, unit }, [x, y]) => [(x - low[0]) * unit, (high[1] - y) * unit];
const fromPane = ({ low, high, unit }, [x, y]) => [low[0] + x / unit, high[1] - y / unit];
const line = (pane, points) =>
  `M${points.map((point) => onPane(pane, point).map((x) => x.toFixed(1))).join("L")}`;
const pair = (x, digits = 2) => `(${number(x[0], digits)}, ${number(x[1], digits)})`;
const percent = (share) => `${number(100 * share, 1)} %`;

function makePane(pane, label) {
  const [width, height] = [0, 1].map((A) => (pane.high[A] - pane.low[A]) * pane.unit);
  const about = { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label };
  pane.svg = add(byId(pane.name), "svg", about);
  return pane.svg;
}

/** Lines of equal ζ₁ and of equal ζ₂, as rows of sources. */
const GRID = [0, 1].flatMap((A) => Array.from({ length: 13 }, (_, i) => (i - 6) / 2).map((c) => {
  const far = Array.from({ length: 161 }, (_, i) => 8 * ((i - 80) / 80) ** 3);
  const sources = far.map((t) => (A ? [t, c] : [c, t]));
  const kind = `${A ? "level" : "upright"} ${c ? "" : "zero"}`;
  return { sources, crosses: sources.map((zeta) => energyAt(zeta).z), kind };
}));

function drawGrid(pane) {
  const paths = GRID.map(({ kind }) => add(pane.svg, "path", { class: `grid ${kind}` }));
  /** Straight where sources live (0), bent by ∇F among the values (1), or on the way. */
  pane.bend = (part, middle) => GRID.forEach(({ sources, crosses }, i) => {
    const points = sources.map((zeta, k) => {
      const straight = plus(middle, zeta);
      return plus(straight, plus(crosses[k], straight, -1), part);
    });
    paths[i].setAttribute("d", line(pane, points));
  });
}

function drawHull(pane) {
  add(pane.svg, "path", { class: "hull", d: `${line(pane, hull.map((a) => values[a]))}Z` });
}

function drawWords(pane) {
  values.forEach((v, a) => { // away from the middle of the hull
    const from = plus(v, [2, 2], -1), [x, y] = onPane(pane, plus(v, from, 0.68 / size(from)));
    add(pane.svg, "text", { x, y: y + 5, "text-anchor": "middle" }, words[a]);
  });
}

function makeHandle(pane, label) {
  const about = { class: "handle", tabindex: 0, role: "slider", "aria-label": label,
    "aria-roledescription": "point in a plane" };
  const handle = add(pane.svg, "g", about);
  add(handle, "circle", { r: 24, class: "reach" });
  return handle;
}

const CROSS = "M-9 -9L9 9M-9 9L9 -9";

function makePictures() {
  const svg = makePane(SOURCES, "the plane of sources");
  drawGrid(SOURCES);
  SOURCES.bend(0, [0, 0]);
  add(svg, "text", { x: 415, y: 212, class: "halo" }, "ζ₁");
  add(svg, "text", { x: 230, y: 24, class: "halo" }, "ζ₂");
  add(svg, "path", { id: "far", class: "far" });
  add(svg, "path", { id: "arrow", class: "push" });
  add(add(svg, "g", { id: "beyond" }), "text", { class: "halo infinite", "text-anchor": "middle" }, "∞");
  SOURCES.handle = makeHandle(SOURCES, "the source ζ");
  add(SOURCES.handle, "circle", { r: 8, class: "dot" });
  makePane(PLANE, "the plane of values");
  drawHull(PLANE);
  drawGrid(PLANE);
  values.forEach((v, a) => {
    const [cx, cy] = onPane(PLANE, v);
    add(PLANE.svg, "circle", { cx, cy, class: "ring", r: radius(energyAt([0, 0]).weights[a]) });
    add(PLANE.svg, "circle", { cx, cy, class: "mass", id: `mass-${a}` });
  });
  drawWords(PLANE);
  const [x, y] = onPane(PLANE, energyAt([0, 0]).z);
  add(PLANE.svg, "circle", { cx: x, cy: y, r: 4, class: "ring" });
  PLANE.handle = makeHandle(PLANE, "the cross");
  add(PLANE.handle, "path", { d: CROSS, class: "halo" });
  add(PLANE.handle, "path", { d: CROSS, class: "cross" });
  makePane(MERGES, "the merges in the plane of values");
  drawHull(MERGES);
  add(MERGES.svg, "g", { id: "tree" });
  drawWords(MERGES);
}

const radius = (share) => 34 * Math.sqrt(share);
const move = (element, pane, point) => {
  element.setAttribute("transform", `translate(${onPane(pane, point).map((x) => x.toFixed(2))})`);
};

/** How far one can go from a point of the source plane before its frame ends. */
function toFrame(from, out) {
  const room = out.map((x, A) => (x ? ((x > 0 ? 1.86 : -1.86) - from[A]) / x : Infinity));
  return plus(from, out, Math.max(0, Math.min(...room)));
}

function drawPush() {
  const { zeta, z, weights, kind, from, out } = now, missing = !zeta;
  const outside = missing || Math.max(...zeta.map(Math.abs)) > 1.9;
  const direction = missing ? out : zeta.map((x) => x / (size(zeta) || 1));
  const tip = outside ? toFrame(missing ? from : [0, 0], direction) : zeta;
  byId("arrow").setAttribute("d", missing ? "" : line(SOURCES, [[0, 0], tip]));
  byId("far").setAttribute("d", missing ? line(SOURCES, [from, tip]) : "");
  byId("beyond").setAttribute("visibility", missing ? "visible" : "hidden");
  move(byId("beyond"), SOURCES, plus(tip, [direction[1], -direction[0]], 0.2));
  move(SOURCES.handle, SOURCES, tip);
  SOURCES.handle.classList.toggle("beyond", outside);
  move(PLANE.handle, PLANE, z);
  PLANE.handle.classList.toggle("beyond", kind === "outside");
  values.forEach((_, a) => byId(`mass-${a}`).setAttribute("r", radius(weights?.[a] ?? 0)));
  const said = missing ? "no finite source" : `ζ = ${pair(zeta)}`;
  for (const [{ handle }, text, x] of [[SOURCES, said, tip[0]], [PLANE, `z = ${pair(z)}`, z[0]]]) {
    handle.setAttribute("aria-valuenow", x.toFixed(2));
    handle.setAttribute("aria-valuetext", text);
  }
}

// ---- the same in words and numbers ----

/** [title, text] of what is seen above. */
function sayPush() {
  const { kind, z, height, a, b, corner, out, gap } = now;
  if (kind === "outside") {
    return [`Outside the hull: no source gets the cross to ${pair(z)}`,
      `A mean never leaves the hull of its values. Along ${pair(out)}, away from the hull, ζ·z − F(ζ) ` +
      `gains ${number(gap, 3)} a step in the end, for ever: F* = ∞.`];
  }
  if (kind === "inside") return sayInside();
  const dual = `The height F* = ${number(height, 4)}`;
  const limit = `is a limit: sources further and further along ${pair(out)} come ever closer to it.`;
  if (kind === "corner") {
    return [`At the corner of “${words[corner]}”: no finite source gets there`,
      `All weight is on “${words[corner]}”. ${dual}, minus its score, ${limit}`];
  }
  if (kind === "edge") {
    return [`On the edge: no finite source puts the cross at ${pair(z)}`,
      `Only “${words[a]}” and “${words[b]}” may have weight. ${dual} ${limit}`];
  }
}

function sayInside() {
  const { zeta, z, weights, height, held } = now;
  const top = weights.indexOf(Math.max(...weights));
  const most = `Most of the weight, ${percent(weights[top])}, is on “${words[top]}”.`;
  if (size(zeta) < 1e-9) {
    return [`Nobody pushes: the cross rests at ${pair(z)}, and that is attention`,
      `${most} Here the height F* is least, −log 16.`];
  }
  return [held ? `The cross at ${pair(z)} needs the source ${pair(zeta)}`
    : `The source ${pair(zeta)} puts the cross at ${pair(z)}`,
    `${most} The height F* is ${number(height + energyAt([0, 0]).energy, 4)} above its floor: so far, as a ` +
    "divergence, are these weights from those that nobody pushed."];
}

function tabulatePush() {
  const { zeta, z, weights, height } = now, energy = zeta && energyAt(zeta).energy;
  const both = zeta && `${number(energy + height, 4)}, ${number(dot(zeta, z), 4)}`;
  const table = byId("numbers");
  table.replaceChildren();
  for (const [name, value] of [
    ["source ζ", zeta ? pair(zeta, 4) : "none"], ["cross z", pair(z, 4)],
    ["energy F(ζ)", zeta ? number(energy, 4) : "none"], ["height F*(z)", number(height, 4)],
    ["F(ζ) + F*(z), which is ζ·z", both ?? "none"],
  ]) {
    const row = add(table, "tr");
    add(row, "th", { scope: "row" }, name);
    const cell = add(row, "td", {}, value);
    if (name !== "height F*(z)") continue;
    const floor = -energyAt([0, 0]).energy, top = Math.max(...scores.map((s) => -s)); // of any corner
    const part = Math.min(1, (height - floor) / (top - floor));
    add(add(cell, "div", { class: "bar" }), "i", { style: `width: ${(100 * part).toFixed(2)}%` });
  }
  const body = byId("weights").querySelector("tbody"), alone = energyAt([0, 0]).weights;
  body.replaceChildren();
  words.forEach((word, a) => {
    const row = add(body, "tr"), share = weights ? weights[a] : 0;
    add(row, "th", { scope: "row" }, word);
    add(row, "td", {}, zeta ? number(dot(zeta, values[a]), 3) : "");
    const bar = add(add(row, "td"), "div", { class: "bar" });
    add(bar, "i", { style: `width: ${(100 * share).toFixed(2)}%` });
    add(bar, "b", { style: `left: ${100 * alone[a]}%` });
    add(row, "td", {}, weights ? percent(share) : "none");
  });
}

// ---- merges, drawn and told ----

const orderOf = () => ORDERS[byId("order").value] ?? own;
const named = ({ keys }) => `{${keys.map((a) => words[a]).join(", ")}}`;

function drawMerges(pairs, nodes) {
  const holder = byId("tree"), used = new Set(pairs.flat());
  const whole = energyAt(now.zeta ?? [0, 0]), focused = document.activeElement?.dataset?.node;
  holder.replaceChildren();
  pairs.forEach(([a, b], i) => {
    const fresh = i + 1 === pairs.length ? "fresh" : "";
    const d = line(MERGES, [nodes[a].out, nodes[b].out]);
    add(holder, "path", { class: `segment ${fresh}`, d });
  });
  const order = nodes.map((_, i) => i); // what is left lies above what is merged, the small above the large
  order.sort((a, b) => used.has(b) - used.has(a) || nodes[b].lse - nodes[a].lse);
  for (const i of order) {
    const node = nodes[i], live = !used.has(i) && step < words.length - 1;
    const kinds = { used: used.has(i), chosen: chosen === i, made: i >= words.length };
    const state = ["node", ...Object.keys(kinds).filter((kind) => kinds[kind])].join(" ");
    const share = Math.exp(node.lse - whole.energy);
    const label = `${named(node)}, mass ${number(Math.exp(node.lse), 2)}`;
    const role = live ? { tabindex: 0, role: "button", "aria-pressed": chosen === i } : { role: "img" };
    const group = add(holder, "g", { "data-node": i, class: state, "aria-label": label, ...role });
    move(group, MERGES, node.out);
    add(group, "circle", { r: Math.max(3, radius(share)), class: "mass" });
    if (live) add(group, "circle", { r: 22, class: "reach" });
    const type = { y: 4, class: "halo", "text-anchor": "middle" };
    if (kinds.made) add(group, "text", type, i - words.length + 1);
    add(group, "title", {}, label);
  }
  const cross = add(holder, "g", { class: "aim" });
  add(cross, "path", { d: CROSS, class: "cross" });
  move(cross, MERGES, whole.z);
  if (focused) holder.querySelector(`[data-node="${focused}"][tabindex]`)?.focus();
}

function sayMerges(pairs, nodes) {
  const { energy, z } = energyAt(now.zeta ?? [0, 0]), last = nodes.at(-1);
  let title = "Five masses, and no merge yet";
  let text = "A merge puts two masses on the segment between them, where it balances. " +
    "Where will the last one end?";
  if (pairs.length) {
    const [a, b] = last.parts;
    title = `Merge ${step} of ${words.length - 1}: ${named(a)} ⊕ ${named(b)}`;
    text = `Masses of ${number(Math.exp(a.lse), 2)} and ${number(Math.exp(b.lse), 2)}: they balance ` +
      `${percent(last.gate)} of the way to ${named(b)}, at ${pair(last.out)}. Their mass is ` +
      `${number(Math.exp(last.lse), 2)}, its logarithm, lse, ${number(last.lse, 4)}.`;
  }
  if (step === words.length - 1) {
    const gap = Math.max(Math.abs(last.lse - energy), size(plus(last.out, z, -1)));
    text += ` All five are merged: lse is F(ζ), and the point is the cross, to 1e−12: ${gap < 1e-12}.`;
  }
  if (!orderOf().length) text = "Choose two points, by mouse or with Tab and Enter, and they merge.";
  if (chosen !== null) text = `${named(nodes[chosen])} is chosen. Choose the point to merge it with.`;
  byId("pushed").textContent = now.zeta
    ? `The masses are those that the source ${pair(now.zeta)} makes of them.`
    : "No finite source holds the cross above; here, nobody pushes.";
  byId("merge-title").textContent = title;
  byId("merge-text").textContent = text;
  const body = byId("states").querySelector("tbody");
  body.replaceChildren();
  nodes.forEach((node, i) => {
    const row = add(body, "tr"), name = i < words.length ? "" : `${i - words.length + 1}: `;
    add(row, "th", { scope: "row" }, name + named(node));
    const cells = [number(Math.exp(node.lse), 4), number(node.lse, 4), pair(node.out, 4)];
    for (const cell of cells) add(row, "td", {}, cell);
  });
}

function show() {
  const pairs = orderOf().slice(0, step), nodes = nodesAfter(pairs, now.zeta ?? [0, 0]);
  drawPush();
  [byId("push-title").textContent, byId("push-text").textContent] = sayPush();
  tabulatePush();
  drawMerges(pairs, nodes);
  sayMerges(pairs, nodes);
  byId("start").disabled = byId("back").disabled = step === 0;
  byId("next").disabled = step === orderOf().length;
  const where = now.zeta && !now.held ? { zeta: now.zeta } : { z: now.z };
  const made = byId("order").value === "own" ? { own: own.map((x) => x.join("-")).join(".") } : {};
  toAddress({ ...where, order: byId("order").value, ...made, step });
}

// ---- what the reader does ----

function push(zeta) {
  const { z, weights, energy } = energyAt(zeta);
  now = { kind: "inside", zeta, z, weights, height: dot(zeta, z) - energy, held: false };
  show();
}

function hold(z) {
  now = { ...dualAt(z), held: true };
  show();
}

/** Dragging and clicking in a pane (`drop`), and arrow keys at its handle (`put`). */
function follow(pane, { put, drop, current, reach }) {
  const { low, high, unit } = pane;
  const at = (event) => {
    const box = pane.svg.getBoundingClientRect(), scale = ((high[0] - low[0]) * unit) / box.width;
    const pixels = [event.clientX - box.x, event.clientY - box.y];
    const point = fromPane(pane, pixels.map((x) => x * scale));
    return point.map((x, A) => Math.max(low[A], Math.min(high[A], x)));
  };
  pane.svg.addEventListener("click", (event) => drop(at(event)));
  pane.handle.addEventListener("pointerdown", (event) => {
    pane.handle.setPointerCapture(event.pointerId);
    pane.handle.focus({ preventScroll: true });
    event.preventDefault();
  });
  const noScrolling = (event) => event.preventDefault(); // a finger on the handle drags it
  pane.handle.addEventListener("touchstart", noScrolling, { passive: false });
  pane.handle.addEventListener("pointermove", (event) => {
    if (pane.handle.hasPointerCapture(event.pointerId)) drop(at(event));
  });
  const ways = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  pane.handle.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const way = ways[event.key];
    if (event.key !== "Home" && !way) return;
    event.preventDefault();
    event.stopPropagation(); // the page's own arrow keys step through merges
    if (!way) return push([0, 0]);
    const moved = plus(current(), way, event.shiftKey ? 0.5 : 0.1);
    put(moved.map((x, A) => Math.max(reach[0][A], Math.min(reach[1][A], Math.round(10 * x) / 10))));
  });
}

/** A cross that is dragged to the hull, nearly, is meant to be on it. */
function snap(z) {
  const { near, gap } = placeOf(z);
  const corner = values.find((v) => size(plus(v, near, -1)) < 0.09);
  return gap < 0.06 ? corner ?? near : z;
}

function goTo(wanted) {
  chosen = null;
  step = Math.max(0, Math.min(orderOf().length, wanted));
  if (step === orderOf().length) stop();
  show();
}

function play() {
  if (timer) return stop();
  if (step === orderOf().length) goTo(0);
  if (!orderOf().length) return;
  start(() => goTo(step + 1), 1500);
}

/** Two points one after the other are a merge, and from then on the order is the reader's. */
function choose(node) {
  stop();
  if (chosen === null || chosen === node) {
    chosen = chosen === null ? node : null;
    return show();
  }
  own = [...orderOf().slice(0, step), [chosen, node]];
  byId("order").value = "own";
  goTo(step + 1);
  const made = byId("tree").querySelector(`[data-node="${words.length + step - 1}"][tabindex]`);
  (made ?? byId("back")).focus();
}

/** The pairs of an address, a-b.c-d, up to the first that cannot merge. */
function readOrder(text) {
  const pairs = [];
  const free = (i) => Number.isInteger(i) && i >= 0 && i < words.length + pairs.length
    && !pairs.flat().includes(i);
  for (const [a, b] of text.split(".").map((two) => two.split("-").map(Number))) {
    if (a === b || !free(a) || !free(b)) break;
    pairs.push([a, b]);
  }
  return pairs;
}

function begin() {
  makePictures();
  const anywhere = [[-9, -9], [9, 9]];
  follow(SOURCES, { put: push, drop: push, current: () => now.zeta ?? now.from, reach: anywhere });
  const plane = { put: hold, drop: (z) => hold(snap(z)), current: () => now.z };
  follow(PLANE, { ...plane, reach: [PLANE.low, PLANE.high] });
  for (const button of document.querySelectorAll("[data-push], [data-hold]")) {
    const [act, text] = button.dataset.push ? [push, button.dataset.push] : [hold, button.dataset.hold];
    button.addEventListener("click", () => act(JSON.parse(text)));
  }
  const ofTree = (event) => event.target.closest("[data-node][tabindex]");
  byId("tree").addEventListener("click", (event) => {
    if (ofTree(event)) choose(Number(ofTree(event).dataset.node));
  });
  byId("tree").addEventListener("keydown", (event) => {
    if (!["Enter", " "].includes(event.key) || !ofTree(event)) return;
    event.preventDefault();
    choose(Number(ofTree(event).dataset.node));
  });
  const bend = () => PLANE.bend(byId("bend").value / 100, energyAt([0, 0]).z);
  byId("bend").addEventListener("input", bend);
  bend();
  byId("order").addEventListener("input", () => goTo(0));
  const actions = { start: () => goTo(0), back: () => goTo(step - 1), next: () => goTo(step + 1), play };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  onKeys({ ArrowRight: actions.next, ArrowLeft: actions.back, Home: actions.start, End: () => goTo(Infinity) });
  const wanted = fromAddress(), point = (name) => {
    const x = (wanted.get(name) ?? "").split(",").map(Number);
    return x.length === 2 && x.every(Number.isFinite) ? x : null;
  };
  if (wanted.has("order")) byId("order").value = wanted.get("order");
  own = readOrder(wanted.get("own") ?? "");
  step = Math.min(orderOf().length, Number(wanted.get("step")) || 0);
  if (point("z")) hold(point("z"));
  else push(point("zeta") ?? [0, 0]);
}

begin();
