const SVG = document.getElementById("definitions").namespaceURI;
const AXIS = 44; // pixels below the lanes: ticks, their times, the unit
const STRIP = 12; // pixels of a memory strip
const FEW = 1500; // up to so many visible bars, each is an element of its own; more are painted on a canvas
const HUES = 8;

function element(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function tag(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// The smallest of 1, 2, 5, 10, 20 ... that is not below `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * (1 - 1e-9));
}

// What all timelines of the page show alike.
const look = { critical: false, memory: false, colour: "kind", now: null, hidden: new Set(), found: new Set() };
const draws = { count: 0 }; // how often anything was drawn, for tests

let palette = null; // colours of the style sheet, read once for each theme
function css(name) {
  palette ??= new Map();
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return palette.get(name);
}

class Timeline {
  constructor(model, index, span, hooks) {
    this.model = model;
    this.index = index;
    this.span = span || 1;
    this.hooks = hooks; // moved(timeline), chosen(timeline), hovered(timeline)
    this.zoom = 1;
    this.chosen = null; // { place } or { idle }
    this.hovered = null;
    this.dirty = false;
    const count = model.lanes.length;
    this.lane = count <= 8 ? 34 : count <= 16 ? 26 : count <= 32 ? 20 : 15;
    this.most = Math.max(1, ...model.lanes.map((lane) => lane.peak));
    this.build();
  }

  build() {
    const { model } = this;
    const section = tag("section");
    if (models.length > 1) section.append(tag("h2", model.title));
    section.append(ledgerOf(this));
    const grid = tag("div", "", "timeline");
    this.gutter = tag("div", "", "gutter");
    const heads = tag("div", "", "heads");
    heads.append(tag("span"), tag("span", "busy"), tag("span", "peak"));
    this.gutter.append(heads);
    this.heads = model.lanes.map((lane, rank) => {
      const row = tag("div", "", "rank");
      const name = tag("button", `rank ${rank}`);
      name.type = "button";
      name.dataset.rank = rank;
      name.title = lane.lane || "dim this rank";
      name.addEventListener("click", () => { toggle(look.hidden, `rank ${rank}`); this.hooks.moved(this); });
      row.append(name, tag("span", lane.busy), tag("span", lane.peak));
      this.gutter.append(row);
      return row;
    });
    this.scroller = tag("div", "", "scroller");
    this.scroller.tabIndex = 0;
    this.scroller.setAttribute("role", "application");
    this.scroller.setAttribute("aria-label", `timeline of ${model.title}; arrow keys go from action to action, brackets from idle time to idle time`);
    this.spacer = tag("div", "", "spacer");
    this.canvas = tag("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.svg = element("svg", { "data-trace": this.index });
    this.spacer.append(this.canvas, this.svg);
    this.scroller.append(this.spacer);
    this.map = tag("canvas", "", "map");
    this.map.setAttribute("aria-hidden", "true");
    grid.append(this.gutter, this.scroller, tag("div"), this.map);
    section.append(grid);
    document.getElementById("timelines").append(section);

    this.scroller.addEventListener("scroll", () => { this.redraw(); this.hooks.moved(this); });
    this.scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.svg.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") this.hover(this.at(event), event); });
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    this.svg.addEventListener("click", (event) => { this.choose(this.at(event)); this.scroller.focus({ preventScroll: true }); });
    this.dragMap();
    new ResizeObserver(() => { this.spacer.style.width = `${this.width * this.zoom}px`; this.redraw(); }).observe(this.scroller);
  }

  get width() { return this.scroller.clientWidth; }
  get scale() { return (this.width * this.zoom) / this.span; } // pixels per unit of time
  get left() { return this.scroller.scrollLeft; }
  get strip() { return (look.memory ? STRIP : 0) + rise(this); }
  get pitch() { return this.lane + this.strip; }
  get height() { return this.pitch * this.model.lanes.length; }

  // Zoom, keeping the time at `x` pixels from the left edge where it is; by default the chosen action's, if it shows.
  setZoom(zoom, x = null) {
    if (x === null) {
      const box = this.chosen ? this.boxOf(this.chosen) : null;
      x = box && box.x < this.width && box.x + box.width > 0 ? box.x + box.width / 2 : this.width / 2;
    }
    const at = (this.left + x) / this.scale;
    const most = Math.max(1, Math.min(8e6 / this.width, (200 * this.span) / ((this.model.typical || this.span) * this.width)));
    this.zoom = Math.min(Math.max(zoom, 1), most);
    this.spacer.style.width = `${this.width * this.zoom}px`;
    this.scroller.scrollLeft = at * this.scale - x;
    this.redraw();
    this.hooks.moved(this);
  }

  // Show the time between `from` and `to`.
  show(from, to) {
    this.zoom = Math.max(1, this.span / Math.max(to - from, 1e-9 * this.span));
    this.setZoom(this.zoom, 0);
    this.scroller.scrollLeft = from * this.scale;
    this.redraw();
    this.hooks.moved(this);
  }

  follow(other) {
    if (this.zoom !== other.zoom) {
      this.zoom = other.zoom;
      this.spacer.style.width = `${this.width * this.zoom}px`;
    }
    if (this.left !== other.left) this.scroller.scrollLeft = other.left;
    this.redraw();
  }

  // Draw once before the next frame, however often this is called.
  redraw() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => { this.dirty = false; this.draw(); });
  }

  // The box of an action or an idle time in pixels, relative to what is visible.
  boxOf({ place, idle }) {
    return idle ? this.box(idle.start, idle.end, idle.rank, 0) : this.box(this.model.start[place], this.model.end[place], this.model.rank[place], this.model.half[place]);
  }

  box(start, end, rank, half) {
    const high = this.lane * 0.86;
    const y = rank * this.pitch + this.strip + this.lane * 0.07 + (half === 2 ? high / 2 : 0);
    return { x: start * this.scale - this.left, y, width: (end - start) * this.scale, height: half ? high / 2 : high };
  }

  colour(place) {
    const { model } = this, letter = KINDS[model.kind[place]], m = Math.max(model.microbatch[place], 0), changed = shade(this, place);
    if (changed) return changed;
    if (look.colour === "micro-batch") return `--hue${m % HUES}`;
    if (look.colour === "stage") return `--hue${model.stage[place] % HUES}`;
    if (look.colour === "direction") return `--hue${model.direction(place) === model.direction(0) ? 0 : 1}`;
    return `--${letter}${m % 2}`;
  }

  ink(place) { return `${this.colour(place)}-ink`; }

  // How visible an action is: what is selected, filtered out or still to come makes others fade.
  opacity(place, model = this.model) {
    if (look.now !== null && model.start[place] >= look.now) return 0.2;
    if (look.hidden.has(KINDS[model.kind[place]]) || look.hidden.has(`rank ${model.rank[place]}`)) return 0.15;
    if (look.critical && !model.critical.has(place)) return 0.25;
    if (look.lit !== null && look.lit !== undefined && model.microbatch[place] !== look.lit) return 0.25;
    return 1;
  }

  draw() {
    const width = this.width;
    if (!width) return;
    draws.count += 1;
    const { model } = this, from = this.left / this.scale, to = (this.left + width) / this.scale;
    for (const svg of [this.svg]) { svg.setAttribute("width", width); svg.setAttribute("height", this.height + AXIS); }
    this.heads.forEach((row, rank) => {
      row.style.height = `${this.pitch}px`;
      row.style.paddingTop = `${this.strip}px`;
      row.classList.toggle("off", look.hidden.has(`rank ${rank}`));
    });
    const ranges = model.lanes.map((_, rank) => [above(model.end, from, model.first[rank], model.first[rank + 1]), above(model.start, to, model.first[rank], model.first[rank + 1])]);
    const visible = ranges.reduce((sum, [low, high]) => sum + high - low, 0);
    const few = visible <= FEW;
    this.crowded = !few && (model.typical || this.span) * this.scale < 2;
    const group = element("g"), context = this.paper(this.canvas, width, this.height);
    const painter = few ? svgPainter(group) : canvasPainter(context);
    this.lanes(painter);
    if (this.crowded) this.shares(painter, from, to);
    else this.bars(painter, ranges);
    if (this.strip) this.memory(painter);
    this.mark = element("g");
    this.svg.replaceChildren(group, this.axis(from, to, width), this.mark);
    this.outline();
    this.drawMap();
  }

  paper(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return context;
  }

  // Idle lanes, with the length and the reason of each idle time that has room for them.
  lanes(painter, right = this.width) {
    if (this.crowded) this.model.lanes.forEach((_, rank) => painter.rect(this.box(0, this.model.span, rank, 0), "--idle", 1, {}));
    for (const idle of this.model.idle) {
      const box = this.box(idle.start, idle.end, idle.rank, 0);
      if (box.x > right || box.x + box.width < 0 || (box.width < 0.5 && this.crowded)) continue;
      painter.rect(box, "--idle", 1, { class: "idle", "data-idle": `${idle.rank}:${idle.start}` });
      const text = [`${number(idle.end - idle.start)} ${idle.reason}`, idle.reason, number(idle.end - idle.start)].find((each) => each.length * 6.6 + 6 <= box.width);
      if (text && box.width > 40 && this.lane >= 20) painter.text(box, text, "--idle-ink", 1, { class: "why" }, right);
    }
    outlines(this, painter, right);
  }

  bars(painter, ranges, right = this.width) {
    const { model } = this;
    // Where full labels do not fit, the micro-batch alone, as the colour says the kind; never without the stage;
    // where not even that fits, from the bottom to the top of the bar.
    const widest = Math.max(1, ...ranges.map(([low, high]) => (high > low ? model.label(high - 1).length : 0)));
    const short = !model.namesStages && model.typical * this.scale < widest * 7.5 + 3;
    const ticks = [];
    for (const [low, high] of ranges) {
      for (let place = low; place < high; place += 1) {
        const box = this.boxOf({ place });
        if (model.end[place] <= model.start[place] || box.width < 1) {
          // What takes no time, or next to none, is a line over the bars.
          ticks.push([{ ...box, x: Math.min(box.x - 1, this.span * this.scale - this.left - 2), width: 2 }, place]);
          continue;
        }
        this.bar(painter, box, place, short, right);
      }
    }
    for (const [box, place] of ticks) this.bar(painter, box, place, true, right);
  }

  bar(painter, box, place, short, right) {
    const { model } = this, opacity = this.opacity(place);
    const running = look.now !== null && model.start[place] < look.now && look.now <= model.end[place];
    const marks = `${box.width < 4 ? " thin" : ""}${look.critical && model.critical.has(place) ? " critical" : ""}${running ? " running" : ""}${look.found.has(place) ? " found" : ""}`;
    painter.rect(box, this.colour(place), opacity, { class: `bar${marks}`, "data-action": model.name(place) });
    const text = short && model.kind[place] < 4 ? String(model.microbatch[place]) : model.label(place);
    if (box.width >= 8) painter.text(box, text, this.ink(place), opacity, { class: "label" }, right);
  }

  // Each column of pixels as its shares of time: by kind from the bottom, idle time on top.
  shares(painter, from, to, columns = this.width) {
    const { model } = this, step = (to - from) / columns, wide = this.width / columns, high = this.lane * 0.86;
    model.lanes.forEach((_, rank) => {
      const share = new Float64Array(5 * (columns + 1));
      const low = above(model.end, from, model.first[rank], model.first[rank + 1]);
      for (let place = low; place < model.first[rank + 1] && model.start[place] < to; place += 1) {
        const start = Math.max(model.start[place], from), end = Math.min(model.end[place], to);
        const weight = model.half[place] ? 0.5 : 1;
        for (let column = Math.floor((start - from) / step); column < columns && from + column * step < end; column += 1) {
          const begin = from + column * step;
          share[5 * column + model.kind[place]] += (weight * (Math.min(end, begin + step) - Math.max(start, begin))) / step;
        }
      }
      const top = rank * this.pitch + this.strip + this.lane * 0.07;
      for (let kind = 0; kind < 5; kind += 1) {
        for (let column = 0; column < columns; column += 1) {
          const part = share[5 * column + kind];
          if (part <= 0) continue;
          let below = 0;
          for (let other = 0; other < kind; other += 1) below += share[5 * column + other];
          painter.rect({ x: column * wide, y: top + high * (1 - Math.min(below + part, 1)), width: wide, height: high * Math.min(part, 1 - below) }, `--${KINDS[kind]}0`, 1, {});
        }
      }
    });
  }

  // Above each lane, how many activations the rank holds, in one scale for all ranks.
  memory(painter) {
    this.model.lanes.forEach((lane, rank) => {
      const steps = [...this.model.memory(rank), [this.span, 0]];
      for (let at = 0; at + 1 < steps.length; at += 1) {
        const [begin, held] = steps[at], x = begin * this.scale - this.left, width = (steps[at + 1][0] - begin) * this.scale;
        if (!held || width <= 0 || x > this.width || x + width < 0) continue;
        const height = (held / this.most) * (STRIP - 1);
        painter.rect({ x, y: rank * this.pitch + STRIP - height, width, height }, held === lane.peak ? "--memory-top" : "--memory", 1, { class: "memory", "data-held": held });
      }
    });
  }

  axis(from, to, width) {
    const group = element("g"), y = this.height + 2;
    group.append(element("line", { class: "base", x1: 0, x2: width, y1: y, y2: y }));
    const step = niceStep(90 / this.scale);
    for (let count = Math.ceil(from / step - 1e-9); count * step <= to + 1e-9 * step; count += 1) {
      const x = count * step * this.scale - this.left;
      group.append(element("line", { class: "tick", x1: x, x2: x, y1: y, y2: y + 5 }));
      const name = number(count * step);
      const fits = x + name.length * 4 <= width;
      if (fits) group.append(element("text", { class: `axis-text${x < 8 ? " first" : ""}`, x, y: y + 18 }, name));
    }
    group.append(element("text", { class: "axis-name", x: 0, y: y + 35 }, `time (${this.model.unit})`));
    if (look.now !== null) {
      const x = look.now * this.scale - this.left;
      group.append(element("line", { class: "now", x1: x, x2: x, y1: 0, y2: y }));
    }
    return group;
  }

  // The action or idle time under the pointer; null outside of the lanes.
  at(event) {
    const { model } = this, bounds = this.svg.getBoundingClientRect();
    const x = event.clientX - bounds.left, y = event.clientY - bounds.top, rank = Math.floor(y / this.pitch);
    if (!model.lanes[rank] || x < 0) return null;
    const moment = (x + this.left) / this.scale, reach = 2 / this.scale;
    const low = model.first[rank], high = model.first[rank + 1];
    let place = above(model.start, moment, low, high) - 1;
    if (place > low && model.half[place] === 2 && y - rank * this.pitch - this.strip < this.lane / 2) place -= 1;
    for (const [candidate, slack] of [[place, 0], [place, reach], [place + 1, reach]]) {
      if (candidate >= low && candidate < high && model.start[candidate] - slack <= moment && moment <= model.end[candidate] + slack) return { place: candidate };
    }
    const idle = model.idle.find((each) => each.rank === rank && each.start <= moment && moment <= each.end);
    return idle ? { idle } : null;
  }

  hover(over, event = null) {
    this.hovered = over;
    this.outline();
    this.hooks.hovered(this, event);
  }

  choose(chosen) {
    this.chosen = chosen;
    this.hooks.chosen(this);
  }

  // What is selected, what it needs and gives, and what is under the pointer.
  outline() {
    if (!this.mark) return;
    this.mark.replaceChildren();
    const box = (each, name) => this.mark.append(element("rect", { class: name, ...atLeast(this.boxOf(each), 2) }));
    if (this.hovered) box(this.hovered, "hovered");
    if (!this.chosen) return;
    const { place, idle } = this.chosen, { model } = this;
    if (idle) {
      const next = model.next(idle.rank, idle.end), last = next < 0 ? null : model.waited(next);
      if (last) { box({ place: last[0] }, "needs"); this.arrow(last[0], next, "needs"); }
    } else {
      for (const giver of this.linked(model.needs(place))) { box({ place: giver }, "needs"); this.arrow(giver, place, "needs"); }
      for (const needer of this.linked(model.gives(place))) { box({ place: needer }, "gives"); this.arrow(place, needer, "gives"); }
    }
    box(this.chosen, "chosen");
  }

  linked(places) { return places.length > 24 ? [] : places; } // an all-reduce needs every gradient of its stage

  arrow(giver, needer, name) {
    const from = this.boxOf({ place: giver }), to = this.boxOf({ place: needer });
    const x1 = from.x + from.width, y1 = from.y + from.height / 2, x2 = to.x, y2 = to.y + to.height / 2;
    if (Math.max(x1, x2) < -400 || Math.min(x1, x2) > this.width + 400) return;
    const bend = Math.max(12, Math.min(40, Math.abs(x2 - x1) / 2));
    this.mark.append(element("path", { class: `arrow ${name}`, d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, "marker-end": `url(#${name})` }));
  }

  // Scroll so that an action or an idle time is visible.
  reveal(each) {
    const box = this.boxOf(each);
    if (box.x < 0 || box.x + box.width > this.width) this.scroller.scrollLeft += box.x - (this.width - box.width) / 2;
    this.redraw();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // plain wheels scroll, as everywhere
    event.preventDefault();
    const x = event.clientX - this.scroller.getBoundingClientRect().left;
    this.setZoom(this.zoom * Math.exp(-event.deltaY / 300), x);
  }

  // The whole trace in a thin band, with a frame around what is visible; the frame can be dragged.
  drawMap() {
    this.map.hidden = this.zoom <= 1;
    if (this.map.hidden) return;
    const width = this.width, height = 24, { model } = this, context = this.paper(this.map, width, height), busy = this.busyShares(Math.round(width));
    context.fillStyle = css("--idle");
    context.fillRect(0, 0, width, height);
    context.fillStyle = css("--F0");
    busy.forEach((share, column) => context.fillRect(column, height * (1 - share), 1, height * share));
    context.fillStyle = css("--text");
    for (const place of look.found) context.fillRect((model.start[place] / this.span) * width, 0, 2, height);
    context.strokeStyle = css("--text");
    context.lineWidth = 2;
    context.strokeRect(this.left / this.zoom + 1, 1, Math.max(width / this.zoom - 2, 3), height - 2);
  }

  // For each column of the map, the share of all ranks' time that is work.
  busyShares(columns) {
    if (this.shown?.length === columns) return this.shown;
    const { model } = this, busy = new Float64Array(columns), step = this.span / columns;
    for (let place = 0; place < model.count; place += 1) {
      for (let column = Math.floor(model.start[place] / step); column < columns && column * step < model.end[place]; column += 1) {
        const part = Math.min(model.end[place], (column + 1) * step) - Math.max(model.start[place], column * step);
        busy[column] += (model.half[place] ? 0.5 : 1) * part / step / model.lanes.length;
      }
    }
    return (this.shown = busy);
  }

  dragMap() {
    const move = (event) => {
      const x = event.clientX - this.map.getBoundingClientRect().left;
      this.scroller.scrollLeft = x * this.zoom - this.width / 2;
    };
    this.map.addEventListener("pointerdown", (event) => { this.map.setPointerCapture(event.pointerId); move(event); });
    this.map.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
  }

  // The whole trace for paper, `width` pixels wide, in bands so long that a bar has room for its label.
  printed(width) {
    const { model } = this, sheets = tag("div", "", "print");
    const bands = model.count > 4 * FEW ? 1 : Math.max(1, Math.ceil((this.span * 14) / (width * (model.typical || this.span))));
    for (let band = 0; band < bands; band += 1) {
      const from = (band * this.span) / bands, to = ((band + 1) * this.span) / bands;
      const view = Object.create(this, { width: { value: width }, left: { value: (from * width * bands) / this.span }, zoom: { value: bands }, crowded: { value: model.count > 4 * FEW } });
      const svg = element("svg", { viewBox: `-52 0 ${width + 62} ${this.height + AXIS}`, width: "100%" }), group = element("g"), painter = svgPainter(group);
      view.lanes(painter, width);
      if (view.crowded) view.shares(painter, from, to, 250);
      else view.bars(painter, model.lanes.map((_, rank) => [above(model.end, from, model.first[rank], model.first[rank + 1]), above(model.start, to - 1e-9 * this.span, model.first[rank], model.first[rank + 1])]), width);
      model.lanes.forEach((_, rank) => svg.append(element("text", { class: "print-rank", x: -50, y: rank * this.pitch + this.strip + this.lane * 0.6 }, `rank ${rank}`)));
      svg.append(group, view.axis(from, to, width));
      sheets.append(svg);
    }
    return sheets;
  }
}

