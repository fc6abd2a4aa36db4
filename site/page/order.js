// ---- words of a real head on devices; their states as masses; merges in any order ----

const head = () => data.heads[now.head];
const LAST = data.heads[0].words.length; // the last word asks, and is a key, too
const DEALS = {
  "in a row": (i) => Math.floor(i / Math.ceil(LAST / now.devices)),
  "like cards": (i) => i % now.devices,
  "at random": () => Math.floor(Math.random() * now.devices),
  "all to one": () => 0,
};
const ORDERS = {
  "a tree": (p) => treePairs(p),
  "a chain": (p) => range(p - 1).map((i) => [i ? p + i - 1 : 0, i + 1]),
  "no plan at all": (p) => chancePairs(p),
  "your own order": () => own,
};
knob("head", range(data.heads.length), 1, "a head of the model", (i) => data.heads[i].name);
knob("deal", Object.keys(DEALS), "in a row", "how the words are dealt");
knob("way", Object.keys(ORDERS), "a tree", "the order of merges");
knob("merged", range(16), 0, "merges done", (n) => `${Math.min(n, now.devices - 1)} of ${now.devices - 1}`);

let owner = [], own = [], plan = [];
const deal = () => { owner = range(LAST).map(DEALS[now.deal]); };

// A merge is a pair of numbers: devices, and after them the merges so far.
function treePairs(p) {
  const pairs = [];
  let here = range(p);
  while (here.length > 1) {
    const next = [];
    for (let i = 0; i < here.length; i += 2) {
      if (i + 1 === here.length) next.push(here[i]);
      else next.push(p + pairs.push([here[i], here[i + 1]]) - 1);
    }
    here = next;
  }
  return pairs;
}
function chancePairs(p) {
  const left = range(p), take = () => left.splice(Math.floor(Math.random() * left.length), 1)[0];
  return range(p - 1).map((i) => { const merged = [take(), take()]; left.push(p + i); return merged; });
}

/** Each device's state, and after them what the first `count` merges make. */
function nodesAfter(count) {
  const nodes = range(now.devices).map((r) => ({ has: [r], state: stateOf(owner.flatMap((o, i) => (o === r ? [i] : []))) }));
  for (const [a, b] of plan.slice(0, count)) {
    nodes.push({ has: [...nodes[a].has, ...nodes[b].has], parts: [a, b], state: merge(nodes[a].state, nodes[b].state) });
  }
  return nodes;
}
const written = (gap) => (gap === 0 ? "the last bit" : gap.toExponential(0).replace("-", "−"));
const dense = () => finalize(stateOf(range(LAST)));

// ---- a head's values in the plane: their two main directions, found by power iteration ----

function directions({ values, scores }) {
  const lse = dense().lse, weights = scores.map((s) => Math.exp(s - lse));
  const mean = values[0].map((_, j) => sum(values.map((v, i) => weights[i] * v[j]))), found = [];
  const rows = values.map((v, i) => v.map((x, j) => Math.sqrt(weights[i]) * (x - mean[j])));
  const inner = (x, y) => sum(x.map((v, j) => v * y[j]));
  for (const k of [0, 1]) {
    let u = mean.map((_, j) => Math.sin(1 + j * (k + 1)));
    for (let i = 0; i < 200; i += 1) {
      const dots = rows.map((v) => inner(v, u));
      u = u.map((_, j) => sum(rows.map((v, r) => dots[r] * v[j])));
      for (const w of found) u = u.map(((c) => (x, j) => x - c * w[j])(inner(u, w)));
      u = u.map(((length) => (x) => x / length)(Math.hypot(...u)));
    }
    found.push(u);
  }
  return (v) => found.map((u) => inner(u, v));
}

const planes = {}; // a head's plane, once it is known
function planeOf(height) {
  return planes[`${now.head} ${height}`] ??= (() => {
    const flat = directions(head()), { lse } = dense();
    const heavy = head().values.filter((_, i) => Math.exp(head().scores[i] - lse) > 0.01).map(flat);
    const [low, high] = [Math.min, Math.max].map((f) => [0, 1].map((A) => f(...heavy.map((x) => x[A]))));
    const unit = Math.min(350 / (high[0] - low[0]), (height - 120) / (high[1] - low[1]));
    const [x, y] = [240 - (unit * (low[0] + high[0])) / 2, height / 2 + (unit * (low[1] + high[1])) / 2];
    return (v) => { const [a, b] = flat(v); return [x + unit * a, y - unit * b]; };
  })();
}
const radius = (share) => 46 * Math.sqrt(share);
const shareOf = (state) => (state.d === 0 ? 0 : Math.exp(finalize(state).lse - dense().lse));

