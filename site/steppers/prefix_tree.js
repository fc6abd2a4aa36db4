// ---- a trie, node by node (treeattn/trees/beam.py computes the same from arrays) ----

const MOST_LINES = 12, MOST_WORDS = 10;

/** {rows, note}: the candidates of a text, and what of it was left out. */
function parse(text) {
  const lines = text.split("\n").map((line) => line.trim().split(/\s+/).filter(Boolean));
  const rows = lines.filter((words) => words.length), notes = [];
  if (rows.length > MOST_LINES) notes.push(`only the first ${MOST_LINES} candidates are used`);
  if (rows.some((words) => words.length > MOST_WORDS)) {
    notes.push(`only the first ${MOST_WORDS} words of a candidate are used`);
  }
  const used = rows.slice(0, MOST_LINES).map((words) => words.slice(0, MOST_WORDS));
  return { rows: used, note: notes.join("; ") };
}

/** Nodes in the order of the packed row, and for each candidate the node of each of its words. */
function pack(rows) {
  const nodes = [], width = Math.max(0, ...rows.map((words) => words.length));
  const map = rows.map((words, row) => {
    let parent = -1;
    return words.map((word, offset) => {
      let node = nodes.findIndex((n) => n.parent === parent && n.word === word);
      if (node < 0) {
        const path = parent < 0 ? [] : nodes[parent].path;
        node = nodes.length;
        nodes.push({ word, row, offset, parent, path: [...path, node], taken: row * width + offset });
      }
      parent = node;
      return node;
    });
  });
  return { nodes, map, width };
}

// ---- drawing ----

let rows = [], packed = pack([]), current = -1;

/** "current", "path" or nothing: what node i is to the chosen one. */
function role(i) {
  if (i === current) return "current";
  return current >= 0 && packed.nodes[current].path.includes(i) ? "path" : "";
}

function drawTree() {
  const { nodes } = packed, holder = byId("tree");
  const rowHeight = 38, widths = [], lefts = [1]; // a column is as wide as its longest word
  for (const { word, offset } of nodes) {
    widths[offset] = Math.max(widths[offset] ?? 0, Math.min(130, 32 + 7 * word.length));
  }
  widths.forEach((w, c) => lefts.push(lefts[c] + w + 20));
  const lines = new Map(); // a candidate's new nodes stand in one line of their own
  nodes.forEach(({ row }) => lines.has(row) || lines.set(row, lines.size));
  const where = ({ row, offset }) => [lefts[offset], lines.get(row) * rowHeight + 4];
  holder.replaceChildren();
  const label = `${plural(nodes.length, "node")} of ${plural(rows.length, "candidate")}: ` +
    nodes.map(({ word, parent }, i) => `${i} ${word}${parent < 0 ? "" : ` under ${parent}`}`).join(", ");
  const size = { width: lefts.at(-1), height: Math.max(1, lines.size) * rowHeight + 6 };
  const svg = add(holder, "svg", { ...size, role: "img", "aria-label": label });
  for (const [i, node] of nodes.entries()) {
    if (node.parent < 0) continue;
    const [x, y] = where(node), [px, py] = where(nodes[node.parent]), middle = x - 10;
    const d = `M${px + widths[node.offset - 1]} ${py + 14}H${middle}V${y + 14}H${x}`;
    add(svg, "path", { class: `edge ${role(i) && "path"}`, d });
  }
  for (const [i, node] of nodes.entries()) {
    const [x, y] = where(node), boxWidth = widths[node.offset];
    const group = add(svg, "g", { "data-node": i, class: role(i) });
    add(group, "rect", { class: "node", x, y, width: boxWidth, height: 28, rx: 5 });
    add(group, "text", { class: "quiet", x: x + 5, y: y + 18, "font-size": 10 }, i);
    add(group, "text", { x: x + 22, y: y + 18, "font-size": 12 }, cut(node.word, boxWidth - 20));
    add(group, "title", {}, `node ${i}: ${node.word}`);
  }
}

/** A table anew: the nodes' words as heads, and rows of a name and [text, node, further class]. */
function drawGrid(id, heads, lines) {
  const table = byId(id);
  table.replaceChildren();
  if (heads.length) {
    addHeads(table, ["", ...heads]).slice(1).forEach((cell, node) => {
      cell.dataset.node = node;
      cell.className = role(node);
    });
  }
  const body = add(table, "tbody");
  for (const [name, cells] of lines) {
    const row = add(body, "tr");
    add(row, "th", { scope: "row" }, name);
    for (const [text, node, kind] of cells) {
      const mark = node === null ? { class: kind } : { "data-node": node, class: `${role(node)} ${kind}` };
      add(row, "td", mark, text);
    }
  }
}

