// ---- guesses as a tree: a node is its prefix ----

/** Nodes in the order of the packed row, and for each guess the node of each of its words. */
function pack(rows) {
  const nodes = [], map = rows.map((words) => {
    let parent = -1;
    return words.map((word, depth) => {
      let node = nodes.findIndex((n) => n.parent === parent && n.word === word);
      if (node < 0) node = nodes.push({ word, depth, parent, path: [...(nodes[parent]?.path ?? []), nodes.length] }) - 1;
      return (parent = node);
    });
  });
  return { nodes, map };
}

let rows = [], packed = pack([]);
knob("guesses", range(12).map((i) => i + 1), 12, "guesses that are kept", (n) => `in ${rows.length ? plural(Math.min(n, rows.length), "way") : "no way yet"}`);
knob("node", range(64), 4, "a node", (n) => `node ${Math.min(n, packed.nodes.length - 1)}`);

const cut = (word, most) => (word.length <= most ? word : `${word.slice(0, most - 1)}…`);

/** The size of a drawing: larger where its place has room, up to one and a half times. */
function enlarged(svg, width, height) {
  const room = svg.parentNode.clientWidth / width, times = Math.max(1, Math.min(1.5, room));
  svg.parentNode.classList.toggle("cut", room < 1);
  return { width: times * width, height: times * height, viewBox: `0 0 ${width} ${height}` };
}

/** A tree of {word, parent, depth}: `mark(i)` says the classes of a node, and of the line to it. */
function drawTree(svg, nodes, mark, rowHeight = 42) {
  svg.replaceChildren();
  const widths = [], lefts = [1], heights = [];
  for (const { word, depth } of nodes) widths[depth] = Math.max(widths[depth] ?? 0, Math.min(130, 22 + 9 * word.length));
  widths.forEach((w, c) => lefts.push(lefts[c] + w + 22));
  let lines = 0;
  const place = (i) => { // leaves one below the other, a parent beside its first child
    const children = nodes.flatMap(({ parent }, j) => (parent === i ? [j] : []));
    children.forEach(place);
    heights[i] = children.length ? heights[children[0]] : 4 + rowHeight * lines++;
  };
  nodes.forEach(({ parent }, i) => parent < 0 && place(i));
  const [width, height] = [Math.max(40, lefts.at(-1) - 20), Math.max(1, lines) * rowHeight + 4];
  set(svg, { ...enlarged(svg, width, height), role: "img" });
  nodes.forEach(({ parent, depth }, i) => {
    if (parent < 0) return;
    const [x, y, from] = [lefts[depth], heights[i] + 15, lefts[depth - 1] + widths[depth - 1]];
    add(svg, "path", { class: `edge ${mark(i)}`, d: `M${from} ${heights[parent] + 15}H${x - 11}V${y}H${x}` });
  });
  nodes.forEach(({ word, depth }, i) => {
    const group = add(svg, "g", { "data-node": i, class: mark(i) });
    add(group, "rect", { class: "box", x: lefts[depth], y: heights[i], width: widths[depth], height: 30, rx: 5 });
    add(group, "text", { x: lefts[depth] + widths[depth] / 2, y: heights[i] + 20, "text-anchor": "middle", "font-size": 15 }, cut(word, 14));
  });
}

function drawMask(nodes, at) {
  const svg = byId("mask"), cell = Math.max(9, Math.min(28, 440 / nodes.length)), left = 84;
  const [width, height] = [left + cell * nodes.length, cell * Math.max(1, nodes.length)];
  svg.replaceChildren();
  set(svg, { ...enlarged(svg, width, height), role: "img",
    "aria-label": `a mask of ${plural(nodes.length, "row")}: each node sees its prefix` });
  nodes.forEach(({ word, path }, i) => {
    const row = add(svg, "g", { "data-node": i });
    add(row, "text", { x: left - 6, y: (i + 0.5) * cell + 4, "text-anchor": "end", "font-size": Math.min(14, cell + 1),
      "font-weight": i === at ? 700 : 400 }, cut(word, 10));
    nodes.forEach((_, j) => add(row, "rect", { x: left + j * cell, y: i * cell, width: cell - 1, height: cell - 1,
      class: path.includes(j) ? "sees" : "cell", opacity: path.includes(j) && i !== at ? 0.55 : 1 }));
  });
}

function drawPrefix() {
  packed = pack(rows.slice(0, now.guesses));
  const { nodes, map } = packed, at = Math.min(now.node, nodes.length - 1), path = nodes[at]?.path ?? [];
  drawTree(byId("tree"), nodes, (i) => (i === at ? "on at" : path.includes(i) ? "on" : ""));
  byId("tree").setAttribute("aria-label", `${plural(nodes.length, "node")}: ${nodes.map(({ word }) => word).join(" ")}`);
  drawMask(nodes, at);
  say("packed", `${plural(map.flat().length, "word")}, ${plural(nodes.length, "node")}`);
  byId("chosen").hidden = at < 0;
  say("node", at < 0 ? "" : `It is the prefix “${path.map((i) => nodes[i].word).join(" ")}”: it sees ${plural(path.length, "node")}, ` +
    `itself included, and stands at position ${path.length - 1}.`);
  ["guesses", "node"].forEach(showKnob);
}

function beginPrefix(wanted) {
  const lines = byId("lines"), example = byId("example");
  const read = () => {
    rows = lines.value.split("\n").map((row) => row.trim().split(/\s+/).filter(Boolean).slice(0, 10)).filter((row) => row.length).slice(0, 12);
    change("node", now.node);
  };
  data.examples.forEach(({ name }, i) => add(example, "option", { value: i }, name));
  add(example, "option", { value: "" }, "what you type");
  example.addEventListener("input", () => {
    if (!example.value) return lines.focus();
    lines.value = data.examples[example.value].lines.join("\n");
    read();
  });
  lines.addEventListener("input", () => { example.value = ""; read(); });
  if (wanted.has("lines")) example.value = "";
  lines.value = wanted.get("lines") ?? data.examples[0].lines.join("\n");
  kept.lines = () => (example.value === "" ? lines.value : "");
  for (const id of ["tree", "mask"]) {
    byId(id).addEventListener("pointerover", ({ target }) => {
      const node = target.closest("[data-node]");
      if (node) change("node", Number(node.dataset.node));
    });
  }
  read();
  uses("prefix", ["guesses", "node"], drawPrefix);
}
