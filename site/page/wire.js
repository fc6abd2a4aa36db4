// ---- one query, a row of devices: states hop above, shards crawl below, on one clock ----

const powers = (from, to) => range(to - from + 1).map((i) => 2 ** (from + i));
const queriesText = (n) => (n === 1 ? "one query" : `${whole(n)} queries`);
knob("queries", powers(0, 20), 1, "queries that ask at once", queriesText);
knob("context", powers(4, 20), 65536, "tokens in the cache", (n) => `${whole(n)} tokens`);
knob("devices", range(15).map((i) => i + 2), 8, "devices", (n) => `${n} devices`);
knob("pernode", [1, 2, 4, 8, 16], 4, "devices of a machine", (n) => (n < now.devices ? `${n} to a machine` : "all in one machine"));
knob("between", [1, 2, 5, 10, 12.5, 25, 50, 100, 200, 450], 50, "bandwidth between machines", (n) => `${n} GB/s`);
KNOBS.size = { values: Object.keys(SIZES), text: String };
KNOBS.costs = { values: [false, true], text: String };
FIRST.size = now.size = KNOBS.size.values[0];
FIRST.costs = now.costs = false;

const clock = { at: 0, toScale: false, playing: 0 };
const TURNED = ["queries", "context", "devices", "pernode", "between", "size", "costs"];
let wire; // what `race` says of the settings, and where things stand in the picture

// Where on its axis a moment is, and back: a logarithm that begins at 0, or to scale.
const SHORT = 0.5e-6;
const along = (t) => (clock.toScale ? t / wire.end : Math.log1p(t / SHORT) / Math.log1p(wire.end / SHORT));
const moment = (x) => (clock.toScale ? x * wire.end : SHORT * Math.expm1(x * Math.log1p(wire.end / SHORT)));

/** How many rounds each device has behind it at time t. */
const progress = ({ rounds }, t) => range(now.devices).map((r) => {
  const next = rounds.findIndex(({ messages }) => messages.some(({ to, arrives }) => to === r && arrives > t * (1 + 1e-12)));
  return next < 0 ? rounds.length : next;
});

/** Which devices' keys each device has heard of along the tree, after each round. */
function heardAlong(rounds) {
  const all = [range(now.devices).map((r) => new Set([r]))];
  for (const messages of rounds) {
    const before = all.at(-1), after = [...before];
    for (const [from, to] of messages) after[to] = new Set([...before[to], ...before[from]]);
    all.push(after);
  }
  return all;
}

function makeWire() {
  wire = race(now);
  wire.of = { ...now };
  const plan = butterfly(now.devices), lanes = plan.flat().map(([a, b]) => [Math.min(a, b), Math.max(a, b)]);
  wire.heard = heardAlong(plan);
  wire.lanes = [...new Map(lanes.map((lane) => [lane.join(), lane])).values()];
  const factor = wire.ring.end / wire.tree.end, rounded = (x) => (x >= 10 ? whole(Math.round(x)) : number(x, 1));
  say("ring-time", time(wire.ring.end));
  say("counted", now.costs ? "in all" : "on the wires");
  say("tree-time", time(wire.tree.end));
  say("ratio", factor >= 1 ? `, ${rounded(factor)} times faster` : `; the ring is ${rounded(1 / factor)} times faster`);
  showKnob("pernode"); // its words depend on the number of devices
  showTime();
}
function say(place, text) {
  for (const element of document.querySelectorAll(`[data-say="${place}"]`)) {
    if (element.textContent !== text) element.textContent = text;
  }
}

/** Places in the picture: of devices, and of a message that has gone the part f of its way. */
function layout(width) {
  const p = now.devices, pitch = width / p, top = Math.min(150, 60 + 10 * p), tall = 58, bottom = top + tall;
  const x = (r) => (r + 0.5) * pitch, reach = (a, b) => Math.min(top - 26, 14 + 0.36 * Math.abs(x(b) - x(a)));
  const above = (a, b, f) => [x(a) + (x(b) - x(a)) * f, top - 6 - 4 * reach(a, b) * f * (1 - f)];
  const below = (a, b, f) => [x(a) + (x(b) - x(a)) * f, bottom + 8 + (b < a ? 60 * Math.min(1, 8 * f * (1 - f)) : 96 * f * (1 - f))];
  return { pitch, top, tall, bottom, x, above, below, box: Math.min(76, pitch - 6), height: bottom + 110 };
}

