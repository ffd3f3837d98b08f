// How the traces of a comparison differ from the first: its actions as outlines behind theirs, colours for what
// changed, and a table of what adds to the makespan. Python computes the effects (see `data` in differences.py).
const VIEWS = {
  stack: "one below the other",
  diff: "what changed from the first trace, which lies behind the others, as colours and as a table (o)",
};
const SHADES = { shift: "start shift", change: "duration change", effect: "effect" };
const STEPS = 4; // shades of more, and of less
const RISE = 8; // pixels above a lane in which the first trace's actions show
const FIRST_ROWS = 12;
look.view = "stack";

class Differences {
  constructor(model, base, raw) {
    Object.assign(this, { model, base, notes: raw.notes, parts: raw.parts });
    this.origin = new Int32Array(model.count); // by place: the place of the same action in the first trace
    for (const name of Object.keys(SHADES)) this[name] = new Float64Array(model.count);
    this.effects = new Map(raw.effects.map(([place, ...values]) => [place, values]));
    for (let place = 0; place < model.count; place += 1) {
      const here = (each) => !model.collective(place) || base.rank[each] === model.rank[place],
        same = base.named(model.name(place)).find(here);
      const change = model.end[place] - model.start[place] - (base.end[same] - base.start[same]);
      this.origin[place] = same;
      this.shift[place] = model.start[place] - base.start[same];
      this.change[place] = Math.abs(change) < model.tick * 1.5 ? 0 : change; // both times are whole numbers of ticks
      this.effect[place] = (this.effects.get(place) ?? []).reduce((sum, each) => sum + each, 0);
    }
  }

  // All places: those with effects first, largest first, then the others by their shifts.
  get sorted() {
    const others = [...this.origin.keys()].filter((place) => !this.effects.has(place));
    return [
      ...this.effects.keys(),
      ...others.sort((a, b) => Math.abs(this.shift[b]) - Math.abs(this.shift[a]) || a - b),
    ];
  }
}

let differences, compared, extremes;
function findDifferences() {
  differences = models.map((model, at) =>
    data.diffs[at - 1]?.effects ? new Differences(model, models[0], data.diffs[at - 1]) : null,
  );
  compared = differences.filter(Boolean);
  extremes = Object.fromEntries(
    Object.keys(SHADES).map((name) => [
      name,
      compared.reduce((most, each) => each[name].reduce((so, value) => Math.max(so, Math.abs(value)), most), 0),
    ]),
  );
}

const signed = (value) => (value > 0 ? "+" : "") + number(value);

// The colour of an action by what changed; null if colours say something else.
function shade(timeline, place) {
  const found = look.colour in SHADES && differences[timeline.index];
  if (!found) return null;
  const most = extremes[look.colour];
  const step = most ? Math.round((STEPS * found[look.colour][place]) / most) : 0;
  return `--diff${STEPS + step}`;
}

const rise = (timeline) => (look.view !== "stack" && differences[timeline.index] ? RISE : 0);

// The actions of the first trace: in a strip above the lane, in their colours, and as outlines behind its bars.
function outlines(timeline, painter, right) {
  const { model } = timeline,
    base = models[0],
    up = rise(timeline);
  if (!up || timeline.crowded) return;
  for (let rank = 0; rank < Math.min(model.lanes.length, base.lanes.length); rank += 1) {
    const low = above(base.end, timeline.left / timeline.scale, base.first[rank], base.first[rank + 1]);
    for (let place = low; place < base.first[rank + 1]; place += 1) {
      const box = timeline.box(base.start[place], base.end[place], rank, base.half[place]);
      if (box.x > right) break;
      const opacity = timeline.opacity(place, base),
        lower = base.half[place] === 2,
        top = timeline.box(0, 0, rank, 0).y - up;
      const strip = { ...box, y: lower ? top + up / 2 : top, height: base.half[place] ? up / 2 : up };
      painter.rect(strip, `--${KINDS[base.kind[place]]}${base.chunk[place]}`, opacity, {
        class: "before",
        "data-before": base.name(place),
      });
      if (box.width < 8) continue; // lines so near to one another would hide what is behind them
      const outline = lower ? box : { ...box, y: top, height: box.y + box.height - top };
      painter.rect(outline, "--clear", opacity, {
        class: `outline${timelines[0].chosen?.place === place ? " chosen" : ""}`,
      });
    }
  }
}

// What the panel says about an action: its rows' names and values.
function changes(timeline, place) {
  const found = differences[timeline.index];
  if (!found) return [];
  const { model } = timeline,
    same = found.origin[place],
    moved = found.base.rank[same] !== model.rank[place];
  const start = `${number(found.base.start[same])} → ${number(model.start[place])} (${signed(found.shift[place])})`;
  const lasts = [found.base, model].map((each, at) =>
    number(each.end[[same, place][at]] - each.start[[same, place][at]]),
  );
  const effects = (found.effects.get(place) ?? [])
    .map((value, at) => [value, found.parts[at]])
    .filter(([value]) => value);
  const adds = effects.map(([value, part]) => `${signed(value)} ${part}`).join(", ");
  return [
    [
      "change",
      `start ${start}; duration ${lasts[0]} → ${lasts[1]} (${signed(found.change[place])})` +
        (moved ? `; it was on rank ${found.base.rank[same]}` : ""),
    ],
    ["effect", adds ? `${signed(found.effect[place])} on the makespan: ${adds}` : "none on the makespan"],
  ];
}

