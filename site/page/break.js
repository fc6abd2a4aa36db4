// ---- the same states, merged with a fault ----

/** The last out and lse, and each device's share of that out: outs that tell the devices apart
 * are merged beside the real ones. */
function mergedBy({ merge: join = sound, sent = (part) => part }) {
  const p = now.devices, nodes = nodesAfter(0).map(({ state }, r) => {
    const { out, lse } = finalize(state);
    return sent({ out: [...out, ...range(p).map((i) => (i === r && lse > -Infinity ? 1 : 0))], lse });
  });
  for (const [a, b] of treePairs(p)) nodes.push(join(nodes[a], nodes[b]));
  const { out, lse } = nodes.at(-1), length = head().values[0].length;
  return { out: out.slice(0, length), shares: out.slice(length), lse };
}

function drawBroken() {
  const fault = data.faults.find(({ id }) => id === byId("fault").value), svg = byId("broken");
  const [right, broken] = [mergedBy({}), mergedBy(FAULTS[fault.id])], at = drawTokens(svg, 300);
  const gap = largest(right.out.map((v, j) => v - broken.out[j])), lost = Number.isNaN(gap);
  nameTokens(svg, at, 300);
  if (!lost && gap > 1e-9) {
    const to = at(broken.out).map((x, A) => Math.max(12, Math.min([468, 288][A], x)));
    add(svg, "path", { class: "segment off", d: line([at(right.out), to]) });
    drawCross(svg, to, "off");
  }
  drawCross(svg, at(right.out));
  svg.setAttribute("aria-label", "The cross is where it should be; the red one, where the fault puts it.");
  say("fault", fault.about);
  const named = fault.fingerprints.map(([name]) => name).join(", ");
  const moved = lost ? "Every number of the output is NaN." : gap < 1e-5 ? "Here, nothing moves."
    : `The output moves by up to ${number(gap, 2)}; its largest number is ${number(largest(right.out), 2)}.`;
  say("moved", `${moved} The suite’s check_merge fails it in ${fault.failed} of ${fault.asked} questions${named ? `, and names it: ${named}` : ""}.`);
  const body = byId("shares").tBodies[0];
  body.replaceChildren();
  range(now.devices).forEach((r) => {
    const row = add(body, "tr"), mine = owner.flatMap((o, i) => (o === r ? [head().words[i]] : [])).join("").trim();
    add(row, "th", { scope: "row" }, mine || "no keys");
    const bar = add(add(row, "td"), "div", { class: "bar" }), wide = (x) => Math.max(0, Math.min(100, 100 * (x || 0))).toFixed(2);
    add(bar, "i", { style: `width: ${wide(broken.shares[r])}%` });
    add(bar, "b", { style: `left: ${wide(right.shares[r])}%` });
    add(row, "td", {}, `${percent(right.shares[r])} → ${Number.isNaN(broken.shares[r]) ? "NaN" : percent(broken.shares[r])}`);
  });
}

function beginBreak() {
  for (const { id, name } of data.faults) add(byId("fault"), "option", { value: id }, name);
  byId("fault").value = "sum";
  byId("fault").addEventListener("input", drawBroken);
  uses("break", ["head", "deal", "devices"], drawBroken);
}