function drawTables() {
  const { nodes, map, width } = packed, numbers = nodes.map((_, i) => i);
  const line = (name, of) => [name, nodes.map((node, i) => [of(node, i), i, ""])];
  drawGrid("packed", [], [
    line("node", (_, i) => i), line("token", ({ word }) => word),
    line("position", ({ offset }) => offset), line("taken from", ({ taken }) => taken),
  ]);
  byId("mask").classList.toggle("large", nodes.length > 30);
  drawGrid("mask", nodes.map(({ word }) => cut(word, 60)),
    nodes.map(({ word, path }, i) => [`${i} ${cut(word, 60)}`, numbers.map((j) => {
      const sees = path.includes(j), chosen = i === current ? (sees ? "path on" : "") : "";
      return [sees ? "●" : "", null, `${sees ? "on" : ""} ${chosen}`];
    })]));
  const beam = (of) => rows.map((words, m) => [words.join(" ").slice(0, 24),
    Array.from({ length: width }, (_, c) => c < words.length ? of(m, c) : ["·", null, "pad"])]);
  drawGrid("unpack", [], beam((m, c) => [map[m][c], map[m][c], ""]));
  drawGrid("encoding", [], beam((m, c) => [nodes[map[m][c]].row, map[m][c], ""]));
}

function describe() {
  const { nodes } = packed, words = rows.reduce((n, row) => n + row.length, 0);
  byId("start").disabled = byId("back").disabled = current < 0;
  byId("next").disabled = current === nodes.length - 1;
  if (current < 0) {
    byId("step-title").textContent = nodes.length
      ? `${plural(words, "token")} in ${plural(rows.length, "candidate")}: ${plural(nodes.length, "node")}`
      : "No candidates, no nodes";
    byId("step-text").textContent = nodes.length
      ? `The model reads ${whole(nodes.length)} of ${whole(words)} tokens. Step through the nodes to ` +
        "see where each comes from, what it sees and where it goes."
      : "Type a candidate above.";
    return;
  }
  const { word, row, offset, path } = nodes[current];
  const seen = path.map((i) => nodes[i].word).join(" ");
  const places = packed.map.flatMap((line, m) => line.includes(current) ? [m] : []);
  byId("step-title").textContent = `Node ${current} of ${nodes.length}: “${word}”`;
  byId("step-text").textContent = `Candidate ${row} is the first with the prefix “${seen}”: the node ` +
    `attends to ${plural(path.length, "node")}, itself included, at position ${offset}. Unpacked, it is ` +
    `token ${offset} of candidate${places.length > 1 ? "s" : ""} ${places.join(", ")}.`;
}

function show() {
  drawTree();
  drawTables();
  describe();
  toAddress({ lines: rows.map((words) => words.join(" ")).join("\n"), node: current });
}

// ---- what the reader does ----

function goTo(node) {
  current = Math.max(-1, Math.min(packed.nodes.length - 1, node));
  if (current === packed.nodes.length - 1) stop();
  show();
}

function play() {
  if (timer) return stop();
  if (current === packed.nodes.length - 1) goTo(-1);
  start(() => goTo(current + 1), 1200);
}

function read() {
  stop();
  const parsed = parse(byId("lines").value);
  rows = parsed.rows;
  packed = pack(rows);
  byId("note").textContent = parsed.note && `Note: ${parsed.note}.`;
  goTo(-1);
}

function begin() {
  const wanted = fromAddress(), lines = byId("lines");
  data.examples.forEach(({ name }, i) => add(byId("example"), "option", { value: i }, name));
  add(byId("example"), "option", { value: "" }, "what you type");
  const fill = () => {
    if (!byId("example").value) return lines.focus();
    lines.value = data.examples[byId("example").value].lines.join("\n");
    read();
  };
  byId("example").addEventListener("input", fill);
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  lines.addEventListener("input", () => {
    byId("example").value = "";
    read();
  });
  const actions = { start: () => goTo(-1), back: () => goTo(current - 1),
    next: () => goTo(current + 1), play };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  onKeys({ ArrowRight: actions.next, ArrowLeft: actions.back, Home: actions.start,
    End: () => goTo(Infinity) });
  document.addEventListener("click", ({ target }) => {
    const chosen = target.closest("[data-node]");
    if (chosen) goTo(Number(chosen.dataset.node));
  });
  if (wanted.has("lines")) {
    lines.value = wanted.get("lines");
    byId("example").value = "";
    read();
    goTo(Number(wanted.get("node") ?? -1));
  } else fill();
}

begin();
