// ---- the energy of a few keys, its slope and its dual (treeattn/idea/energy.py) ----

const { words, scores, values, hull } = data;
const dot = (x, y) => x[0] * y[0] + x[1] * y[1];
const plus = (x, y, times = 1) => [x[0] + times * y[0], x[1] + times * y[1]];
const size = (x) => Math.hypot(...x);
const sum = (numbers) => numbers.reduce((x, y) => x + y, 0);

/** F(ζ), the scores and weights that ζ tilts, and their mean and covariance: F's derivatives. */
function energyAt(zeta) {
  const tilted = scores.map((s, a) => s + dot(zeta, values[a]));
  const most = Math.max(...tilted);
  const terms = tilted.map((s) => Math.exp(s - most));
  const weights = terms.map((term) => term / sum(terms));
  const z = [0, 1].map((A) => sum(weights.map((w, a) => w * values[a][A])));
  const spread = (A, B) => sum(weights.map((w, a) => w * (values[a][A] - z[A]) * (values[a][B] - z[B])));
  const covariance = [spread(0, 0), spread(0, 1), spread(1, 1)];
  return { energy: most + Math.log(sum(terms)), tilted, weights, z, covariance };
}

/** The source whose cross is z, a point inside the hull: Newton's steps, none longer than 1. */
function bestSource(z) {
  const height = (zeta) => dot(zeta, z) - energyAt(zeta).energy;
  let zeta = [0, 0];
  for (let i = 0; i < 100; i += 1) {
    const { z: here, covariance: [xx, xy, yy] } = energyAt(zeta);
    const [x, y] = plus(z, here, -1), determinant = xx * yy - xy * xy;
    const newton = [(yy * x - xy * y) / determinant, (xx * y - xy * x) / determinant];
    let part = 1 / Math.max(1, size(newton));
    while (part * size(newton) > 1e-3 && height(plus(zeta, newton, part)) < height(zeta)) part /= 2;
    zeta = plus(zeta, newton, part);
    if (part * size(newton) < 1e-13) break;
  }
  return zeta;
}

/** Where z lies: inside, on an edge, at a corner or outside; the hull's nearest point, and which
 * way leads out of the hull. An edge is two keys and the second one's share. */
function placeOf(z) {
  const edges = hull.map((a, i) => {
    const b = hull[(i + 1) % hull.length], along = plus(values[b], values[a], -1);
    const [length, from] = [size(along), plus(z, values[a], -1)];
    const share = Math.max(0, Math.min(1, dot(from, along) / length ** 2));
    const near = plus(values[a], along, share), out = [along[1] / length, -along[0] / length];
    return { a, b, along, share, near, out, gap: size(plus(z, near, -1)), beyond: dot(from, out) };
  });
  const nearest = edges.reduce((x, y) => (y.gap < x.gap ? y : x));
  const { near, gap, share, a, b } = nearest;
  if (gap > 1e-9) {
    const outside = edges.some(({ beyond }) => beyond > 0);
    const out = plus(z, near, -1).map((x) => x / gap);
    return { kind: outside ? "outside" : "inside", near, gap, out };
  }
  if (share > 1e-9 && share < 1 - 1e-9) return { ...nearest, kind: "edge" };
  const corner = share < 0.5 ? a : b, meeting = edges.filter((e) => e.a === corner || e.b === corner);
  const both = plus(meeting[0].out, meeting[1].out);
  return { kind: "corner", corner, near, gap, out: both.map((x) => x / size(both)) };
}

/** F*(z), the weights with this mean, and the source if there is one; if not, the far sources
 * `from` + t · `out` that come ever closer. */
function dualAt(z) {
  const place = placeOf(z);
  if (place.kind === "inside") {
    const zeta = bestSource(z), { energy, weights } = energyAt(zeta);
    return { ...place, z, zeta, weights, height: dot(zeta, z) - energy };
  }
  if (place.kind === "outside") return { ...place, z, from: [0, 0], weights: null, height: Infinity };
  const weights = words.map(() => 0);
  if (place.kind === "corner") {
    weights[place.corner] = 1;
    return { ...place, z, from: [0, 0], weights, height: -scores[place.corner] };
  }
  const { a, b, along, share } = place; // every value is a corner: an edge has two keys
  [weights[a], weights[b]] = [1 - share, share];
  const tilt = Math.log(share / (1 - share)) - scores[b] + scores[a];
  const from = along.map((x) => (x * tilt) / size(along) ** 2);
  const height = sum([a, b].map((i) => weights[i] * (Math.log(weights[i]) - scores[i])));
  return { ...place, z, from, weights, height };
}

// ---- merges: a mass, kept as its logarithm, and where its centre is (treeattn/idea/state.py) ----

/** The point of b's share of the way from a to b, with both masses. */
function merge(a, b) {
  const most = Math.max(a.lse, b.lse);
  const lse = most + Math.log(Math.exp(a.lse - most) + Math.exp(b.lse - most));
  const gate = Math.exp(b.lse - lse);
  const out = plus(a.out, plus(b.out, a.out, -1), gate);
  return { keys: [...a.keys, ...b.keys], lse, out, gate, parts: [a, b] };
}

// A node is a word, or 5 plus the number of a merge; an order is a list of pairs of nodes.
const ORDERS = {
  chain: [[0, 1], [5, 2], [6, 3], [7, 4]],
  tree: [[0, 1], [2, 3], [5, 6], [7, 4]],
  odd: [[1, 4], [0, 3], [5, 2], [6, 7]],
};

/** The words as masses that a source has pushed, and after them what these pairs become. */
function nodesAfter(pairs, zeta) {
  const { tilted } = energyAt(zeta);
  const nodes = words.map((_, a) => ({ keys: [a], lse: tilted[a], out: values[a] }));
  for (const [a, b] of pairs) nodes.push(merge(nodes[a], nodes[b]));
  return nodes;
}