function trace(context, way, paint) {
  context.beginPath();
  for (let i = 0; i <= 24; i += 1) context.lineTo(...way(i / 24));
  context.strokeStyle = paint;
  context.globalAlpha = 0.28;
  context.lineWidth = 1;
  context.stroke();
  context.globalAlpha = 1;
}

function drawDevices(context, places, tree, ring) {
  const { pitch, top, tall, bottom, x, box } = places, p = now.devices, cell = (box - 8) / p;
  context.strokeStyle = ink("line");
  for (let n = 0; n * now.pernode < p; n += 1) {
    const [a, b] = [n * now.pernode, Math.min(p, (n + 1) * now.pernode) - 1];
    context.setLineDash([4, 3]);
    context.strokeRect(x(a) - pitch / 2 + 2, top - 6, x(b) - x(a) + pitch - 4, tall + 12);
    context.setLineDash([]);
    const name = now.pernode > 1 && p > now.pernode ? `machine ${n}` : "";
    if (context.measureText(name).width < x(b) - x(a) + pitch) text(context, name, x(a) - pitch / 2 + 6, bottom + 80, "soft");
  }
  for (let r = 0; r < p; r += 1) {
    const left = x(r) - box / 2, has = [wire.heard[tree[r]][r], new Set(range(ring[r] + 1).map((i) => (r - i + p) % p))];
    context.fillStyle = ink("panel");
    context.strokeStyle = ink("soft");
    context.fillRect(left, top, box, tall);
    context.strokeRect(left, top, box, tall);
    has.forEach((some, k) => {
      for (let s = 0; s < p; s += 1) {
        const place = [left + 4 + s * cell, top + (k ? tall - 18 : 6), Math.max(0.5, cell - 1), 12];
        context.fillStyle = some.has(s) ? colour(s) : ink("line");
        context.globalAlpha = some.has(s) ? 1 : 0.35;
        context.fillRect(...place);
      }
    });
    context.globalAlpha = 1;
    text(context, String(r), x(r), top + 33, "soft", "center");
  }
}
function text(context, words, x, y, paint, align = "left") {
  context.fillStyle = ink(paint);
  context.textAlign = align;
  context.fillText(words, x, y);
}

/** The sides of the squares that stand for a message: areas to scale, but for what would not be seen. */
function sides(pitch) {
  const [a, b] = [wire.tree.bytes, wire.ring.bytes], most = Math.min(40, pitch * 0.8);
  const scale = Math.min(most ** 2 / Math.max(a, b), 100 / Math.min(a, b));
  const side = (bytes) => Math.max(3, Math.sqrt(bytes * scale)), too = 9 / (Math.min(a, b) * scale);
  const which = a < b ? "states" : "shards";
  byId("small").textContent = too > 1.2 ? `; ${which} are drawn ${whole(Math.round(too))} times larger, to be seen` : "";
  return { tree: side(a), ring: side(b) };
}

function drawWire() {
  const canvas = byId("wire-view"), t = moment(clock.at), p = now.devices;
  const width = canvas.parentNode.clientWidth || 900, places = layout(width), { height, bottom } = places;
  const [context] = sheet(canvas, height), side = sides(places.pitch);
  const [tree, ring] = [progress(wire.tree, t), progress(wire.ring, t)];
  const told = [`tree: ${plural(wire.tree.rounds.length, "round")}, states of ${whole(wire.tree.bytes)} bytes`,
    `ring: ${plural(wire.ring.rounds.length, "round")}, shards of ${whole(wire.ring.bytes)} bytes`];
  context.font = "650 13px system-ui, sans-serif";
  text(context, told[0], 0, 14, "tree");
  text(context, told[1], 0, bottom + 99, "ring");
  context.font = "12px system-ui, sans-serif";
  for (const [a, b] of wire.lanes) trace(context, (f) => places.above(a, b, f), ink("tree"));
  for (const r of range(p)) trace(context, (f) => places.below(r, (r + 1) % p, f), ink("ring"));
  drawDevices(context, places, tree, ring);
  for (const [way, { rounds }, size] of [["above", wire.tree, side.tree], ["below", wire.ring, side.ring]]) {
    rounds.forEach(({ messages }, k) => {
      for (const { from, to, begin, arrives } of messages) {
        if (begin >= t || arrives <= t) continue; // it has not left, or is there
        const [x, y] = places[way](from, to, (t - begin) / (arrives - begin));
        context.fillStyle = way === "above" ? ink("tree") : colour((from - k + p * p) % p);
        context.fillRect(x - size / 2, y - size / 2, size, size);
      }
    });
  }
  const least = (found) => Math.min(...found);
  canvas.setAttribute("aria-label", `A row of ${p} devices; ${told.join("; ")}. After ${time(t)} every device has ` +
    `${least(tree)} rounds of the tree behind it, and ${least(ring)} of the ring.`);
}

