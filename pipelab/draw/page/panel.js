const panel = document.getElementById("panel");
const tip = document.getElementById("tip");
const saying = document.getElementById("say");
const timelines = [];
let longest, WORDS; // WORDS: letter -> word
const state = { timeline: null, chosen: null };
const near = 1e-7;

// A button that selects an action or an idle time.
function link(timeline, chosen, text = null) {
  const { model } = timeline;
  const made = tag(
    "button",
    text ??
      (chosen.idle ? `idle from ${number(chosen.idle.start)} to ${number(chosen.idle.end)}` : model.name(chosen.place)),
    "link",
  );
  made.addEventListener("click", () => select(timeline, chosen, true));
  return made;
}

function sentence(model, { place, idle, range }) {
  if (range) {
    const sums = totalOf(model.sums(range.from, range.to)).map(([name, each]) => `${name} ${number(each)}`);
    const length = time(range.to - range.from, model.unit);
    return `from ${number(range.from)} to ${number(range.to)} (${length}): all ranks together ${sums.join(", ")}`;
  }
  if (idle) return `${idles(idle)}: ${idle.reason}`;
  const what = `${model.name(place)}, ${model.what(place)}`,
    when = `${number(model.start[place])} to ${number(model.end[place])}`;
  return `${what}, rank ${model.rank[place]}, ${when}`;
}

const idles = ({ rank, reason, start, end }) =>
  `rank ${rank} ${GAPS[reason].waits ? "waits" : "is idle"} from ${number(start)} to ${number(end)}`;

function select(timeline, chosen, reveal = false) {
  state.timeline = timeline;
  state.chosen = chosen;
  tip.hidden = true; // it would cover what was selected
  look.lit =
    chosen && chosen.place !== undefined && timeline.model.microbatch[chosen.place] >= 0
      ? timeline.model.microbatch[chosen.place]
      : null;
  for (const each of timelines) {
    each.chosen = each === timeline ? chosen : chosen && twin(timeline, chosen, each);
    each.redraw();
  }
  if (chosen && reveal) timeline.reveal(chosen);
  saying.textContent = chosen ? sentence(timeline.model, chosen) : "";
  explain();
  hooks.keep?.();
}

// The same action in another timeline, or null.
function twin(timeline, chosen, other) {
  if (chosen.range) return data.shared ? chosen : null;
  const [place] = chosen.idle ? [] : other.model.named(timeline.model.name(chosen.place));
  return place === undefined ? null : { place };
}

function row(list, name, ...values) {
  const value = tag("dd");
  value.append(...values);
  list.append(tag("dt", name), value);
}

function explain() {
  const { timeline, chosen } = state;
  const inside = panel.contains(document.activeElement);
  panel.hidden = !chosen && !look.critical;
  document.body.classList.toggle("with-panel", !panel.hidden);
  if (panel.hidden) return inside && timeline.scroller.focus({ preventScroll: true });
  const close = tag("button", "×", "close");
  Object.assign(close, { title: "close (Esc)", ariaLabel: "close", onclick: deselect });
  const said = !chosen
    ? explainPath((timeline ?? timelines[0]).model)
    : chosen.range
      ? explainRange(timeline, chosen.range)
      : chosen.idle
        ? explainIdle(timeline, chosen.idle)
        : explainAction(timeline, chosen.place);
  panel.replaceChildren(close, ...said);
  if (inside) panel.focus({ preventScroll: true });
  if (!chosen || chosen.range) return;
  // Where the panel lies over the page, what is selected goes above it; nothing else ever moves the picture.
  const box = timeline.boxOf(chosen),
    bottom = timeline.svg.getBoundingClientRect().top + box.y + box.height + 8;
  scrollBy(0, Math.max(0, bottom - panel.getBoundingClientRect().top));
}

// What is selected is no longer; if nothing was, the critical path is closed.
const deselect = () => (state.chosen ? select(state.timeline, null) : setLook("critical", false));

