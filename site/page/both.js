// ---- a cut between the cache and the guesses; and many queries, for which the ring is better ----

knob("cut", range(LAST), 8, "words in the cache", (n) => `the first ${plural(n, "word")}`);

function drawJoint() {
  const svg = byId("joint"), at = drawTokens(svg, 380), right = dense(), p = now.devices;
  const leaves = range(p).map((r) => stateOf(range(now.cut).filter((i) => i % p === r)));
  const cache = statesAlong(butterfly(p), leaves).at(-1)[0].state, guesses = stateOf(range(LAST).slice(now.cut));
  const joined = finalize(merge(cache, guesses)), gap = apart(joined, right);
  if (now.cut) {
    add(svg, "path", { class: "segment", d: line([cache, guesses].map((state) => at(finalize(state).out))) });
    drawMass(svg, at, cache, "var(--tree)");
  }
  drawMass(svg, at, guesses, "var(--warm)");
  nameTokens(svg, at, 380);
  drawCross(svg, at(joined.out));
  svg.setAttribute("aria-label", "Two masses, of the cache and of the guesses, and the cross between them.");
  fillWords(byId("cut-words"), "span", (i) => (i < now.cut ? colour(i % p) : "var(--warm)"));
  say("joined", `The cache has ${percent(shareOf(cache))} of the weight, the guesses ${percent(shareOf(guesses))}. ` +
    `Merged, they are one softmax, to ${written(gap)}.`);
}

const QUERIES = KNOBS.queries.values;
function drawRace() {
  const [context, width] = sheet(byId("race-view"), 330), [left, right, top, bottom] = [54, width - 16, 24, 290];
  const found = QUERIES.map((queries) => race({ ...now, queries })), ends = found.flatMap(({ tree, ring }) => [tree.end, ring.end]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)].map(Math.log10);
  const x = (i) => left + ((right - left) * i) / (QUERIES.length - 1);
  const y = (t) => bottom - ((bottom - top) * (Math.log10(t) - low)) / Math.max(0.5, high - low);
  for (let power = Math.ceil(low); power <= high; power += 1) {
    text(context, time(10 ** power), left - 6, y(10 ** power) + 4, "soft", "right");
    context.fillStyle = ink("line");
    context.fillRect(left, y(10 ** power), right - left, 1);
  }
  for (const i of width > 450 ? [0, 5, 10, 15, 20] : [0, 10, 20]) text(context, whole(QUERIES[i]), x(i), 308, "soft", i ? (i === 20 ? "right" : "center") : "left");
  text(context, "queries at once", (left + right) / 2, 326, "soft", "center");
  const here = QUERIES.indexOf(now.queries);
  context.fillStyle = ink("ink");
  context.fillRect(x(here) - 1, top - 8, 2, bottom - top + 8);
  for (const name of ["ring", "tree"]) {
    context.beginPath();
    found.forEach((race, i) => context.lineTo(x(i), y(race[name].end)));
    context.strokeStyle = context.fillStyle = ink(name);
    context.lineWidth = 3;
    context.stroke();
    context.beginPath();
    context.arc(x(here), y(found[here][name].end), 7, 0, 7);
    context.fill();
    text(context, `${name}: ${time(found[here][name].end)}`, left + 12, y(found[0][name].end) - 10, name);
  }
  const wins = found.findIndex(({ tree, ring }) => ring.end < tree.end);
  say("wins", wins < 0 ? "Here the tree is the faster one for any of these." : `From ${whole(QUERIES[wins])} queries on, the ring wins.`);
  set(byId("race"), { "aria-valuemax": QUERIES.length - 1, "aria-valuenow": here, "aria-valuetext": queriesText(now.queries) });
}

function beginBoth() {
  uses("both", ["head", "devices", "cut"], drawJoint);
  const box = byId("race");
  const follow = ({ clientX }) => {
    const { left, width } = box.getBoundingClientRect();
    turn("queries", Math.round((20 * (clientX - left - 54)) / (width - 70)));
  };
  draggable(box, (event) => { follow(event); return true; }, follow);
  box.addEventListener("keydown", (event) => {
    if (!pressed(event)) return;
    event.preventDefault();
    turn("queries", placeOf("queries") + pressed(event));
  });
  uses("loses", ["queries", "context", "devices", "pernode", "between", "size", "costs"], drawRace);
}
