// ---- the state of a set of keys, and the merge of two (treeattn/idea/state.py) ----

function leafState(scores, values) {
  const m = Math.max(-Infinity, ...scores);
  const weights = scores.map((s) => Math.exp(s - m));
  const n = data.heads[settings.head].values[0].map((_, j) =>
    weights.reduce((sum, w, i) => sum + w * values[i][j], 0));
  return { m, d: weights.reduce((sum, w) => sum + w, 0), n };
}

/** The weight of a state under the new pivot m; the state of no keys weighs nothing. */
const weight = (state, m) => (state.m === -Infinity ? 0 : Math.exp(state.m - m));

function merge(a, b) {
  const m = Math.max(a.m, b.m), [x, y] = [weight(a, m), weight(b, m)];
  return { m, d: a.d * x + b.d * y, n: a.n.map((v, j) => v * x + b.n[j] * y) };
}

function finalize({ m, d, n }) {
  if (d === 0) return { out: n.map(() => 0), lse: -Infinity };
  return { out: n.map((v) => v / d), lse: m + Math.log(d) };
}

// ---- who merges with whom, and when ----
// A plan has columns; a node stands at a column and a device. `steps` says in which order nodes
// come about: node `to` (and `twin`) becomes the merge of what is at `a` and `b`, or a copy of b.

const at = (column, device) => `${column},${device}`;

function treePlan(p, arity) {
  const steps = [], carried = [];
  let column = 0;
  for (let span = 1; span < p; span *= arity, column += 1) {
    for (let child = 1; child < arity; child += 1) {
      for (let device = 0; device + child * span < p; device += span * arity) {
        const a = child === 1 ? at(column, device) : at(column + 1, device);
        const b = at(column, device + child * span);
        steps.push({ round: column + 1, to: at(column + 1, device), a, b, messages: 1 });
      }
    }
    for (let device = 0; device < p; device += span * arity) {
      if (device + span >= p) carried.push([at(column, device), at(column + 1, device)]);
    }
  }
  return { columns: column + 1, rounds: column, steps, carried };
}

function chainPlan(p) {
  const steps = [];
  for (let device = 1; device < p; device += 1) {
    const a = at(1, device - 1), b = at(0, device);
    steps.push({ round: device, to: at(1, device), a, b, messages: 1, sender: device - 1 });
  }
  return { columns: 2, rounds: p - 1, steps, carried: [[at(0, 0), at(1, 0)]] };
}

/** Recursive doubling; devices beyond the largest power of two hand in, and get the result back. */
function butterflyPlan(p) {
  const core = 2 ** Math.floor(Math.log2(p)), extra = p - core, steps = [], carried = [];
  let column = 0;
  if (extra) {
    for (let i = 0; i < extra; i += 1) {
      steps.push({ round: 1, to: at(1, i), a: at(0, i), b: at(0, core + i), messages: 1 });
    }
    for (let i = extra; i < core; i += 1) carried.push([at(0, i), at(1, i)]);
    column = 1;
  }
  for (let bit = 1; bit < core; bit *= 2, column += 1) {
    for (let i = 0; i < core; i += 1) {
      if (i & bit) continue; // both partners merge in the order of their numbers
      const [a, b] = [at(column, i), at(column, i + bit)];
      const [to, twin] = [at(column + 1, i), at(column + 1, i + bit)];
      steps.push({ round: column + 1, to, twin, a, b, messages: 2 });
    }
  }
  if (extra) {
    for (let i = 0; i < extra; i += 1) {
      const [to, b] = [at(column + 1, core + i), at(column, i)];
      steps.push({ round: column + 1, to, b, copy: true, messages: 1 });
    }
    for (let i = 0; i < core; i += 1) carried.push([at(column, i), at(column + 1, i)]);
    column += 1;
  }
  return { columns: column + 1, rounds: column, steps, carried };
}

const place = (node) => node.split(",").map(Number);
const device = (node) => place(node)[1];

function makePlan({ way, devices, arity }) {
  if (way === "chain") return chainPlan(devices);
  return way === "tree" ? treePlan(devices, arity) : butterflyPlan(devices);
}

