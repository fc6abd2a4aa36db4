// ---- a draft's tree, and the model's own choices, which walk down it ----

knob("prompt", range(data.trees.length), 1, "a text", (i) => `“${data.trees[i].prompt}”`);
knob("budget", range(25), 10, "nodes of the draft", (n) => plural(n, "node"));
knob("blur", range(17).map((i) => i / 4), 1, "noise of the draft", (x) => number(x, 2));
knob("draw", range(40).map((i) => i + 1), 4, "a draw of the noise", (n) => `draw ${n}`);

/** A fraction from two whole numbers, the same for ever (a hash by multiplications). */
function chance(a, b) {
  let x = Math.imul(a + 0x9e3779b9, 0x85ebca6b) ^ Math.imul(b + 0x7f4a7c15, 0xc2b2ae35);
  x = Math.imul(x ^ (x >>> 15), 0x2c1b3c6d);
  x = Math.imul(x ^ (x >>> 12), 0x297a2d39);
  return ((x ^ (x >>> 15)) >>> 0) / 2 ** 32 + 2 ** -33;
}
const normal = (a, b) => Math.sqrt(-2 * Math.log(chance(a, 2 * b))) * Math.cos(2 * Math.PI * chance(a, 2 * b + 1));

/** The nodes that a draft keeps: the likeliest next to those kept before, as its blurred eyes see them. */
function drafted(nodes, budget, blur, draw) {
  const kept = new Set([0]), score = [0];
  nodes.forEach(({ parent, log }, i) => { if (i) score[i] = score[parent] + log + blur * normal(draw, i); });
  while (kept.size <= budget) {
    const open = range(nodes.length).filter((i) => !kept.has(i) && kept.has(nodes[i].parent));
    if (!open.length) break;
    kept.add(open.reduce((x, i) => (score[i] > score[x] ? i : x)));
  }
  return kept;
}

/** The nodes of the walk along the model's choices, and what it writes: one token more than it accepts. */
function accepted(nodes, kept) {
  const walk = [0], text = [];
  for (;;) {
    const { best, said } = nodes[walk.at(-1)];
    text.push(said);
    if (best < 0 || !kept.has(best)) return { walk, text };
    walk.push(best);
  }
}

const shownWord = (word) => word.trim() || word.replace(/\n/g, "⏎").replace(/ /g, "␣");
function drawDrafted() {
  const { nodes } = data.trees[now.prompt], kept = drafted(nodes, now.budget, now.blur, now.draw);
  const { walk, text } = accepted(nodes, kept), next = nodes[walk.at(-1)].best;
  const shown = range(nodes.length).filter((i) => kept.has(i) || i === next), place = new Map(shown.map((i, k) => [i, k]));
  const tree = shown.map((i) => ({ ...nodes[i], word: shownWord(nodes[i].word), parent: i ? place.get(nodes[i].parent) : -1 }));
  drawTree(byId("drafted"), tree, (k) => (walk.includes(shown[k]) ? "on" : kept.has(shown[k]) ? "" : "out"), 38);
  byId("drafted").setAttribute("aria-label", `${plural(kept.size - 1, "node")} drafted; written: ${text.join("")}`);
  const many = range(200).map((i) => accepted(nodes, drafted(nodes, now.budget, now.blur, i + 1)).text.length);
  say("accepted", `This pass writes ${plural(text.length, "token")}: “${text.map(shownWord).join(" ")}”. ` +
    `Over 200 draws, ${number(sum(many) / 200, 2)} tokens a pass.`);
}
function beginVerify() {
  uses("verify", ["prompt", "budget", "blur", "draw"], drawDrafted);
}