// The table under a timeline: what adds to the makespan.
function tableOfChanges(timeline, found) {
  const { model } = timeline,
    holder = tag("div", "", "changes"),
    made = tag("table"),
    head = tag("tr");
  const parts = found.parts.length > 1 ? found.parts : [];
  head.append(
    ...["action", "rank", "effect", ...parts, "start", "shift", "duration", "change"].map((each) => tag("th", each)),
  );
  made.append(head);
  const sorted = found.sorted;
  let listed = 0;
  const list = (count) => {
    for (const place of sorted.slice(listed, listed + count)) {
      const line = tag("tr"),
        same = found.origin[place],
        name = tag("td"),
        values = found.effects.get(place) ?? [];
      name.append(link(timeline, { place }));
      const adds = [found.effect[place], ...parts.map((_, at) => values[at] ?? 0)].map(signed);
      const cells = [
        model.rank[place],
        ...adds,
        number(found.base.start[same]),
        signed(found.shift[place]),
        number(found.base.end[same] - found.base.start[same]),
        signed(found.change[place]),
      ];
      line.append(name, ...cells.map((each) => tag("td", String(each))));
      line.dataset.changed = model.name(place);
      made.append(line);
    }
    listed += count;
  };
  list(FIRST_ROWS);
  const scroll = tag("div", "", "wide");
  scroll.append(made);
  holder.append(...found.notes.slice(1).map((note) => tag("p", note)), scroll);
  if (sorted.length > listed) {
    const more = tag("button", `${Math.min(sorted.length, 5000) - listed} more actions`);
    more.addEventListener("click", () => {
      list(5000 - listed);
      more.remove();
    });
    holder.append(more);
  }
  return holder;
}

// The legend: whose the strips are, and a shade for each step of a change.
function scale() {
  const whose = look.view === "stack" ? [] : [tag("small", `strips and outlines: ${models[0].title}`)];
  if (!(look.colour in SHADES) || !compared.length) return whose;
  const most = extremes[look.colour],
    made = tag("span", "", "scale");
  const steps = Array.from({ length: 2 * STEPS + 1 }, (_, at) => at - STEPS);
  for (const step of steps) {
    const cell = tag("i", step === -STEPS || step === STEPS || !step ? signed((most * step) / STEPS) : "");
    cell.style.background = `var(--diff${step + STEPS})`;
    cell.style.color = `var(--diff${step + STEPS}-ink)`;
    made.append(cell);
  }
  const crowded = timelines.some((each) => each.crowded)
    ? ", where bars are wide enough to have a colour: zoom in"
    : "";
  return [...whose, tag("small", `${SHADES[look.colour]} (${models[0].unit})${crowded}:`), made];
}

function setView(name) {
  setLook("view", name);
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("[data-view-name]"))
    button.setAttribute("aria-pressed", String(button.dataset.viewName === name));
  setLook(
    "colour",
    name === "diff" ? (extremes.change ? "change" : "shift") : look.colour in SHADES ? "kind" : look.colour,
  );
}

const nextView = () => compared.length && setView(look.view === "stack" ? "diff" : "stack");

// The buttons, the colours and the tables, where there is something to compare.
function compareTraces() {
  const layers = document.querySelector(".layers"),
    buttons = tag("span", "", "views"),
    colours = document.getElementById("colour");
  // Of data shown before.
  document.querySelectorAll(".views, #colour [data-change], .hint span").forEach((each) => each.remove());
  if (look.view !== "stack" || look.colour in SHADES) setView("stack");
  if (!compared.length) return;
  buttons.setAttribute("role", "group");
  buttons.setAttribute("aria-label", "view");
  for (const [name, meaning] of Object.entries(VIEWS)) {
    const button = tag("button", name);
    button.title = meaning;
    button.dataset.viewName = name;
    button.addEventListener("click", () => setView(name));
    buttons.append(button);
  }
  layers.prepend(buttons);
  for (const [value, name] of Object.entries(SHADES)) {
    const option = Object.assign(tag("option", name), { value });
    option.dataset.change = value;
    colours.append(option);
  }
  timelines.forEach((timeline, at) => {
    const section = timeline.scroller.closest("section"),
      found = differences[at];
    if (at === 0) section.classList.add("first-trace");
    else if (found) {
      section.querySelector("h2").after(tag("p", found.notes[0], "sentence"));
      section.append(tableOfChanges(timeline, found));
    } else
      section
        .querySelector("h2")
        .after(tag("p", `Not compared with ${models[0].title}: ${data.diffs[at - 1].refusal}.`, "refusal"));
  });
  document.querySelector(".hint p").append(tag("span", " With o, from stack to diff and back."));
  setView(data.view);
}
