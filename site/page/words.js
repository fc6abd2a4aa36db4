// ---- two planes: drag the push, or drag the cross ----

const SOURCES = { low: [-2, -2], high: [2, 2], unit: 110 };
const PLANE = { low: [-1.3, -0.9], high: [5, 4.9], unit: 72 };
const CROSS = "M-9 -9L9 9M-9 9L9 -9";
const onPane = ({ low, high, unit }, [x, y]) => [(x - low[0]) * unit, (high[1] - y) * unit];
const fromPane = ({ low, high, unit }, [x, y]) => [low[0] + x / unit, high[1] - y / unit];
const line = (points) => `M${points.map((point) => point.map((x) => x.toFixed(1))).join("L")}`;
const pair = (x) => `(${number(x[0], 2)}, ${number(x[1], 2)})`;
const move = (element, place) => element.setAttribute("transform", `translate(${place.map((x) => x.toFixed(2))})`);

// The push, and where the reader holds the cross; null: where the push puts it.
for (const [name, way] of [["right", "to the right"], ["up", "upwards"]]) {
  knob(name, range(81).map((i) => (i - 40) / 20), 0, `the push, ${way}`, (x) => number(x, 2));
  KNOBS[name].free = true; // what is dragged lies between its values, too
}
let cross = null;

/** Lines of equal first and of equal second numbers, where the pushes are and where they put the cross. */
function drawGrid() {
  for (const A of [0, 1]) {
    for (const fixed of range(13).map((i) => (i - 6) / 2)) {
      const pushes = range(121).map((i) => 8 * ((i - 60) / 60) ** 3).map((t) => (A ? [t, fixed] : [fixed, t]));
      const kind = { class: `grid ${A ? "level" : "upright"}` };
      add(SOURCES.svg, "path", { ...kind, d: line(pushes.map((zeta) => onPane(SOURCES, zeta))) });
      add(PLANE.svg, "path", { ...kind, d: line(pushes.map((zeta) => onPane(PLANE, energyAt(zeta).z))) });
    }
  }
}

function makePane(pane, id, label, name) {
  const [width, height] = [0, 1].map((A) => (pane.high[A] - pane.low[A]) * pane.unit);
  pane.svg = add(byId(id), "svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  if (pane === PLANE) add(pane.svg, "path", { class: "hull", d: `${line(hull.map((a) => onPane(pane, values[a])))}Z` });
  pane.name = name;
}
function makeHandle(pane) {
  pane.handle = add(pane.svg, "g", { class: "handle", tabindex: 0, role: "slider", "aria-label": pane.name,
    "aria-roledescription": "point in a plane" });
  add(pane.handle, "circle", { r: 24, class: "reach" });
}

function makePlanes() {
  makePane(SOURCES, "sources", "the plane of pushes", "the push");
  makePane(PLANE, "plane", "the plane of values", "the cross");
  drawGrid();
  PLANE.masses = words.map((word, a) => {
    const [cx, cy] = onPane(PLANE, values[a]), away = plus(values[a], [2, 2], -1);
    const [x, y] = onPane(PLANE, plus(values[a], away, 0.72 / size(away)));
    add(PLANE.svg, "text", { x, y: y + 5, "text-anchor": "middle", "font-size": 21, class: "halo" }, word);
    return add(PLANE.svg, "circle", { cx, cy, class: "mass five" });
  });
  SOURCES.arrow = add(SOURCES.svg, "path", { class: "push" });
  add(SOURCES.svg, "text", { x: 10, y: 26, "font-size": 20, class: "halo" }, "pushes: drag the dot");
  add(PLANE.svg, "text", { x: 10, y: 26, "font-size": 20, class: "halo" }, "words: drag the cross");
  [SOURCES, PLANE].forEach(makeHandle);
  add(SOURCES.handle, "circle", { r: 8, class: "dot" });
  PLANE.cross = add(PLANE.handle, "path", { d: CROSS, class: "cross" });
}

function showPush() {
  const push = [now.right, now.up], { z, weights, energy } = energyAt(push), lost = cross !== null && size(plus(cross, z, -1)) > 1e-6;
  const top = weights.indexOf(Math.max(...weights)), tip = push.map((x) => Math.max(-1.9, Math.min(1.9, x)));
  PLANE.masses.forEach((mass, a) => mass.setAttribute("r", 34 * Math.sqrt(weights[a])));
  PLANE.cross.classList.toggle("lost", lost);
  SOURCES.arrow.setAttribute("d", line([[0, 0], tip].map((x) => onPane(SOURCES, x))));
  move(SOURCES.handle, onPane(SOURCES, tip));
  move(PLANE.handle, onPane(PLANE, lost ? cross : z));
  set(SOURCES.handle, { "aria-valuenow": number(push[0], 2), "aria-valuetext": pair(push) });
  set(PLANE.handle, { "aria-valuenow": number(z[0], 2), "aria-valuetext": pair(lost ? cross : z) });
  say("push", lost ? `No push puts the cross at ${pair(cross)}: a balance point stays inside the hull.`
    : `${size(push) < 1e-9 ? "Without a push, this is attention: the" : "The"} cross is at ${pair(z)}. ` +
      `“${words[top]}” has ${percent(weights[top])} of the weight. F = ${number(energy, 3)}.`);
  PLANE.z = lost ? cross : z;
}
function pushTo(zeta) {
  cross = null;
  change("right", zeta[0]);
  change("up", zeta[1]);
}
function holdAt(z) {
  pushTo(depthOf(z) > 0.04 ? bestSource(z) : [now.right, now.up]);
  cross = z;
}

/** Dragging in a pane, and arrow keys at its handle. */
function follow(pane, put, current) {
  const at = (event) => {
    const box = pane.svg.getBoundingClientRect(), scale = ((pane.high[0] - pane.low[0]) * pane.unit) / box.width;
    const point = fromPane(pane, [(event.clientX - box.x) * scale, (event.clientY - box.y) * scale]);
    put(point.map((x, A) => Math.max(pane.low[A], Math.min(pane.high[A], x))));
  };
  draggable(pane.handle, () => true, at);
  const ways = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  pane.handle.addEventListener("keydown", (event) => {
    if (!pressed(event)) return;
    event.preventDefault();
    if (event.key === "Home") pushTo([0, 0]);
    else if (ways[event.key]) put(plus(current(), ways[event.key], event.shiftKey ? 0.5 : 0.1));
  });
}

function beginWords() {
  makePlanes();
  follow(SOURCES, pushTo, () => [now.right, now.up]);
  follow(PLANE, holdAt, () => PLANE.z);
  uses("words", ["right", "up"], showPush);
}