// ---- settings, and the states after `step` steps ----

const settings = { head: 0, tokens: 1, devices: 8, layout: "contiguous", way: "tree", arity: 2 };
let step = 0, plan, shards;

const head = () => data.heads[settings.head];

/** Which keys each device holds: capacity for the whole text, of which `tokens` have come. */
function share() {
  const { tokens, devices, layout } = settings, rows = Math.ceil(head().words.length / devices);
  const keys = Array.from({ length: tokens }, (_, i) => i);
  return Array.from({ length: devices }, (_, r) => keys.filter((i) =>
    (layout === "striped" ? i % devices : Math.floor(i / rows)) === r));
}

/** node -> {state, keys, made}: what there is after `step` steps, and which step made it. */
function statesAfter(count, leaf = leafState, join = merge) {
  const nodes = new Map(), scores = head().scores[settings.tokens - 1], { values } = head();
  shards.forEach((keys, r) => {
    const state = leaf(keys.map((i) => scores[i]), keys.map((i) => values[i]), r);
    nodes.set(at(0, r), { state, keys, made: 0 });
  });
  const carry = () => {
    for (const [from, to] of plan.carried) {
      if (nodes.has(from) && !nodes.has(to)) nodes.set(to, { ...nodes.get(from), carried: true });
    }
  };
  carry();
  plan.steps.slice(0, count).forEach(({ to, twin, a, b, copy }, i) => {
    const [x, y] = [nodes.get(a), nodes.get(b)];
    const made = copy ? { ...y, made: i + 1 }
      : { state: join(x.state, y.state), keys: [...x.keys, ...y.keys], made: i + 1 };
    nodes.set(to, made);
    if (twin) nodes.set(twin, made);
    carry();
  });
  return nodes;
}

// ---- drawing ----

const wordsOf = (keys) => keys.map((i) => head().words[i]).join("").trim() || "no keys";

function bars(parent, state, x, y, width, height) {
  const { out } = finalize(state), middle = y + height / 2;
  const most = Math.max(...head().values.flat().map(Math.abs)) / 2, unit = width / out.length;
  const tall = (v) => Math.max(-1, Math.min(1, v / most)) * (height / 2);
  const line = (v, j) => `M${(x + (j + 0.5) * unit).toFixed(1)} ${middle}v${(-tall(v)).toFixed(2)}`;
  add(parent, "path", { class: "bars", d: out.map(line).join(""), "stroke-width": unit * 0.7 });
}

function drawBox(svg, key, node, x, y, width, narrow) {
  const [column, r] = place(key), fresh = node && step > 0 && node.made === step && !node.carried;
  const group = add(svg, "g", { "data-node": key, class: node ? "made" : "" });
  const empty = node && node.state.m === -Infinity;
  const kind = !node ? "future" : `known${empty ? " empty" : ""}${fresh ? " fresh" : ""}`;
  const box = { x, y, width, height: 42, rx: 5 };
  if (fresh) add(group, "rect", { ...box, class: "pulse" });
  add(group, "rect", { ...box, class: `box ${kind}` });
  if (!node) return;
  const digits = narrow ? 1 : 2, { state } = node;
  const type = { x: x + (narrow ? 3 : 5), "font-size": narrow ? 10 : 11 };
  add(group, "text", { ...type, y: y + 13 }, `m ${number(state.m, digits)}`);
  add(group, "text", { ...type, y: y + 26 }, `d ${number(state.d, digits)}`);
  if (!empty) bars(group, state, x + 4, y + 29, width - 8, 11);
  add(group, "title", {}, `round ${column}, device ${r}: ${wordsOf(node.keys)}`);
  group.addEventListener("click", () => goTo(node.made));
}