/** The head's words in the plane, as discs behind every picture of states. */
function drawTokens(svg, height) {
  svg.replaceChildren();
  const at = planeOf(height), { lse } = dense();
  head().words.forEach((_, i) => {
    const [cx, cy] = at(head().values[i]), share = Math.exp(head().scores[i] - lse);
    add(svg, "circle", { cx, cy, r: Math.max(1.5, radius(share)), class: "token" });
  });
  return at;
}
/** The heavy words' names, drawn last, on the side that looks away from the cross: states lie between. */
function nameTokens(svg, at, height) {
  const { out, lse } = dense(), middle = at(out)[1];
  head().words.forEach((word, i) => {
    const [x, cy] = at(head().values[i]), share = Math.exp(head().scores[i] - lse), away = Math.max(8, radius(share));
    const y = cy > middle ? Math.min(height - 6, cy + away + 18) : cy - away - 6;
    if (share > 0.06) add(svg, "text", { x, y, "text-anchor": "middle", class: "quiet halo" }, word.trim());
  });
}
function drawCross(svg, place, kind = "") {
  move(add(svg, "path", { d: CROSS, class: `cross ${kind}` }), place);
}
function drawMass(parent, at, state, paint) {
  const mass = add(parent, "circle", { r: Math.max(3, radius(shareOf(state))), class: "mass", style: `fill: ${paint}; stroke: ${paint}` });
  move(mass, at(finalize(state).out));
}

function heat(id, out) {
  const most = largest(dense().out), strip = byId(id);
  while (strip.children.length < out.length) add(strip, "i");
  out.forEach((v, j) => strip.children[j].style.setProperty("background",
    `color-mix(in oklab, var(${v < 0 ? "--warm" : "--tree"}) ${Math.round(Math.min(100, (100 * Math.abs(v)) / most))}%, var(--panel))`));
}

function fillWords(holder, tag, shown) {
  if (holder.dataset.head !== String(now.head)) {
    holder.replaceChildren();
    holder.dataset.head = now.head;
    head().words.forEach((word, i) => add(add(holder, tag, { "data-word": i }), "i").after(word.trim() || "·"));
  }
  const { lse } = dense();
  [...holder.children].forEach((element, i) => {
    const share = Math.exp(head().scores[i] - lse);
    element.firstChild.style.height = `${Math.max(1, 24 * Math.sqrt(share))}px`;
    element.style.setProperty("--mine", shown(i));
    if (tag === "button") set(element, { type: "button", "aria-label": `${head().words[i].trim()}, weight ${percent(share)}, on device ${owner[i]}` });
  });
}

// ---- drawn, and merged by hand ----

let chosen = null;
function drawMasses() {
  if (now.way === "your own order") now.merged = own.length;
  const count = Math.min(now.merged, now.devices - 1), nodes = nodesAfter(count);
  const used = new Set(plan.slice(0, count).flat()), focused = document.activeElement?.dataset?.mass;
  const svg = byId("masses"), at = drawTokens(svg, 380), right = dense();
  for (const { parts } of nodes) if (parts) add(svg, "path", { class: "segment", d: line(parts.map((i) => at(finalize(nodes[i].state).out))) });
  const left = range(nodes.length).filter((i) => !used.has(i)).sort((a, b) => shareOf(nodes[b].state) - shareOf(nodes[a].state));
  for (const i of left) {
    const { state, has } = nodes[i], empty = state.d === 0;
    const group = add(svg, "g", { class: `handle ${chosen === i ? "chosen" : ""}`, "data-mass": i, tabindex: 0, role: "button",
      "aria-label": `the state of device ${has.join(", ")}: ${empty ? "no keys" : percent(shareOf(state))}` });
    const place = empty ? [20 + 24 * left.filter((j) => j < i && nodes[j].state.d === 0).length, 362] : at(finalize(state).out);
    const paint = has.length > 1 ? "var(--tree)" : colour(has[0]);
    add(group, "circle", { r: Math.max(3, radius(shareOf(state))), class: "mass", style: `fill: ${paint}; stroke: ${paint}` });
    add(group, "circle", { r: 16, class: "reach" });
    move(group, place);
    byHand(group, i, place);
  }
  nameTokens(svg, at, 380);
  drawCross(svg, at(right.out));
  const last = finalize(nodes.at(-1).state), gap = apart(last, right), done = count === now.devices - 1;
  heat("by-merges", last.out);
  heat("by-softmax", right.out);
  set(byId("by-merges"), { "aria-label": `the last merge’s ${last.out.length} numbers` });
  set(byId("by-softmax"), { "aria-label": "one softmax’s numbers" });
  say("merged", done ? `All ${now.devices} states are merged. The result is one softmax over all words, to ${written(gap)}.`
    : `${plural(left.length, "mass", "masses")} left. The cross is attention over all words: it waits where the last one will be.`);
  fillWords(byId("dealt"), "button", (i) => colour(owner[i]));
  if (focused) svg.querySelector(`[data-mass="${focused}"]`)?.focus();
}

