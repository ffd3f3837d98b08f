// The picture of a fault: each rank's actions in order, run as far as they can, and a cycle as numbered arrows.
// `picture` in playground.py says what is in it; all of it becomes text and attributes, never markup.
window.pipelabOrder = (picture) => {
  const NAMESPACE = "http://www.w3.org/2000/svg",
    HIGH = 26,
    LEFT = 62,
    SKIP = 18;
  const svg = (name, attributes = {}, text = null) => {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    return made;
  };
  const tag = (name, text, className = "") =>
    Object.assign(document.createElement(name), { textContent: text, className });

  const { rows, columns, arrows } = picture,
    cells = rows.flatMap((row) => row.cells).filter(Boolean);
  const width = Math.max(40, ...cells.flatMap((cell) => cell.names.map((name) => 14 + 7.5 * name.length)));
  const gap = arrows.length ? 44 : 8,
    left = new Map(),
    top = new Map();
  let x = LEFT;
  columns.forEach((column, at) => {
    if (column !== (at ? columns[at - 1] + 1 : 0)) x += SKIP;
    left.set(column, x);
    x += width;
  });
  rows.forEach((row, at) => top.set(row.rank, 22 + gap / 2 + at * (HIGH + gap)));
  const high = 22 + rows.length * (HIGH + gap) + gap / 2;
  const root = svg("svg", {
    width: x + 16,
    height: high,
    viewBox: `0 0 ${x + 16} ${high}`,
    role: "img",
    "aria-label": picture.title,
  });

  columns.forEach((column, at) => {
    root.append(svg("text", { x: left.get(column) + width / 2, y: 12, class: "pg-soft" }, column));
    if (column === (at ? columns[at - 1] + 1 : 0)) return;
    for (const row of rows)
      if (row.cells[at])
        root.append(svg("text", { x: left.get(column) - SKIP / 2, y: top.get(row.rank) + HIGH / 2 }, "…"));
  });
  for (const row of rows) {
    const y = top.get(row.rank);
    root.append(svg("text", { x: LEFT - 10, y: y + HIGH / 2, class: "pg-name" }, row.name));
    row.cells.forEach((cell, at) => cell && drawCell(cell, left.get(columns[at]), y));
  }
  for (const arrow of arrows) drawArrow(...arrow);

  function drawCell(cell, cx, y) {
    const group = svg("g", { "data-cell": cell.names.join("&"), "data-state": [cell.state, ...cell.marks].join(" ") });
    const parts = Math.max(cell.fills.length, 1),
      part = HIGH / parts,
      missing = cell.state === "missing";
    const fills = missing ? [] : cell.fills.length ? cell.fills : ["#c9c9c9"];
    fills.forEach((fill, at) =>
      group.append(
        svg("rect", {
          x: cx + 1,
          y: y + at * part,
          width: width - 2,
          height: part,
          fill,
          opacity: cell.state === "waiting" ? 0.25 : 1,
        }),
      ),
    );
    const frame = cell.marks.includes("over")
      ? "over"
      : cell.marks.includes("moved")
        ? "moved"
        : /blocked|missing/.test(cell.state)
          ? cell.state
          : "";
    if (frame)
      group.append(svg("rect", { x: cx + 2, y: y + 1, width: width - 4, height: HIGH - 2, class: `pg-${frame}` }));
    cell.names.forEach((name, at) => {
      const text = svg("text", { x: cx + width / 2, y: y + (HIGH * (at + 0.5)) / cell.names.length }, name);
      if (missing) text.setAttribute("class", "pg-red");
      else if (cell.state !== "waiting") text.style.fill = cell.inks[at] ?? "#000000";
      if (cell.names.length > 1) text.style.fontSize = "10px";
      group.append(text);
    });
    if (cell.marks.includes("struck"))
      group.append(svg("line", { x1: cx + 3, y1: y + 3, x2: cx + width - 3, y2: y + HIGH - 3, class: "pg-blocked" }));
    root.append(group);
  }

  // A step of a cycle: beside its row if it stays there, else from one row to the other.
  function drawArrow(rank, column, other, end, number) {
    if (![top.get(rank), top.get(other), left.get(column), left.get(end)].every((each) => each !== undefined)) return;
    let x1 = left.get(column) + width / 2,
      x2 = left.get(end) + width / 2,
      y1 = top.get(rank),
      y2 = top.get(other),
      bx,
      by;
    if (rank === other) {
      const ranks = arrows.map((each) => each[0]),
        way = Math.sign(x2 - x1) || 1,
        alone = new Set(ranks).size === 1, // two arrows between the same cells: one over them, one under
        over = alone ? way > 0 : rank === Math.min(...ranks);
      x1 += (way * width) / 8;
      x2 -= (way * width) / 8;
      y1 = y2 = y1 + (over ? 0 : HIGH);
      bx = (x1 + x2) / 2;
      by = y1 + (over ? -1 : 1) * gap * 0.85;
    } else {
      const down = other > rank;
      y1 += down ? HIGH : 0;
      y2 += down ? 0 : HIGH;
      x1 += width / 8;
      x2 -= width / 8;
      bx = (x1 + x2) / 2 - 0.12 * (y2 - y1);
      by = (y1 + y2) / 2 + 0.12 * (x2 - x1);
    }
    const at = rank === other ? 0.5 : 0.28,
      on = (a, b, c) => (1 - at) ** 2 * a + 2 * at * (1 - at) * b + at ** 2 * c;
    const angle = Math.atan2(y2 - by, x2 - bx),
      head = (turn) => `${x2 - 9 * Math.cos(angle + turn)} ${y2 - 9 * Math.sin(angle + turn)}`;
    root.append(
      svg("path", { d: `M${x1} ${y1}Q${bx} ${by} ${x2} ${y2}`, class: "pg-arrow", "data-arrow": number }),
      svg("path", { d: `M${x2} ${y2}L${head(0.45)}L${head(-0.45)}z`, class: "pg-head" }),
      svg("circle", { cx: on(x1, bx, x2), cy: on(y1, by, y2), r: 8, class: "pg-badge" }),
      svg("text", { x: on(x1, bx, x2), y: on(y1, by, y2), class: "pg-red" }, number),
    );
  }

  const section = tag("section", "", `pg-order ${picture.kind}`),
    scroll = tag("div", "", "pg-scroll");
  scroll.tabIndex = 0;
  scroll.append(root);
  section.append(tag("h3", picture.title), scroll);
  if (picture.notes.length) {
    const list = tag("ol", "");
    for (const [number, words] of picture.notes) {
      const item = tag("li", words);
      if (number) item.value = number;
      else item.style.listStyle = "none";
      list.append(item);
    }
    section.append(list);
  }
  if (picture.hint) section.append(tag("p", `try: ${picture.hint}`, "pg-try"));
  section.append(tag("p", picture.key.join("; "), "pg-key"));
  return section;
};