function drawClock() {
  const [context, width] = sheet(byId("clock-view"), 78), left = 38, room = width - left - 14;
  const x = (t) => left + room * along(t);
  for (const [name, { rounds }, y] of [["tree", wire.tree, 10], ["ring", wire.ring, 33]]) {
    text(context, name, 0, y + 14, name);
    context.fillStyle = ink(name);
    let begin = 0;
    for (const { end } of rounds) {
      const [from, to] = [x(begin), x(name === "ring" && end === rounds.at(-1).end ? wire.ring.end : end)];
      context.fillRect(from, y, Math.max(0.7, to - from - 1), 19);
      begin = end;
    }
  }
  const ticks = clock.toScale ? range(5).map((i) => (i * wire.end) / 4) : [0, ...range(12).map((i) => 10 ** (i - 6))];
  let last = -99;
  for (const tick of ticks) {
    const here = x(tick);
    if (tick > wire.end || here - last < 48) continue;
    last = here;
    const align = tick === 0 ? "left" : here > left + room - 12 ? "right" : "center";
    text(context, tick ? time(tick) : "0", align === "right" ? width : here, 73, "soft", align);
    context.fillRect(here, 54, 1, 5);
  }
  const here = left + room * clock.at;
  context.fillStyle = ink("ink");
  context.fillRect(here - 1, 3, 2, 53);
  context.beginPath();
  context.arc(here, 6, 6, 0, 7);
  context.fill();
}

function showTime() {
  // The clock may tick between the turn of a knob and the frame that follows it.
  if (TURNED.some((name) => wire.of[name] !== now[name])) return makeWire();
  drawWire();
  drawClock();
  set(byId("clock"), { "aria-valuenow": Math.round(100 * clock.at), "aria-valuetext": time(moment(clock.at)) });
}
function setClock(at) {
  clock.at = Math.max(0, Math.min(1, at));
  showTime();
}

function pause() {
  cancelAnimationFrame(clock.playing);
  clock.playing = 0;
  byId("play").textContent = clock.at < 1 ? "▶ Play" : "▶ Again";
}
function play() {
  if (clock.playing) return pause();
  const began = performance.now() - (clock.at < 1 ? clock.at : 0) * 9000;
  const frame = (ms) => {
    setClock((ms - began) / 9000);
    clock.playing = clock.at < 1 ? requestAnimationFrame(frame) : 0;
    if (!clock.playing) pause();
  };
  byId("play").textContent = "❚❚ Pause";
  clock.playing = requestAnimationFrame(frame);
}

function beginWire() {
  const box = byId("clock");
  const follow = (event) => {
    const { left, width } = box.getBoundingClientRect();
    setClock((event.clientX - left - 38) / (width - 52));
  };
  draggable(box, (event) => { if (clock.playing) pause(); follow(event); return true; }, follow);
  box.addEventListener("keydown", (event) => {
    const step = pressed(event);
    if (!step) return;
    event.preventDefault();
    setClock(Number.isFinite(step) ? clock.at + 0.02 * step : step);
  });
  byId("play").addEventListener("click", play);
  byId("to-scale").addEventListener("input", ({ target }) => {
    const t = moment(clock.at);
    clock.toScale = target.checked;
    setClock(along(t));
  });
  for (const size of Object.keys(SIZES)) add(byId("size"), "option", {}, size);
  byId("size").value = now.size;
  byId("size").addEventListener("input", ({ target }) => change("size", target.value));
  byId("costs").checked = now.costs;
  byId("costs").addEventListener("input", ({ target }) => change("costs", target.checked));
  uses("wire", TURNED, makeWire);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) setClock(0.3);
  else play();
}