function mergeOwn(a, b) {
  own = [...plan.slice(0, Math.min(now.merged, plan.length)), [a, b]];
  plan = own;
  chosen = null;
  change("way", "your own order");
  change("merged", own.length);
}
function byHand(group, i, [x, y]) {
  const svg = byId("masses");
  const place = ({ clientX, clientY }) => {
    const box = svg.getBoundingClientRect();
    return [((clientX - box.x) * 480) / box.width, ((clientY - box.y) * 480) / box.width];
  };
  draggable(group, place, (event, from) => move(group, plus([x, y], plus(place(event), from, -1))), (event, from) => {
    const to = place(event), others = [...svg.querySelectorAll("[data-mass]")].filter((other) => other !== group);
    const gap = (other) => { const { e, f } = other.transform.baseVal[0].matrix; return Math.hypot(e - to[0], f - to[1]); };
    const near = others.reduce((best, other) => (gap(other) < (best ? gap(best) : 32) ? other : best), null);
    if (Math.hypot(to[0] - from[0], to[1] - from[1]) < 4) choose(i);
    else if (near) mergeOwn(Number(near.dataset.mass), i);
    else move(group, [x, y]);
  });
  group.addEventListener("keydown", (event) => {
    if (!["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    choose(i);
  });
}
function choose(i) {
  if (chosen !== null && chosen !== i) return mergeOwn(chosen, i);
  chosen = chosen === i ? null : i;
  change("merged", now.merged);
}

function sweepWords() {
  const holder = byId("dealt");
  let sweep = null;
  const hand = (i, r) => { owner[i] = r; change("deal", now.deal); };
  holder.addEventListener("pointerdown", ({ target, pointerId }) => {
    const word = target.closest("[data-word]");
    if (word?.hasPointerCapture(pointerId)) word.releasePointerCapture(pointerId); // a finger’s
    sweep = word && { first: Number(word.dataset.word), to: owner[word.dataset.word], far: false };
  });
  holder.addEventListener("pointermove", (event) => {
    const word = event.buttons && sweep && document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-word]");
    if (!word || Number(word.dataset.word) === sweep.first) return;
    sweep.far = true;
    hand(Number(word.dataset.word), sweep.to);
  });
  holder.addEventListener("click", ({ target }) => {
    const word = target.closest("[data-word]"), far = sweep?.far;
    sweep = null;
    if (word && !far) hand(Number(word.dataset.word), (owner[word.dataset.word] + 1) % now.devices);
  });
}

function beginOrder(wanted) {
  let dealt = "", planned = "";
  const asked = (wanted.get("owner") ?? "").split(".").map(Number);
  kept.owner = () => (owner.some((r, i) => now.deal === "at random" || r !== DEALS[now.deal](i)) ? owner.join(".") : "");
  const prepare = () => {
    if (dealt !== (dealt = `${now.deal} ${now.devices}`)) deal();
    if (planned !== (planned = `${now.way} ${now.devices}`)) {
      if (now.way === "your own order") own = own.filter(([a, b]) => Math.max(a, b) < now.devices + own.length);
      chosen = null;
      plan = ORDERS[now.way](now.devices);
    }
    showKnob("merged");
  };
  now.way = now.way === "your own order" ? "a tree" : now.way;
  uses(null, ["deal", "way", "devices"], prepare);
  uses("order", ["head", "deal", "way", "merged", "devices"], drawMasses);
  if (asked.length === LAST && asked.every((r) => Number.isInteger(r) && r >= 0 && r < now.devices)) {
    owner = asked;
    drawMasses();
  }
  sweepWords();
}
