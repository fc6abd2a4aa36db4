// ---- merges of pairs of out and lse, sound and with a fault each (site/broken_merges.py) ----

const cell = new Float32Array(1), bits = new Uint32Array(cell.buffer);

function bfloat16(x) {
  cell[0] = x;
  bits[0] = (bits[0] + 0x7fff + ((bits[0] >>> 16) & 1)) & 0xffff0000;
  return cell[0];
}

/** A right merge, or one with other functions, or without a guard or a selection. */
function sound(a, b, { exp = Math.exp, log = Math.log, guarded = true, selected = true } = {}) {
  const m = Math.max(a.lse, b.lse), pivot = m === -Infinity && guarded ? 0 : m;
  const [x, y] = [exp(a.lse - pivot), exp(b.lse - pivot)];
  const d = x + y === 0 && guarded ? 1 : x + y, part = (v, w) => (w === 0 && selected ? 0 : v * w);
  return { out: a.out.map((v, j) => (part(v, x) + part(b.out[j], y)) / d), lse: m + log(d) };
}

function summedLse(a, b) {
  const keys = [a, b].filter(({ lse }) => lse !== -Infinity);
  const lse = keys.length ? keys.reduce((total, part) => total + part.lse, 0) : -Infinity;
  const weights = [a, b].map((part) => (part.lse === -Infinity ? 0 : Math.exp(part.lse - lse)));
  return { out: a.out.map((v, j) => v * weights[0] + b.out[j] * weights[1]), lse };
}

function stalePivot(a, b) {
  const m = Math.max(a.lse, b.lse), pivot = m === -Infinity ? 0 : m;
  const x = a.lse === -Infinity ? 0 : 1, y = Math.exp(b.lse - pivot), d = x + y || 1;
  return { out: a.out.map((v, j) => (v * x + b.out[j] * y) / d), lse: m + Math.log(d) };
}

function withoutMaximum(a, b) {
  const [x, y] = [a, b].map(({ lse }) => Math.fround(Math.exp(lse))), d = Math.fround(x + y);
  return { out: a.out.map((v, j) => (v * x + b.out[j] * y) / (d || 1)), lse: Math.log(d) };
}

function sumsIn16Bits(a, b) {
  const { lse } = sound(a, b), pivot = lse === -Infinity ? 0 : lse;
  const part = (v, of) => bfloat16(v * Math.exp(of - pivot));
  return { out: a.out.map((v, j) => bfloat16(part(v, a.lse) + part(b.out[j], b.lse))), lse };
}

const emptyAs = (lse) => (part) => (part.lse === -Infinity ? { ...part, lse } : part);
const LOWEST = -3.4028234663852886e38; // of float32

/** What joins two pairs, and what becomes of a device's pair on the way there. */
const FAULTS = {
  base: { merge: (a, b) => sound(a, b, { exp: (x) => 2 ** x, log: Math.log2 }) },
  sum: { merge: summedLse },
  pivot: { merge: stalePivot },
  lse16: { sent: ({ out, lse }) => ({ out, lse: bfloat16(lse) }) },
  out16: { merge: sumsIn16Bits },
  zero: { sent: emptyAs(0) },
  infinite: { sent: emptyAs(Infinity) },
  lowest: { sent: emptyAs(LOWEST) },
  unguarded: { merge: (a, b) => sound(a, b, { guarded: false }) },
  nan: {
    sent: (part) => (part.lse === -Infinity ? { ...part, out: part.out.map(() => NaN) } : part),
    merge: (a, b) => sound(a, b, { selected: false }),
  },
  overflow: { merge: withoutMaximum },
};

/** The last out and lse, and each device's share of that out: outs that tell the devices apart
 * are merged beside the real ones. */