// Whose time the critical path is.
function explainPath(model) {
  const path = [...model.critical],
    free = model.slack.reduce((count, each) => count + (each <= near * model.span), 0);
  const parts = (of) => {
    const sums = new Map();
    for (const place of path) sums.set(of(place), (sums.get(of(place)) ?? 0) + model.end[place] - model.start[place]);
    return [...sums].sort((a, b) => b[1] - a[1]);
  };
  const [[rank, most], ...ranks] = parts((place) => model.rank[place]),
    kinds = parts((place) => WORDS[KINDS[model.kind[place]]]),
    rest = kinds.reduce((left, [, each]) => left - each, model.span);
  if (rest > near * model.span) kinds.push(["between actions", rest]);
  return [
    tag("h3", `Critical path: ${number(most)} of ${time(model.span, model.unit)} on rank ${rank}`),
    tag("p", ranks.map(([rank, each]) => `${number(each)} on rank ${rank}`).join(", ")),
    tag("p", kinds.map(([name, each]) => `${name} ${number(each)}`).join(", ")),
    tag("p", `It is outlined. Without slack: ${free} of ${counted(model.count, "action")}.`),
    tag("p", "If one of these took longer, so would the step."),
  ];
}

function explainAction(timeline, place) {
  const { model } = timeline,
    list = tag("dl"),
    start = model.start[place],
    end = model.end[place];
  const lane = model.lanes[model.rank[place]];
  row(list, "what", model.what(place));
  row(list, "where", `rank ${model.rank[place]}${lane.lane ? ` (${lane.lane})` : ""}`);
  row(list, "when", `${number(start)} to ${number(end)} (${time(end - start, model.unit)})`);
  const last = model.waited(place);
  const values = (places, text) =>
    places.map((each) => {
      const item = tag("li");
      item.append(link(timeline, { place: each }), text(each));
      item.dataset.name = model.name(each);
      return item;
    });
  const listed = (name, places, text) => {
    const items = tag("ul");
    items.append(...values(places.slice(0, 24), text));
    if (places.length > 24) items.append(tag("li", `and ${places.length - 24} more`));
    row(list, name, places.length ? items : "nothing");
    list.lastChild.dataset.list = name;
  };
  listed("needs", model.needs(place), (giver) => {
    const there = model.arrives(giver, place),
      spare = start - there;
    const slice = model.slices(giver, place) ? ", another slice of its sequence," : "";
    const text = `${slice} on rank ${model.rank[giver]}, there at ${number(there)}`;
    if (last && last[0] === giver) return tag("b", `${text}: the last`);
    return spare > near * model.span ? `${text}, ${number(spare)} before` : text;
  });
  listed(
    "gives to",
    model.gives(place),
    (needer) => ` on rank ${model.rank[needer]}, which starts at ${number(model.start[needer])}`,
  );
  const before = model.before(place),
    free = before < 0 ? 0 : model.end[before],
    waited = tag("span");
  if (last)
    waited.append(
      link(timeline, { place: last[0] }),
      `, for which the rank was idle for ${time(start - free, model.unit)}`,
    );
  else if (start - free > near * model.span)
    waited.append(`nothing that it needs: it started ${time(start - free, model.unit)} after its rank was free`);
  else waited.append(before < 0 ? "nothing" : "nothing: it started when its rank was free");
  row(list, "waited for", waited);
  for (const [name, text] of changes(timeline, place)) row(list, name, text);
  const slack = model.slack[place];
  row(
    list,
    "slack",
    model.critical.has(place)
      ? "none: it is on the critical path, and the step gets shorter only if that does"
      : slack > near * model.span
        ? `${time(slack, model.unit)}: it could end so much later without a longer makespan`
        : "none: if it took longer, so would the step",
  );
  const held = (moment) =>
    model.memory(model.rank[place]).reduce((now, [at, count]) => (at <= moment + near * model.span ? count : now), 0);
  row(
    list,
    "memory",
    `the rank holds ${counted(held(start), "activation")} while it runs, ${held(end)} after; its peak is ${lane.peak}`,
  );
  return [tag("h3", model.name(place)), list];
}

