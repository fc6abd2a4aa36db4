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
