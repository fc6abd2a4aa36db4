// ---- states of keys, merges, and who sends what to whom, when ----

/** The state of some keys of a head: each key is its score. */
function stateOf(keys, { scores, values } = head()) {
  const m = Math.max(-Infinity, ...keys.map((i) => scores[i]));
  const weights = keys.map((i) => Math.exp(scores[i] - m));
  return { m, d: sum(weights), n: values[0].map((_, j) => sum(keys.map((i, a) => weights[a] * values[i][j]))) };
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

/** How far two results of `finalize` are apart. */
const apart = (a, b) => Math.max(largest(a.out.map((v, j) => v - b.out[j])), a.lse === b.lse ? 0 : Math.abs(a.lse - b.lse));

// A plan is a list of rounds, a round a list of messages [from, to]. A message carries all that
// its sender had before the round.

/** Recursive doubling; devices beyond the largest power of two hand in, and get the result back. */
function butterfly(p) {
  const core = 2 ** Math.floor(Math.log2(p)), extra = range(p - core), rounds = [];
  if (extra.length) rounds.push(extra.map((i) => [core + i, i]));
  for (let bit = 1; bit < core; bit *= 2) rounds.push(range(core).map((i) => [i ^ bit, i]));
  if (extra.length) rounds.push(extra.map((i) => [i, core + i]));
  return rounds;
}
const ring = (p) => range(p - 1).map(() => range(p).map((r) => [r, (r + 1) % p]));

/** After each round, each device's {state, has}: `has` are the devices whose keys are in it. */
function statesAlong(rounds, leaves) {
  const all = [leaves.map((state, r) => ({ state, has: [r] }))];
  for (const messages of rounds) {
    const before = all.at(-1), after = [...before];
    for (const [from, to] of messages) {
      const [low, high] = [before[Math.min(from, to)], before[Math.max(from, to)]]; // both partners alike
      const known = before[from].has.length === leaves.length; // the whole, handed back
      after[to] = known ? before[from]
        : { state: merge(low.state, high.state), has: [...low.has, ...high.has] };
    }
    all.push(after);
  }
  return all;
}

// Seconds and bytes a second: NVLink 4 within a node, the same numbers as labs/cost/presets.toml.
const NEAR = { latency: 0.6e-6, bandwidth: 450e9 }, FAR_LATENCY = 5e-6;
const LAUNCH = 3e-6, MEMORY = 3.35e12; // of a round; of an H100
const SIZES = {
  "one head of 64, float32": { kv: 1, q: 1, dim: 64, cache: 4 },
  "a layer of Llama 3.1 8B, bfloat16": { kv: 8, q: 32, dim: 128, cache: 2 },
};

/** Rounds of messages {from, to, begin, arrives}. A message leaves when its sender has what it sends
 * and its link is free; it keeps the link while its bytes pass, and is there a latency later. */
function timed(rounds, bytes, { devices, pernode, between }, wait) {
  const ready = Array(devices).fill(0), free = new Map();
  const found = rounds.map((pairs, k) => {
    const before = [...ready], messages = pairs.map(([from, to]) => {
      const near = Math.floor(from / pernode) === Math.floor(to / pernode);
      const { latency, bandwidth } = near ? NEAR : { latency: FAR_LATENCY, bandwidth: between * 1e9 };
      const ports = [`${from} ${near} out`, `${to} ${near} in`];
      const begin = Math.max(before[from], ...ports.map((port) => free.get(port) ?? 0));
      const passed = begin + bytes / bandwidth;
      for (const port of ports) free.set(port, passed);
      ready[to] = Math.max(ready[to], passed + latency);
      return { from, to, begin: begin + wait(k), arrives: passed + latency + wait(k) };
    });
    return { messages, end: Math.max(...ready) + wait(k) };
  });
  const sent = largest(range(devices).map((r) => bytes * sum(found.map(({ messages }) =>
    messages.filter(({ from }) => from === r).length))));
  return { rounds: found, bytes, sent, end: found.at(-1).end };
}

/** The tree and the ring of these settings; `costs` adds launches and the reading of the keys. */
function race({ context, devices, pernode, between, queries, size, costs }) {
  const { kv, q, dim, cache } = SIZES[size];
  const shard = 2 * Math.ceil(context / devices) * kv * dim * cache, state = queries * q * (dim + 2) * 4;
  const launch = costs ? LAUNCH : 0, read = costs ? shard / MEMORY : 0, network = { devices, pernode, between };
  const tree = timed(butterfly(devices), state, network, (k) => read + (k + 1) * launch);
  const around = timed(ring(devices), shard, network, (k) => (k + 1) * (read + launch));
  around.end += read; // the shard that came last
  return { tree, ring: around, end: Math.max(tree.end, around.end) };
}