// Why an idle time is there: what the next action waited for, step by step back to a first action.
function explainIdle(timeline, idle) {
  const { model } = timeline,
    parts = [],
    length = time(idle.end - idle.start, model.unit),
    next = model.next(idle.rank, idle.end);
  const text = tag("p");
  if (idle.reason === "drain")
    text.append(
      "The rank has done all of its actions. The last was ",
      link(timeline, { place: model.first[idle.rank + 1] - 1 }),
      `; other ranks end at ${number(model.span)}.`,
    );
  else if (next < 0) text.append("The rank has nothing to do.");
  else {
    const last = model.waited(next);
    text.append(link(timeline, { place: next }), idle.reason === "fill" ? ", its first action, " : " ");
    if (!last || idle.reason === "order") text.append("has all that it needs; the rank had not started it.");
    else if (idle.reason === "all-reduce")
      text.append(
        "begins when the last rank of its stage is there, which runs ",
        link(timeline, { place: last[0] }),
        ` until ${number(model.end[last[0]])}.`,
      );
    else {
      const travel =
        idle.reason === "transfer"
          ? " and is on its way"
          : idle.reason === "behind another transfer"
            ? ", but its transfer waits behind another"
            : "";
      const behind = model.lanes[idle.rank].behind[next - model.first[idle.rank]];
      text.append(
        "needs ",
        link(timeline, { place: last[0] }),
        ` of rank ${model.rank[last[0]]}, which ends at ${number(model.end[last[0]])}${travel}.`,
        behind ? ` ${behind}.` : "",
      );
    }
    if (last) parts.push(chain(timeline, last[0]));
  }
  return [
    tag("h3", idles(idle).replace("r", "R")),
    tag("p", `${length}: ${idle.reason}. ${data.meanings[idle.reason]}`),
    text,
    ...parts,
  ];
}

function chain(timeline, place) {
  const { model } = timeline,
    steps = tag("ol", "", "chain");
  const step = () => {
    const last = model.waited(place),
      before = model.before(place),
      item = tag("li");
    item.append(link(timeline, { place }), ` begins at ${number(model.start[place])}`);
    if (last)
      item.append(
        " when ",
        link(timeline, { place: last[0] }),
        ` of rank ${model.rank[last[0]]} ends at ${number(model.end[last[0]])}`,
        last[1] > model.end[last[0]] + near * model.span ? ` and its value is there at ${number(last[1])}` : "",
      );
    else if (before >= 0) item.append(": until then its rank runs ", link(timeline, { place: before }));
    else item.append(": it is its rank's first, and needs nothing");
    steps.append(item);
    place = last ? last[0] : before;
    return place >= 0;
  };
  let more = true;
  for (let count = 0; count < 3 && more; count += 1) more = step();
  const holder = tag("div");
  holder.append(tag("p", "Because:"), steps);
  if (more) {
    const button = tag("button", "more, back to the root");
    button.addEventListener("click", () => {
      for (let count = 0; count < 500 && more; count += 1) more = step();
      button.remove();
    });
    holder.append(button);
  }
  return holder;
}