function drawEdge(svg, from, to, kind, message, where) {
  const [x1, y1] = where(from, 1), [x2, y2] = where(to, 0), bend = Math.max(8, (x2 - x1) / 2);
  const [[c1], [c2]] = [place(from), place(to)];
  const path = c1 === c2 // down a chain, from box to box of one column
    ? `M${x1 - 12} ${y1 + 21}V${y2 - 21}`
    : `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  add(svg, "path", { class: `edge ${kind} ${message ? "message" : ""}`, d: path });
}

function drawDiagram(nodes) {
  const holder = byId("diagram"), width = Math.max(300, holder.clientWidth || 900);
  const narrow = width < 600, label = narrow ? 58 : 150, rowHeight = 52, top = 20;
  const columnWidth = Math.min(130, (width - label) / plan.columns);
  const boxWidth = Math.min(72, columnWidth - (narrow ? 8 : 18));
  const height = top + settings.devices * rowHeight;
  const where = (key, end) => {
    const [column, r] = place(key);
    return [label + column * columnWidth + end * boxWidth, top + r * rowHeight + 23];
  };
  holder.replaceChildren();
  const words = `${settings.devices} states, merged along a ${settings.way}, after step ${step} of ` +
    `${plan.steps.length}; all numbers are in the table below.`;
  const svg = add(holder, "svg", { width, height, role: "img", "aria-label": words });
  for (let c = 0; c < plan.columns; c += 1) {
    const title = settings.way === "chain" ? ["own", "so far"][c] : c ? `round ${c}` : "own";
    add(svg, "text", { class: "quiet", x: label + c * columnWidth, y: 11 }, title);
  }
  shards.forEach((keys, r) => {
    const y = top + r * rowHeight;
    add(svg, "text", { x: 0, y: y + 17 }, narrow ? `dev. ${r}` : `device ${r}`);
    add(svg, "text", { class: "quiet", x: 0, y: y + 33 }, cut(wordsOf(keys), label - 8));
  });
  const known = new Map();
  const note = (from, to, kind, message) => known.set(`${from}>${to}`, [from, to, kind, message]);
  for (const [from, to] of plan.carried) note(from, to, nodes.has(to) ? "known" : "", false);
  plan.steps.forEach(({ to, twin, a, b, sender }, i) => {
    const kind = i + 1 === step ? "fresh" : i < step ? "known" : "";
    for (const end of [to, twin]) {
      for (const from of [a, b]) {
        if (!end || !from || from === end) continue;
        note(from, end, kind, sender !== undefined ? from === a : device(from) !== device(end));
      }
    }
  });
  const edges = [...known.values()];
  for (const wanted of ["", "known", "fresh"]) { // the newest on top
    for (const [from, to, kind, message] of edges) {
      if (kind === wanted) drawEdge(svg, from, to, kind, message, where);
    }
  }
  const keys = new Set([...shards.map((_, r) => at(0, r)),
    ...plan.carried.map(([, to]) => to), ...plan.steps.flatMap(({ to, twin }) => [to, twin ?? to])]);
  for (const key of keys) {
    const [x, y] = where(key, 0);
    drawBox(svg, key, nodes.get(key), x, y - 21, boxWidth, narrow);
  }
}

// ---- the panels ----

/** {messages, bytes, busiest}: what has been sent, in all and by the device that sent most. */
function sentAfter(count) {
  const size = 4 * (head().values[0].length + 2), by = new Array(settings.devices).fill(0);
  for (const { a, b, twin, sender } of plan.steps.slice(0, count)) {
    by[sender ?? device(b)] += size;
    if (twin) by[device(a)] += size;
  }
  const bytes = by.reduce((x, y) => x + y, 0);
  return { messages: bytes / size, bytes, busiest: Math.max(...by), size };
}

function tableRow(table, name, cells) {
  const row = add(table, "tr");
  add(row, "th", { scope: "row" }, name);
  for (const cell of cells) add(row, "td", {}, cell);
}

const vectorText = (n) => n.map((v) => number(v, 3)).join("  ");

function showStep(before, nodes) {
  const current = plan.steps[step - 1], table = byId("step-table");
  table.replaceChildren();
  byId("vector").hidden = !current;
  byId("step-table").hidden = !current || Boolean(current.copy);
  if (!current) {
    byId("step-text").textContent = "Every device has reduced its own keys; nothing was sent yet.";
    return;
  }
  const { state } = nodes.get(current.to), b = before.get(current.b);
  byId("vector").querySelector("div").textContent = vectorText(state.n);
  if (current.copy) {
    byId("step-text").textContent = "The result goes back to a device that had handed its state in.";
    return;
  }
  const a = before.get(current.a), pair = [a.state, b.state];
  const [x, y] = pair.map((s) => weight(s, state.m));
  const ends = [current.a, current.b].map((node) => `device ${device(node)}`);
  addHeads(table, ["", ...ends, "merged"]);
  const body = add(table, "tbody");
  const all = (f) => [...pair, state].map(f);
  tableRow(body, "keys", [a, b, nodes.get(current.to)].map((node) => whole(node.keys.length)));
  tableRow(body, "m", all((s) => number(s.m, 3)));
  tableRow(body, "weight e^(mᵢ − m)", [number(x, 4), number(y, 4)]);
  tableRow(body, "d", all((s) => number(s.d, 4)));
  tableRow(body, "weight · d", [number(a.state.d * x, 4), number(b.state.d * y, 4),
    number(state.d, 4)]);
  for (let j = 0; j < Math.min(2, state.n.length); j += 1) {
    tableRow(body, `n, component ${j}`, all((s) => number(s.n[j], 4)));
  }
  const part = state.d > 0 ? (100 * b.state.d * y) / state.d : 0;
  let text = `Of the merged attention, ${number(part, 1)} % goes to what ${ends[1]} held, ` +
    `“${cut(wordsOf(b.keys), 300)}”.`;
  if (b.state.d === 0) text = `${ends[1]} holds no keys: it weighs nothing, and changes nothing.`;
  if (state.d === 0) text = "No keys and no keys are no keys: m stays −∞, and no weight is a NaN.";
  byId("step-text").textContent = text[0].toUpperCase() + text.slice(1);
}

function showSent(nodes) {
  const current = plan.steps[step - 1], { messages, bytes, busiest, size } = sentAfter(step);
  const total = plan.steps.length;
  let title = `Before the first of ${plural(plan.rounds, "round")}`;
  if (current) {
    const [to, b] = [device(current.to), device(current.b)];
    const what = current.copy ? `device ${b} → device ${to}`
      : `device ${device(current.a)} ⊕ device ${b}`;
    title = `Round ${current.round} of ${plan.rounds}, step ${step} of ${total}: ${what}`;
  }
  byId("step-title").textContent = title;
  const { state } = current ? nodes.get(current.to) : {};
  const now = state ? `m = ${number(state.m, 3)}, d = ${number(state.d, 4)}. ` : "";
  byId("sent").textContent = `${now}Sent so far: ${whole(bytes)} bytes in ` +
    `${plural(messages, "message")} of ${size} bytes; the busiest device sent ${whole(busiest)}.`;
}

function showResult(nodes) {
  const done = step === plan.steps.length;
  byId("result").hidden = !done;
  if (!done) return;
  const scores = head().scores[settings.tokens - 1];
  const dense = finalize(leafState(scores, head().values.slice(0, scores.length)));
  const last = finalize(nodes.get(plan.steps.at(-1).to).state);
  const table = byId("result").querySelector("table");
  table.replaceChildren();
  addHeads(table, ["", "merged", "dense softmax"]);
  const body = add(table, "tbody");
  tableRow(body, "lse = m + log d", [number(last.lse, 4), number(dense.lse, 4)]);
  for (let j = 0; j < Math.min(2, last.out.length); j += 1) {
    tableRow(body, `out = n/d, component ${j}`, [number(last.out[j], 4), number(dense.out[j], 4)]);
  }
  const gaps = last.out.map((v, j) => Math.abs(v - dense.out[j]));
  const gap = Math.max(Math.abs(last.lse - dense.lse), ...gaps);
  byId("agrees").textContent = `Largest difference of all ${gaps.length + 1} numbers below 1e−12: ` +
    `${gap < 1e-12}.`;
}

function showTable(nodes) {
  const holder = byId("states").querySelector("div");
  holder.replaceChildren();
  if (!byId("states").open) return; // thousands of numbers
  const table = add(holder, "table");
  addHeads(table, ["round", "device", "keys", "m", "d", "lse", "n"]);
  const body = add(table, "tbody");
  for (const [key, { state, keys }] of nodes) {
    const row = add(body, "tr", { "data-row": key }), [column, r] = place(key);
    const cells = [column, r, keys.join(" ") || "none", number(state.m, 4), number(state.d, 4),
      number(finalize(state).lse, 4), vectorText(state.n)];
    for (const cell of cells) add(row, "td", {}, cell);
  }
}

function show() {
  const before = statesAfter(Math.max(0, step - 1)), nodes = statesAfter(step);
  drawDiagram(nodes);
  showStep(before, nodes);
  showSent(nodes);
  showResult(nodes);
  showTable(nodes);
  showFault();
  byId("start").disabled = byId("back").disabled = step === 0;
  byId("next").disabled = byId("round").disabled = step === plan.steps.length;
  const fault = byId("fault").value;
  toAddress({ ...settings, step, ...(fault ? { fault } : {}) });
}

// ---- what the reader does ----

function goTo(wanted) {
  step = Math.max(0, Math.min(plan.steps.length, wanted));
  if (step === plan.steps.length) stop();
  show();
}

/** The step after which the next round is complete, or before which this one began. */
function roundEdge(forward) {
  const after = plan.steps.map(({ round }) => round), wanted = forward ? after[step] : after[step - 1];
  return forward ? after.lastIndexOf(wanted) + 1 : after.indexOf(wanted);
}

function play() {
  if (timer) return stop();
  if (step === plan.steps.length) goTo(0);
  start(() => goTo(step + 1), 1200);
}

/** Read the form, and start anew with what it says. */
function restart(wantedStep = 0) {
  stop();
  for (const name of ["head", "tokens", "devices", "arity"]) settings[name] = Number(byId(name).value);
  for (const name of ["layout", "way"]) settings[name] = byId(name).value;
  const { words, about } = head();
  byId("tokens").max = words.length;
  settings.tokens = Math.min(settings.tokens, words.length);
  byId("tokens-out").textContent = settings.tokens;
  byId("devices-out").textContent = settings.devices;
  byId("arity").disabled = settings.way !== "tree";
  byId("text").textContent = `${about} The query: “${words[settings.tokens - 1].trim()}”, the last of “` +
    `${words.slice(0, settings.tokens).join("")}”.`;
  plan = makePlan(settings);
  shards = share();
  goTo(wantedStep);
}

function begin() {
  const wanted = fromAddress();
  data.heads.forEach(({ name }, i) => add(byId("head"), "option", { value: i }, name));
  byId("head").value = wanted.get("head") ?? "0";
  const tokens = data.heads[byId("head").value]?.words.length ?? 1;
  Object.assign(byId("tokens"), { max: tokens, value: tokens });
  byId("devices").value = 8;
  for (const name of ["tokens", "devices", "layout", "way", "arity"]) {
    if (wanted.has(name)) byId(name).value = wanted.get(name);
  }
  data.faults.forEach(({ id, name }) => add(byId("fault"), "option", { value: id }, name));
  byId("fault").value = wanted.get("fault") ?? "";
  byId("broken").open = wanted.has("fault");
  byId("fault").addEventListener("input", show);
  byId("broken").addEventListener("toggle", show);
  byId("form").addEventListener("input", (event) => {
    const { words } = data.heads[byId("head").value];
    if (event.target.id === "head") Object.assign(byId("tokens"), { max: words.length, value: words.length });
    restart();
  });
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  const actions = {
    start: () => goTo(0), back: () => goTo(step - 1), next: () => goTo(step + 1),
    round: () => goTo(roundEdge(true)), play,
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  onKeys({
    ArrowRight: actions.next, ArrowLeft: actions.back, Home: actions.start,
    End: () => goTo(Infinity), "Shift+ArrowRight": actions.round,
    "Shift+ArrowLeft": () => goTo(roundEdge(false)),
  });
  byId("states").addEventListener("toggle", show);
  let drawn = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - drawn) > 1) drawn = contentRect.width, show();
  }).observe(byId("diagram"));
  restart(Number(wanted.get("step")) || 0);
}

begin();
