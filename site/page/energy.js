// ---- the energy of five words, and its slope ----

const { words, scores, values, hull } = data.sentence;
const dot = (x, y) => x[0] * y[0] + x[1] * y[1];
const plus = (x, y, times = 1) => [x[0] + times * y[0], x[1] + times * y[1]];
const size = (x) => Math.hypot(...x);

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

/** The push whose cross is z, a point inside the hull: Newton's steps, none longer than 1. */
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

/** How far inside the hull z is; negative is outside. */
function depthOf(z) {
  return Math.min(...hull.map((a, i) => {
    const way = plus(values[hull[(i + 1) % hull.length]], values[a], -1);
    return dot(plus(z, values[a], -1), [-way[1], way[0]]) / size(way);
  }));
}
