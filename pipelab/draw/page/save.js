// Timelines on paper, and as files: SVG and PNG as on the screen. Tables and traces are saved from Python.
const BELOW = 44; // pixels below the lanes: ticks, their times, the unit
const HEADS = 62; // pixels for the names of ranks
const TITLE = 60; // pixels above each timeline of a picture: its name, its idea and its caption
const STYLE = [
  "text{font:12px system-ui,sans-serif}",
  ".label,.why,.axis-text{text-anchor:middle}",
  ".label,.why{dominant-baseline:central}",
  ".why,.held{font-size:11px}",
  ".axis-text.first{text-anchor:start}",
  ".thin{stroke:none}",
  ".arrow{fill:none;stroke-width:1.25}",
].join("");

// A whole timeline for paper, `width` pixels wide, in bands so long that a bar has room for its label.
function printed(line, width) {
  const { model } = line,
    sheets = tag("div", "", "print"),
    crowded = model.count > 4 * FEW;
  const bands = crowded ? 1 : Math.max(1, Math.ceil((line.span * 14) / (width * (model.typical || line.span))));
  for (let band = 0; band < bands; band += 1) {
    const view = still(line, { width, left: band * width, zoom: bands, crowded });
    const svg = element("svg", { viewBox: `${-HEADS} 0 ${width + HEADS + 10} ${view.height + BELOW}`, width: "100%" }),
      group = element("g");
    lay(view, svgPainter(group), 250);
    svg.append(group);
    sheets.append(svg);
  }
  return sheets;
}

// A timeline that shows something else than what is on the screen. Bars end at its edges.
function still(line, shown) {
  const all = { ...shown, cut: (x) => Math.min(Math.max(x, 0), shown.width) };
  return Object.create(line, Object.fromEntries(Object.entries(all).map(([name, value]) => [name, { value }])));
}

// Paint all that a timeline shows, with the names of its ranks and its axis; shares of time in so many columns.
function lay(view, painter, columns) {
  const { width } = view,
    from = view.left / view.scale,
    to = (view.left + width) / view.scale;
  if (!view.crowded) view.lanes(painter, from, to, width);
  for (const row of view.rows) {
    if (view.crowded || row.band) {
      painter.rect(
        { x: 0, y: row.at * view.pitch + view.strip + view.lane * 0.07, width, height: view.lane * 0.86 },
        "--idle",
        1,
        {},
      );
      view.shares(painter, row, from, to, columns);
    }
    painter.note(2 - HEADS, (row.at + 0.6) * view.pitch, row.head.firstChild.textContent, { class: "print-rank" });
  }
  // What starts where a band ends is in the next one, if there is one.
  const last = to > (1 - 1e-9) * view.span,
    y = view.height + 2;
  if (!view.crowded) view.bars(painter, view.ranges(from, to + (last ? 1e-9 : -1e-9) * view.span), width);
  if (view.strip) view.memory(painter);
  view.signs(painter);
  view.first(painter);
  painter.rect({ x: 0, y, width, height: 1 }, "--soft", 1, {});
  for (const [x, name] of view.ticks(from, to)) {
    painter.rect({ x: x - 0.5, y, width: 1, height: 5 }, "--soft", 1, {});
    if (x + name.length * 4 <= width) painter.note(x, y + 18, name, { class: `axis-text${x < 8 ? " first" : ""}` });
  }
  painter.note(0, y + 35, `time (${view.model.unit})`, { class: "axis-name" });
}

// Each timeline as it is shown: its view, and how far down the picture it begins.
function views() {
  let top = 0;
  return timelines.map((line) => {
    const view = still(line, { width: line.width, left: line.left, crowded: line.crowded });
    top += TITLE;
    const found = { view, top, width: line.width + HEADS + 10, height: line.height + BELOW + 18 };
    top += found.height;
    return found;
  });
}

// What stands above a timeline, and how far.
const headed = ({ title, idea, caption }) => Object.entries({ 43: title, 26: idea, 9: caption });

// The legend, beside the unit of time.
function named(painter, view) {
  let x = 110,
    y = view.height + 28;
  for (const { dataset, textContent: text } of document.querySelectorAll(".legend :is([data-paint], .mark)")) {
    const box = { width: 16, height: 11 },
      ground = { wait: { ground: "wait" }, idle: GAPS.fill ?? GAPS.drain, transfer: GAPS.transfer }[dataset.paint];
    if (x + wide(text) + 22 > view.width) [x, y] = [110, y + 18];
    if (ground) painter.gap({ x, y, ...box }, ground, {});
    else if (dataset.paint) painter.rect({ x, y, ...box }, dataset.paint, 1, {});
    painter.note(x + 22, y + 10, text, { class: "axis-name" });
    x += wide(text) + 40;
  }
}