function mergedBy({ merge: join = sound, sent = (part) => part }) {
  const leaf = (scores, values, r) => {
    const { out, lse } = finalize(leafState(scores, values));
    return sent({ out: [...out, ...shards.map((_, i) => (i === r && lse > -Infinity ? 1 : 0))], lse });
  };
  const nodes = statesAfter(plan.steps.length, leaf, join);
  const { out, lse } = nodes.get(plan.steps.at(-1).to).state, size = head().values[0].length;
  return { out: out.slice(0, size), shares: out.slice(size), lse };
}

// ---- shown: the outputs, the shares, and what the conformance suite says ----

const largest = (numbers) => Math.max(...numbers.map(Math.abs));
const written = (x, digits) => (Number.isNaN(x) ? "NaN" : number(x, digits));

function drawOutputs(right, broken) {
  const holder = byId("outputs"), width = Math.max(300, holder.clientWidth || 600), height = 120;
  const unit = width / right.length, most = 1.1 * largest(right);
  const tall = (v) => (Math.max(-1, Math.min(1, v / most)) * height) / 2;
  holder.replaceChildren();
  const label = `the ${right.length} numbers of out: bars, as this merge has them; lines, as they should be`;
  const svg = add(holder, "svg", { width, height, role: "img", "aria-label": label });
  right.forEach((v, j) => {
    const x = (j + 0.15) * unit, to = tall(Number.isFinite(broken[j]) ? broken[j] : 0);
    const bar = { x, width: unit * 0.7, y: height / 2 - Math.max(to, 0), height: Math.abs(to) };
    add(svg, "rect", { ...bar, class: "off" });
    const y = height / 2 - tall(v);
    add(svg, "path", { class: "should", d: `M${x - unit * 0.1} ${y}h${unit * 0.9}` });
  });
}

function tellFault(fault, right, broken) {
  const gap = largest(right.out.map((v, j) => v - broken.out[j]));
  let moved = `The output moves by up to ${number(gap, 3)}, where its largest number is ` +
    `${number(largest(right.out), 3)}; lse is ${written(broken.lse, 4)}, and should be ${number(right.lse, 4)}.`;
  if (Number.isNaN(gap)) moved = "Every number of the output is NaN.";
  else if (gap < 1e-5) moved = "Here, nothing moves.";
  byId("fault-text").textContent = fault.about;
  byId("moved").textContent = moved;
  const found = byId("fingerprints");
  found.replaceChildren();
  add(found, "p", {}, `The conformance suite's check_merge asks this merge ${fault.asked} questions, and ` +
    `${fault.failed} answers are wrong. ${fault.fingerprints.length ? "It reads the fingerprint:"
      : "It has no fingerprint of this fault, only the wrong numbers."}`);
  for (const [name, cure] of fault.fingerprints) {
    const line = add(found, "p");
    add(line, "strong", {}, name);
    line.append(`: ${cure}.`);
  }
}

function showFault() {
  const fault = data.faults.find(({ id }) => id === byId("fault").value);
  byId("fault-panel").hidden = !fault;
  if (!fault || !byId("broken").open) return;
  const [right, broken] = [mergedBy({}), mergedBy(FAULTS[fault.id])];
  tellFault(fault, right, broken);
  drawOutputs(right.out, broken.out);
  const body = byId("shares").querySelector("tbody");
  body.replaceChildren();
  shards.forEach((keys, r) => {
    const row = add(body, "tr"), percent = (x) => (Number.isNaN(x) ? "NaN" : `${number(100 * x, 1)} %`);
    add(row, "th", { scope: "row" }, `device ${r}: ${cut(wordsOf(keys), 240)}`);
    const bar = add(add(row, "td"), "div", { class: "bar" });
    add(bar, "i", { style: `width: ${Math.min(100, 100 * (broken.shares[r] || 0)).toFixed(2)}%` });
    add(bar, "b", { style: `left: ${(100 * right.shares[r]).toFixed(2)}%` });
    for (const x of [right.shares[r], broken.shares[r]]) add(row, "td", {}, percent(x));
  });
}