function atLeast(box, width) { return box.width >= width ? box : { ...box, x: box.x - (width - box.width) / 2, width }; }

function toggle(set, value) { if (!set.delete(value)) set.add(value); }

// Two ways to paint the same: an element for each bar, which a reader can select and a test can find, or pixels.
function svgPainter(group) {
  return {
    rect: (box, colour, opacity, attributes) => group.append(element("rect", { ...box, style: `fill:var(${colour})`, opacity: opacity === 1 ? null : opacity, ...attributes })),
    text: (box, text, colour, opacity, attributes, right) => {
      const spot = place(box, text, right);
      if (spot) group.append(element("text", { ...attributes, x: spot.x, y: spot.y, transform: spot.upright ? `rotate(-90 ${spot.x} ${spot.y})` : null, style: `fill:var(${colour})`, opacity: opacity === 1 ? null : opacity }, text));
    },
  };
}

function canvasPainter(context) {
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = "12px system-ui, sans-serif";
  return {
    rect: (box, colour, opacity, { class: name = "" }) => {
      context.globalAlpha = opacity;
      context.fillStyle = css(colour);
      context.fillRect(box.x, box.y, box.width > 4 ? box.width - 0.7 : box.width, box.height);
      if (/critical|found|running|outline/.test(name)) {
        context.strokeStyle = css("--text");
        context.strokeRect(box.x, box.y, box.width, box.height);
      }
    },
    text: (box, text, colour, opacity, attributes, right) => {
      const spot = place(box, text, right);
      if (!spot) return;
      context.globalAlpha = opacity;
      context.fillStyle = css(colour);
      if (spot.upright) {
        context.save();
        context.translate(spot.x, spot.y);
        context.rotate(-Math.PI / 2);
        context.fillText(text, 0, 0);
        context.restore();
      } else context.fillText(text, spot.x, spot.y);
    },
  };
}

// Where a text stands in the visible part of a box: across, upright, or nowhere.
function place(box, text, right) {
  const begin = Math.max(box.x, 0), visible = Math.min(box.x + box.width, right) - begin;
  const spot = { x: begin + visible / 2, y: box.y + box.height / 2 }, long = text.length * 7.5 + 3;
  if (long <= visible && box.height >= 12) return spot;
  return long <= box.height && visible >= 13 ? { ...spot, upright: true } : null;
}