function asSvg() {
  const all = views(),
    last = all[all.length - 1],
    width = Math.max(...all.map((each) => each.width)),
    height = last.top + last.height;
  const svg = element("svg", { viewBox: `${-HEADS} 0 ${width} ${height}`, width, height, role: "img" });
  svg.append(
    element("title", {}, document.title),
    element("desc", {}, all.map(({ view }) => `${view.model.title}: ${view.model.caption}`).join(" ")),
    element("style", {}, `.bar{stroke:${css("--edge")}}${STYLE}`),
    document.querySelector("#definitions defs").cloneNode(true),
  );
  svg.append(element("rect", { x: -HEADS, width, height, style: "fill:var(--paper)" }));
  for (const { view, top } of all) {
    const group = element("g", { transform: `translate(0 ${top})`, style: "fill:var(--text)" });
    for (const [up, text] of headed(view.model))
      group.append(element("text", { x: 2 - HEADS, y: -up }, text));
    lay(view, svgPainter(group), Math.round(view.width));
    named(svgPainter(group), view);
    svg.append(group);
  }
  // Outside of the page there are no variables.
  for (const each of svg.querySelectorAll("[style]"))
    each.setAttribute(
      "style",
      each.getAttribute("style").replace(/var\((--[\w-]+)\)/g, (_, name) => css(name)),
    );
  return new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" });
}

function asPng() {
  const all = views(),
    last = all[all.length - 1],
    canvas = tag("canvas"),
    context = canvas.getContext("2d");
  canvas.width = 2 * Math.max(...all.map((each) => each.width));
  canvas.height = 2 * (last.top + last.height);
  context.fillStyle = css("--paper");
  context.fillRect(0, 0, canvas.width, canvas.height);
  for (const { view, top, height } of all) {
    const pixels = new Pixels(tag("canvas")).begin(view.width + 10, height, HEADS, 2);
    lay(view, pixels, Math.round(2 * view.width));
    named(pixels, view);
    pixels.end();
    context.drawImage(pixels.canvas, 0, 2 * top);
    Object.assign(context, { font: "24px system-ui, sans-serif", fillStyle: css("--text") });
    for (const [up, text] of headed(view.model)) context.fillText(text, 4, 2 * (top - up));
  }
  return new Promise((done) => canvas.toBlob(done));
}

async function save(kind) {
  sized(1);
  const made = { svg: asSvg, png: asPng }[kind]();
  sized();
  const address = URL.createObjectURL(await made),
    anchor = tag("a");
  anchor.href = address;
  anchor.download = `${document.title.replace(/[^\w.-]+/g, "_").slice(0, 60)}.${kind}`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  closeMenu();
  saying.textContent = `saved as ${kind.toUpperCase()}`;
}

const menu = tag("details", "", "save"),
  menuName = tag("summary", "save"),
  formats = tag("div");
for (const kind of ["svg", "png"]) {
  const button = Object.assign(tag("button", kind.toUpperCase()), { type: "button", onclick: () => save(kind) });
  button.dataset.save = kind;
  button.setAttribute("aria-label", `save as ${button.textContent}`);
  formats.append(button);
}
menu.append(menuName, formats);
document.querySelector("[data-zoom]").before(menu);

// Close the menu; who was in it is back at its name.
function closeMenu() {
  if (menu.contains(document.activeElement)) menuName.focus();
  menu.open = false;
}

addEventListener("click", (event) => menu.contains(event.target) || closeMenu());
menu.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !menu.open) return;
  event.stopPropagation();
  closeMenu();
});

// Nothing but the picture and its caption, as large as the window. The answer is what it was before.
hooks.present = (on) => {
  const before = Boolean(look.fill);
  document.body.classList.toggle("present", on);
  look.fill = on;
  sized();
  redraw();
  return before;
};

const presenting = Object.assign(tag("button", "present"), { type: "button", onclick: () => hooks.present(true) });
presenting.id = "present";
presenting.title = "nothing but the picture (b)";
document.getElementById("theme").before(presenting);
addEventListener("resize", () => look.fill && redraw());

// On paper, all of it is drawn anew for the paper's width.
addEventListener("beforeprint", () => {
  sized(1);
  for (const timeline of timelines) timeline.scroller.parentElement.after(printed(timeline, 1000));
});
addEventListener("afterprint", () => {
  sized();
  document.querySelectorAll(".print").forEach((each) => each.remove());
});