function showTip(timeline, event) {
  tip.hidden = !timeline.hovered || !event;
  if (tip.hidden) return;
  tip.textContent = sentence(timeline.model, timeline.hovered);
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.clientY + 40 > innerHeight ? event.clientY - 34 : event.clientY + 18}px`;
}

const moved = (source) => {
  for (const each of timelines) {
    if (each === source) each.redraw();
    else if (data.shared) each.follow(source);
    else each.redraw();
  }
  hooks.keep?.();
};
const hooks = {
  moved,
  chosen: (timeline) => select(timeline, timeline.chosen),
  hovered: showTip,
  crowded: () => legend(),
};
// On one axis, the others follow.
const zoom = (factor) =>
  timelines.slice(0, data.shared ? 1 : undefined).forEach((each) => each.setZoom(each.zoom * factor || 1));
const redraw = () => timelines.forEach((each) => each.redraw());

// Layers and colours.
function setLook(name, value) {
  look[name] = value;
  for (const button of document.querySelectorAll(`[data-layer="${name}"]`))
    button.setAttribute("aria-pressed", String(Boolean(value)));
  if (name === "colour") document.getElementById("colour").value = value;
  if (timelines.length) legend();
  if (name === "critical") explain();
  redraw();
  hooks.keep?.();
}

function legend() {
  const place = document.querySelector(".legend");
  const entry = (name, text, colour) => {
    const made = tag("button", text);
    made.style.setProperty("--swatch", `var(${colour})`);
    made.dataset.paint = colour;
    made.setAttribute("aria-pressed", String(!look.hidden.has(name)));
    made.title = "show or dim";
    made.addEventListener("click", () => {
      toggle(look.hidden, name);
      legend();
      redraw();
    });
    return made;
  };
  const kinds = Object.entries(data.legend).map(([letter, text]) =>
    entry(letter, text, look.colour === "kind" || look.view !== "stack" ? `--${letter}0` : "--idle"),
  );
  const overview = timelines.every((each) => each.crowded || each.rows[0].band);
  const idle = Object.entries(overview ? { idle: "idle" } : data.idle).map(([name, text]) => {
    const made = tag("span", text),
      ground = name === "idle" ? name : "wait",
      angle = name === "transfer" ? 180 : 135;
    const hatch = `repeating-linear-gradient(${angle}deg,var(--${ground}) 0 3px,var(--${ground}-lines) 3px 4px)`,
      paint = overview || name === "wait" ? `var(--${ground})` : hatch;
    made.style.cssText = `--swatch:${paint};--swatch-edge:var(--${ground}-edge)`;
    made.dataset.paint = name;
    return made;
  });
  if (look.memory) {
    const most = Math.max(...timelines.flatMap((each) => each.model.lanes.map((lane) => lane.peak))),
      made = tag("span", `memory: up to ${counted(most, "activation")}`);
    if (data.cap) made.append(`; red line: the cap, ${data.cap}`);
    made.style.setProperty("--swatch", "var(--memory)");
    made.dataset.paint = "--memory";
    idle.push(made);
  }
  idle.push(...data.marks.map((text) => tag("small", text, "mark")));
  const notes = {
    kind: "",
    "micro-batch": "colour: micro-batch, in turns of eight",
    stage: "colour: stage, in turns of eight",
    direction: "colour: the end at which a micro-batch enters",
  };
  const crowded = timelines.some((each) => each.crowded || each.rows[0].band)
    ? "share of time, where bars are thinner than two pixels"
    : "";
  const colours = document.getElementById("colour");
  colours.disabled = overview;
  colours.title = colours.disabled ? "bars are thinner than two pixels: zoom in" : "";
  keepFocus(place, () =>
    place.replaceChildren(
      ...kinds,
      ...idle,
      tag("small", [notes[look.colour], crowded].filter(Boolean).join("; ")),
      ...scale(),
    ),
  );
}

// Search: an action, F3, mb 3, rank 2, stage 1, wait > 3; idle > 3 finds those that fill or drain too.
function search(text) {
  const query = text.trim();
  const word = /^(mb|micro-batch|rank|stage)\s*(\d+)$/i.exec(query),
    idle = /^(wait|idle)\s*>\s*([\d.]+)$/i.exec(query),
    kind = new RegExp(`^([${KINDS}])(\\d+)$`, "i").exec(query);
  const meant = ({ start, end, reason }) => end - start > idle[2] && (/^i/i.test(query) || GAPS[reason].waits);
  look.hits = timelines.flatMap((timeline) => {
    const { model } = timeline,
      lists = { mb: model.microbatch, "micro-batch": model.microbatch, rank: model.rank, stage: model.stage };
    const like = word
      ? (at) => lists[word[1].toLowerCase()][at] === Number(word[2])
      : (at) => model.microbatch[at] === Number(kind[2]) && KINDS[model.kind[at]] === kind[1].toUpperCase();
    const found = idle
      ? model.idle.filter(meant)
      : word || kind
        ? [...model.start.keys()].filter(like).sort((a, b) => model.start[a] - model.start[b])
        : model.named(query).slice(0, 1);
    model.found = new Set(found);
    return found.map((each) => ({ timeline, chosen: idle ? { idle: each } : { place: each } }));
  });
  look.hit = -1;
  document.getElementById("hits").textContent = query ? `${look.hits.length} found` : "";
  redraw();
}

function nextHit(step) {
  if (!look.hits?.length) return;
  look.hit = (look.hit + step + look.hits.length) % look.hits.length;
  select(look.hits[look.hit].timeline, look.hits[look.hit].chosen, true);
  document.getElementById("hits").textContent = `${look.hit + 1} of ${look.hits.length}`;
}

// The player: time passes, and one sentence says what begins.
let moments;
const player = { at: 0, playing: null };

function begun(model, moment) {
  const from = [...model.start.keys()].filter((place) => Math.abs(model.start[place] - moment) <= near * model.span);
  const waiting = model.lanes
    .map((_, rank) => rank)
    .filter((rank) => model.idle.some((idle) => idle.rank === rank && idle.start <= moment && moment < idle.end));
  const told = from.slice(0, 6).map((place) => `rank ${model.rank[place]} begins ${model.name(place)}`);
  if (from.length > 6) told.push(`${from.length - 6} more begin`);
  const idle = waiting.slice(0, 4).map((rank) => {
    const next = model.next(rank, moment),
      last = next < 0 ? null : model.waited(next);
    return next < 0
      ? `rank ${rank} is done`
      : `rank ${rank} is idle${last ? `, waiting for ${model.name(last[0])}` : ""}`;
  });
  return `t = ${number(moment)}: ${[...told, ...idle].join("; ") || "the end"}`;
}

function play(at) {
  player.at = Math.min(Math.max(at, 0), moments.length - 1);
  const last = player.at === moments.length - 1,
    moment = moments[player.at];
  look.now = last ? null : moment + near * longest;
  document.getElementById("moment").value = player.at;
  document.getElementById("moment").setAttribute("aria-valuetext", `t = ${number(moment)}`);
  document.getElementById("now").textContent = last ? "" : begun(models[0], moment);
  redraw();
}

function playing(on) {
  clearInterval(player.playing);
  player.playing = null;
  document.getElementById("play").textContent = on ? "pause" : "play";
  if (!on) return;
  if (player.at === moments.length - 1) play(0);
  player.playing = setInterval(
    () => {
      play(player.at + 1);
      if (player.at === moments.length - 1) playing(false);
    },
    Math.max(60, Math.min(600, 20000 / moments.length)),
  );
}

// Every action as a table, made when it is opened.
function table(holder) {
  if (holder.querySelector("table")) return;
  for (const { model } of timelines) {
    const made = tag("table"),
      head = tag("tr");
    head.append(...["rank", "action", "start", "end", "waited for"].map((each) => tag("th", each)));
    made.append(tag("caption", model.title), head);
    for (let place = 0; place < Math.min(model.count, 5000); place += 1) {
      const line = tag("tr"),
        last = model.waited(place);
      line.append(
        ...[
          model.rank[place],
          model.name(place),
          number(model.start[place]),
          number(model.end[place]),
          last ? model.name(last[0]) : "",
        ].map((each) => tag("td", each)),
      );
      made.append(line);
    }
    if (model.count > 5000)
      holder.append(tag("p", `${number(model.count - 5000)} more actions of ${model.title}: save all as CSV.`));
    holder.append(made);
  }
}

// The keyboard, wherever the focus is but in a text field.
function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (/BUTTON|SUMMARY|^A$/.test(event.target.tagName) && /^(Enter| )$/.test(event.key)) return;
  const timeline = state.timeline ?? timelines.find((each) => each.scroller.contains(event.target)) ?? timelines[0],
    { model } = timeline;
  const place = state.chosen?.place,
    rank = place !== undefined ? model.rank[place] : (state.chosen?.idle?.rank ?? 0);
  const go = (each) => {
    if (each !== undefined && each >= 0) select(timeline, { place: each }, true);
  };
  const around = (step) => {
    if (place === undefined) {
      const from = state.chosen?.idle ? model.next(rank, state.chosen.idle.end) : model.first[rank];
      return state.chosen?.idle && step < 0 ? from - 1 : from;
    }
    const other = place + step;
    return other >= model.first[rank] && other < model.first[rank + 1] ? other : place;
  };
  const beside = (step) => {
    const other = Math.min(Math.max(rank + step, 0), model.lanes.length - 1),
      moment = place !== undefined ? model.start[place] : (state.chosen?.idle?.start ?? 0);
    return Math.min(
      Math.max(
        above(model.start, moment + near * model.span, model.first[other], model.first[other + 1]) - 1,
        model.first[other],
      ),
      model.first[other + 1] - 1,
    );
  };
  const gap = (step, largest) => {
    const gaps = largest ? [...model.idle].sort((a, b) => b.end - b.start - (a.end - a.start)) : model.idle;
    const now = state.chosen?.idle ? gaps.indexOf(state.chosen.idle) : -1;
    const here =
      largest || state.chosen?.idle || place === undefined
        ? now + step
        : gaps.findIndex((each) => each.rank > rank || (each.rank === rank && each.start >= model.start[place])) +
          (step < 0 ? -1 : 0);
    const found = gaps[(here + gaps.length) % gaps.length];
    if (found) select(timeline, { idle: found }, true);
  };
  // With Shift, the arrow keys move the end of a span, which begins as the action or the idle time that was selected.
  const span = (step) => {
    const { idle, range } = state.chosen ?? {},
      whole = range ?? idle ?? { start: model.start[place], end: model.end[place] };
    const from = whole.from ?? whole.start,
      to = whole.to ?? whole.end,
      least = near * model.span;
    const next = step > 0 ? moments.find((each) => each > to + least) : moments.findLast((each) => each < to - least);
    if (next > from + least) select(timeline, { range: { from, to: next } });
  };
  if (event.shiftKey && /^Arrow(Left|Right)$/.test(event.key)) {
    event.preventDefault();
    return span(event.key === "ArrowRight" ? 1 : -1);
  }
  const keys = {
    ArrowRight: () => go(around(1)),
    ArrowLeft: () => go(around(-1)),
    ArrowDown: () => go(beside(1)),
    ArrowUp: () => go(beside(-1)),
    Home: () => go(model.first[rank]),
    End: () => go(model.first[rank + 1] - 1),
    n: () => {
      const at = place ?? (state.chosen?.idle ? model.next(rank, state.chosen.idle.end) : -1);
      if (at >= 0) go(model.waited(at)?.[0] ?? model.needs(at)[0]);
    },
    p: () =>
      go(place !== undefined ? model.gives(place)[0] : state.chosen?.idle && model.next(rank, state.chosen.idle.end)),
    "?": () => {
      const keys = document.querySelector(".hint");
      keys.open = !keys.open;
    },
    "[": () => gap(-1),
    "]": () => gap(1),
    "}": () => gap(1, true),
    "{": () => gap(-1, true),
    c: () => setLook("critical", !look.critical),
    a: () => setLook("memory", !look.memory),
    m: () =>
      place !== undefined &&
      model.microbatch[place] >= 0 &&
      ((find.value = `mb ${model.microbatch[place]}`), search(find.value)),
    "+": () => zoom(1.5),
    "=": () => zoom(1.5),
    "-": () => zoom(1 / 1.5),
    w: () => zoom(1.5),
    s: () => zoom(1 / 1.5),
    0: () => zoom(0),
    d: () => {
      timeline.scroller.scrollLeft += timeline.width / 4;
    },
    f: () => {
      const box = state.chosen && timeline.boxOf(state.chosen),
        beside = state.chosen?.range ? 0.02 : 2;
      if (box)
        timeline.show(...[-beside, 1 + beside].map((by) => (box.x + timeline.left + by * box.width) / timeline.scale));
    },
    " ": () => playing(!player.playing),
    ",": () => play(player.at - 1),
    ".": () => play(player.at + 1 < moments.length ? player.at + 1 : 0),
    "/": () => find.focus(),
    t: () => {
      const holder = document.getElementById("actions");
      holder.open = !holder.open;
    },
    o: () => nextView(),
    b: () => hooks.present?.(true),
    l: () => hooks.copy?.(),
    Enter: () => timeline.hovered && select(timeline, timeline.hovered),
    Escape: () => {
      search((find.value = ""));
      if (!hooks.present?.(false)) deselect();
    },
  };
  const act = keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

const find = document.getElementById("find");
find.addEventListener("input", () => search(find.value));
find.addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") {
    search((find.value = ""));
    find.blur();
  }
});
document.addEventListener("keydown", key);
const steps = { in: 1.5, out: 1 / 1.5, fit: 0 };
document
  .querySelectorAll("[data-zoom]")
  .forEach((button) => button.addEventListener("click", () => zoom(steps[button.dataset.zoom])));
document
  .querySelectorAll("[data-layer]")
  .forEach((button) =>
    button.addEventListener("click", () => setLook(button.dataset.layer, !look[button.dataset.layer])),
  );
document.getElementById("colour").addEventListener("change", (event) => setLook("colour", event.target.value));
document.getElementById("moment").addEventListener("input", (event) => {
  playing(false);
  play(Number(event.target.value));
});
document.getElementById("play").addEventListener("click", () => playing(!player.playing));
document.getElementById("actions").addEventListener("toggle", (event) => event.target.open && table(event.target));

// Light or dark: the reader's system, the button, or the page around this one.
function theme(name) {
  document.documentElement.dataset.theme = name;
  palette = null;
  redraw();
}
const dark = () =>
  (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
document.getElementById("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  palette = null;
  redraw();
});
addEventListener("message", (event) => {
  if (["light", "dark"].includes(event.data?.pipelabTheme)) theme(event.data.pipelabTheme);
});

addEventListener("resize", () => sized());

// Show data: the page's own, or others in their place.
function show(raw) {
  const focused = timelines.some((each) => each.scroller.contains(document.activeElement));
  if (timelines.length) select(timelines[0], null);
  playing(false);
  data = raw;
  KINDS = data.letters;
  readGaps(data.gaps);
  models = data.traces.map((each) => new Model(each));
  longest = Math.max(...models.map((model) => model.span));
  WORDS = data.kinds;
  moments = [
    ...models[0].start
      .slice()
      .sort()
      .filter((each, at, all) => !at || each > all[at - 1]),
    longest,
  ];
  Object.assign(player, { at: moments.length - 1 });
  Object.assign(document.getElementById("moment"), { max: player.at, value: player.at });
  document.getElementById("now").textContent = "";
  look.now = null;
  findDifferences();
  document.getElementById("timelines").replaceChildren();
  timelines.length = 0;
  models.forEach((model, at) => timelines.push(new Timeline(model, at, data.shared ? longest : model.span, hooks)));
  sized();
  timelines.forEach((each) => each.draw());
  performance.mark("drawn");
  search(find.value);
  legend();
  compareTraces();
  const actions = document.getElementById("actions");
  actions.replaceChildren(actions.firstElementChild);
  if (actions.open) table(actions);
  if (focused) timelines[0].scroller.focus({ preventScroll: true });
}

function start() {
  document.querySelectorAll(".tools[hidden], .hint[hidden]").forEach((each) => {
    each.hidden = false;
  });
  setLook(
    "memory",
    models.every((model) => model.lanes.length <= 16),
  );
}
const given = JSON.parse(document.getElementById("data").textContent);
if (given) {
  show(given);
  start();
}
