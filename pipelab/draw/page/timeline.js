const STRIP = 18; // pixels of a memory strip
const CHANNEL = 15; // pixels of each strip with what runs on a channel: gathers and frees, offloads, loads
const FEW = 1500; // up to so many visible bars, each is an element of its own; more are painted on a canvas
const FEW_MOVING = 150; // the same while the picture moves: elements are slow
const HUES = 8;
const BAND = 16; // of more ranks than MOST_LANES, so many are one band, until it is opened
const MOST_LANES = 64;

// The smallest of 1, 2, 5, 10, 20 ... that is not below `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * (1 - 1e-9));
}

// What all timelines of the page show alike.
const look = { critical: false, memory: false, colour: "kind", now: null, hidden: new Set() };
const draws = { count: 0 }; // how often anything was drawn, for tests

class Timeline {
  constructor(model, index, span, hooks) {
    this.model = model;
    this.index = index;
    this.span = span || 1;
    this.hooks = hooks; // moved(timeline), chosen(timeline), hovered(timeline), crowded()
    this.zoom = 1;
    this.chosen = null; // { place } or { idle }
    this.hovered = null;
    this.dirty = false;
    model.found = new Set(); // places of actions, or idle times
    this.most = Math.max(1, data.cap, ...models.flatMap((each) => each.lanes.map((lane) => lane.peak))); // one scale
    this.build();
  }

  build() {
    const { model } = this;
    const section = tag("section");
    if (models.length > 1) {
      section.append(tag("h2", model.title));
      section.lastChild.append(tag("small", model.idea));
    }
    section.append(ledgerOf(this));
    const grid = (this.grid = tag("div", "", "timeline"));
    this.gutter = tag("div", "", "gutter");
    const heads = tag("div", "", "heads");
    heads.append(tag("span"), tag("span", "busy"), tag("span", "peak"));
    this.open = new Set(); // bands
    this.arrange();
    this.scroller = tag("div", "", "scroller");
    this.scroller.tabIndex = 0;
    this.scroller.setAttribute("role", "application");
    this.scroller.setAttribute(
      "aria-label",
      `timeline of ${model.title}; arrow keys go from action to action, brackets from idle time to idle time`,
    );
    this.spacer = tag("div", "", "spacer");
    this.canvas = tag("canvas");
    this.canvas.setAttribute("aria-hidden", "true");
    this.pixels = new Pixels(this.canvas);
    this.svg = element("svg", { "data-trace": this.index, role: "img", "aria-label": model.caption });
    this.spacer.append(this.canvas, this.svg);
    this.scroller.append(this.spacer);
    this.map = tag("canvas", "", "map");
    this.map.setAttribute("aria-hidden", "true");
    this.whole = new Pixels(tag("canvas")); // the map without its frame
    this.axes = ["axis top", "axis"].map((name) => tag("div", "", name));
    for (const axis of this.axes) axis.title = "drag to select a span of time";
    const foot = tag("div", "", "foot");
    foot.append(this.axes[1], this.map);
    grid.append(heads, this.axes[0], this.gutter, this.scroller, tag("div", `time (${model.unit})`, "axis-name"), foot);
    section.append(grid);
    document.getElementById("timelines").append(section);

    this.scroller.addEventListener("scroll", () => {
      this.move();
      this.hooks.moved(this);
    });
    gestures(this);
    new ResizeObserver(() => {
      // The time at the left edge stays there.
      this.spacer.style.width = `${this.width * this.zoom}px`;
      if (this.drawn && this.drawn.width !== this.width) this.scroller.scrollLeft = this.drawn.from * this.scale;
      this.redraw();
    }).observe(this.scroller);
  }

  // A row for each rank; of very many ranks, one for each band, and those of the ranks of open bands below it.
  arrange() {
    const { lanes } = this.model,
      count = lanes.length,
      size = count > MOST_LANES ? BAND : 1;
    this.rows = [];
    for (let first = 0; first < count; first += size) {
      const last = Math.min(first + size, count),
        band = { first, last };
      if (size > 1) this.rows.push({ band, first, last });
      if (size === 1 || this.open.has(first))
        for (let rank = first; rank < last; rank += 1) this.rows.push({ first: rank, last: rank + 1 });
    }
    this.rowOf = new Int32Array(count);
    this.rows.forEach((row, at) => {
      row.at = at;
      this.rowOf.fill(at, row.first, row.last);
    });
    keepFocus(this.gutter, () => this.gutter.replaceChildren(...this.rows.map((row) => (row.head = this.headOf(row)))));
    this.grid.classList.toggle("tall", this.rows.length > 16);
  }

  headOf({ band, first: rank, last }) {
    const row = tag("div", "", "rank"),
      lane = this.model.lanes[rank],
      name = tag("button", band ? `ranks ${rank}–${last - 1}` : `rank ${rank}`);
    if (band) {
      name.title = "their mean; click to show each";
      name.dataset.ranks = rank;
      name.setAttribute("aria-expanded", String(this.open.has(rank)));
      name.addEventListener("click", () => this.toggleBand(band));
      row.append(name);
      return row;
    }
    name.dataset.rank = rank;
    name.title = lane.lane || "dim this rank";
    name.setAttribute("aria-pressed", String(!look.hidden.has(`rank ${rank}`)));
    name.addEventListener("click", () => {
      toggle(look.hidden, `rank ${rank}`);
      name.setAttribute("aria-pressed", String(!look.hidden.has(`rank ${rank}`)));
      this.hooks.moved(this);
    });
    row.append(name, tag("span", lane.busy), tag("span", lane.peak));
    return row;
  }

  toggleBand({ first }) {
    toggle(this.open, first);
    this.arrange();
    this.redraw();
  }

  shut(rank) {
    return Boolean(this.rows[this.rowOf[rank]].band);
  }

  get width() {
    return this.scroller.clientWidth;
  }
  get scale() {
    return (this.width * this.zoom) / this.span;
  } // pixels per unit of time
  // Rows grow with the window.
  get lane() {
    const count = this.model.lanes.length,
      usual = count <= 8 ? 68 * grow - 34 : (count <= 16 ? 26 : count <= 32 || count > MOST_LANES ? 20 : 15) * grow;
    if (!look.fill) return Math.round(usual); // asked for each bar
    const room = (innerHeight - 95 * grow * (timelines.length + 1)) / timelines.flatMap((each) => each.rows).length;
    return Math.round(Math.max(15, room - this.strip));
  }
  get left() {
    return this.scroller.scrollLeft;
  }
  get strip() {
    return (look.memory ? STRIP : 0) + rise(this) + CHANNEL * grow * this.model.strips;
  }
  get pitch() {
    return this.lane + this.strip;
  }
  get height() {
    return this.pitch * this.rows.length;
  }

  // Zoom, keeping the time at `x` pixels from the left edge where it is; by default the chosen action's, if it shows.
  setZoom(zoom, x = null) {
    if (x === null) {
      const box = this.chosen ? this.boxOf(this.chosen) : null;
      x = box && box.x < this.width && box.x + box.width > 0 ? box.x + box.width / 2 : this.width / 2;
    }
    const at = (this.left + x) / this.scale;
    const most = Math.max(
      1,
      Math.min(8e6 / this.width, (200 * this.span) / ((this.model.typical || this.span) * this.width)),
    );
    this.zoom = Math.min(Math.max(zoom, 1), most);
    this.spacer.style.width = `${this.width * this.zoom}px`;
    this.scroller.scrollLeft = at * this.scale - x;
    this.move();
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
    this.move();
  }

  move() {
    clearTimeout(this.moving);
    this.moving = setTimeout(() => {
      this.moving = null;
      this.redraw();
    }, 150);
    this.redraw();
  }

  // Draw once before the next frame, however often this is called.
  redraw() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => {
      this.dirty = false;
      this.draw();
    });
  }

  // The box of an action or an idle time in pixels, relative to what is visible.
  boxOf({ place, idle, range }) {
    if (range)
      return {
        x: range.from * this.scale - this.left,
        y: 0,
        width: (range.to - range.from) * this.scale,
        height: this.height,
      };
    return idle
      ? this.box(idle.start, idle.end, idle.rank, 0)
      : this.box(this.model.start[place], this.model.end[place], this.model.rank[place], this.model.half[place]);
  }

  box(start, end, rank, half) {
    const high = this.lane * 0.86;
    const y = this.rowOf[rank] * this.pitch + this.strip + this.lane * 0.07 + (half === 2 ? high / 2 : 0);
    let [x, until] = [start * this.scale - this.left, end * this.scale - this.left];
    if (this.cut) [x, until] = [x, until].map(this.cut);
    return { x, y, width: until - x, height: half ? high / 2 : high };
  }

  colour(place) {
    const { model } = this,
      letter = KINDS[model.kind[place]],
      m = Math.max(model.microbatch[place], 0),
      changed = shade(this, place);
    if (changed) return changed;
    if (look.colour === "micro-batch") return `--hue${m % HUES}`;
    if (look.colour === "stage") return `--hue${model.stage[place] % HUES}`;
    if (look.colour === "direction") return `--hue${model.direction(place) === model.direction(0) ? 0 : 1}`;
    return `--${letter}${model.chunk[place]}`;
  }

  ink(place) {
    return `${this.colour(place)}-ink`;
  }

  // How visible an action is: what is selected, filtered out or still to come makes others fade.
  opacity(place, model = this.model) {
    if (look.now !== null && model.start[place] >= look.now) return 0.2;
    if (look.hidden.has(KINDS[model.kind[place]]) || look.hidden.has(`rank ${model.rank[place]}`)) return 0.15;
    if (look.critical && !model.critical.has(place)) return model.slack[place] > near * model.span ? 0.15 : 0.4;
    if (look.lit !== null && look.lit !== undefined && model.microbatch[place] !== look.lit) return 0.25;
    return 1;
  }

  draw() {
    const width = this.width,
      left = this.left;
    if (!width) return;
    draws.count += 1;
    // Asked once: the browser lays out the page for each answer.
    Object.defineProperties(this, {
      width: { value: width, configurable: true },
      left: { value: left, configurable: true },
    });
    this.paint(width, left / this.scale, (left + width) / this.scale);
    this.drawn = { width, from: left / this.scale };
    delete this.width;
    delete this.left;
  }

  paint(width, from, to) {
    const { model } = this;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", this.height);
    for (const row of this.rows) {
      row.head.style.height = `${this.pitch}px`;
      row.head.style.paddingTop = `${this.strip}px`;
      row.head.classList.toggle("off", look.hidden.has(`rank ${row.first}`) && !row.band);
    }
    const ranges = this.ranges(from, to + 1e-9 * this.span),
      visible = ranges.reduce((sum, [low, high]) => sum + high - low, 0);
    const few = visible <= (this.moving ? FEW_MOVING : FEW),
      bands = this.rows.filter((row) => row.band);
    const crowded = this.crowded;
    this.crowded = !few && (model.typical || this.span) * this.scale < 2;
    this.canvas.hidden = few && !bands.length;
    const group = element("g"),
      pixels = this.canvas.hidden ? null : this.pixels.begin(width, this.height);
    const painter = few ? svgPainter(group) : pixels;
    for (const row of bands) this.shares(pixels, row, from, to);
    if (this.crowded) {
      for (const row of this.rows) row.band || this.shares(pixels, row, from, to);
      this.marks(pixels, ranges);
    } else {
      this.lanes(painter, from, to);
      this.bars(painter, ranges);
    }
    if (look.memory || rise(this)) this.memory(painter);
    this.channels(painter, from, to);
    this.signs(painter);
    pixels?.end();
    if (crowded !== this.crowded) this.hooks.crowded();
    this.mark = element("g");
    if (look.now !== null) {
      const x = look.now * this.scale - this.left;
      group.append(element("line", { class: "now", x1: x, x2: x, y1: 0, y2: this.height }));
    }
    this.svg.replaceChildren(group, this.mark);
    this.drawAxes(from, to, width);
    this.outline();
    this.drawMap();
  }

  // For each rank, its first visible action and the one after its last.
  ranges(from, to) {
    const { model } = this;
    return model.lanes.map((_, rank) => {
      const low = model.first[rank],
        high = model.first[rank + 1];
      return this.shut(rank) ? [low, low] : [above(model.end, from, low, high), above(model.start, to, low, high)];
    });
  }

  // Where actions are thinner than pixels: a line over those on the critical path, and under those that were found.
  marks(painter, ranges) {
    const { model } = this;
    for (const [low, high] of ranges)
      for (let place = low; place < high; place += 1) {
        const box = this.boxOf({ place }),
          line = (y, colour) => painter.rect({ ...box, y, height: 3, width: Math.max(1, box.width) }, colour, 1, {});
        if (look.critical && model.critical.has(place)) line(box.y, "--text");
        if (model.found.has(place)) line(box.y + box.height - 3, "--need");
      }
    for (const idle of [...model.found].filter((each) => each.end && !this.shut(each.rank))) {
      const box = this.boxOf({ idle });
      painter.rect({ ...box, y: box.y + box.height - 3, height: 3 }, "--need", 1, {});
    }
  }

  // Idle times, with their words where there is room for them. What is still to come is not shown.
  lanes(painter, from, to, right = this.width) {
    const { model } = this;
    for (let rank = 0; rank < model.lanes.length; rank += 1) {
      for (const idle of this.shut(rank) ? [] : model.idleIn(rank, from, to)) {
        if (look.now !== null && idle.start >= look.now) continue;
        const box = this.box(idle.start, idle.end, rank, 0),
          gap = GAPS[idle.reason],
          marks = { class: model.found.has(idle) ? "idle found" : "idle", "data-idle": `${rank}:${idle.start}` };
        if (look.critical) {
          painter.rect(box, "--idle", 1, marks);
          continue;
        }
        painter.gap(box, gap, marks);
        if (box.width < 13 || this.lane < 20) continue;
        const visible = Math.min(box.x + box.width, right) - Math.max(box.x, 0),
          words = model.words(idle),
          text = words.find((each) => wide(each) + 6 <= visible) ?? words.at(-1);
        painter.text(box, text, `--${gap.ground}-ink`, 1, { class: "why" }, right);
      }
    }
    outlines(this, painter, right);
  }

  bars(painter, ranges, right = this.width) {
    const { model } = this;
    // Where full labels do not fit, the micro-batch alone, as the colour says the kind; never without the stage;
    // where not even that fits, from the bottom to the top of the bar.
    const widest = Math.max(1, ...ranges.map(([low, high]) => (high > low ? model.label(high - 1).length : 0)));
    const short = !model.namesStages && model.typical * this.scale < wide("0".repeat(widest)) + 3;
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
    const { model } = this,
      opacity = this.opacity(place);
    const running = look.now !== null && model.start[place] < look.now && look.now <= model.end[place];
    const marks = ["bar"];
    if (box.width < 4) marks.push("thin");
    if (look.critical && model.critical.has(place)) marks.push("critical");
    if (running) marks.push("running");
    if (model.found.has(place)) marks.push("found");
    painter.rect(box, this.colour(place), opacity, { class: marks.join(" "), "data-action": model.name(place) });
    const text = short && !model.collective(place) ? String(model.microbatch[place]) : model.label(place);
    if (box.width >= 8) painter.text(box, text, this.ink(place), opacity, { class: "label" }, right);
  }

  // A row as each column's shares of time: by kind from the bottom, idle time on top; of a band, the mean of its ranks.
  shares(painter, { at, first, last }, from, to, columns = this.width) {
    const { start, end, kind, half, first: places } = this.model,
      inverse = columns / (to - from),
      shares = new Float64Array(KINDS.length * columns);
    for (let rank = first; rank < last; rank += 1) {
      const high = above(start, to, places[rank], places[rank + 1]);
      for (let place = above(end, from, places[rank], places[rank + 1]); place < high; place += 1) {
        const begin = Math.max(0, (start[place] - from) * inverse),
          until = Math.min(columns, (end[place] - from) * inverse);
        const weight = (half[place] ? 0.5 : 1) / (last - first);
        const only = Math.floor(begin);
        if (until <= only + 1) shares[KINDS.length * only + kind[place]] += weight * (until - begin);
        else
          for (let column = only; column < until; column += 1) {
            const part = Math.min(until, column + 1) - Math.max(begin, column);
            shares[KINDS.length * column + kind[place]] += weight * part;
          }
      }
    }
    const off = last === first + 1 && look.hidden.has(`rank ${first}`),
      dimmed = [...KINDS].map((letter) => (off || look.critical || look.hidden.has(letter) ? 0.25 : 1)),
      box = { y: at * this.pitch + this.strip + this.lane * 0.07, height: this.lane * 0.86 };
    painter.columns(shares, columns, box, this.width, dimmed);
  }

  // Right above each lane, what runs on its channels; what takes no time is a line.
  channels(painter, from, to) {
    for (const { rank, start, end, name, kind, strip } of this.model.moves) {
      if (this.shut(rank) || end < from || start > to) continue;
      const y = this.rowOf[rank] * this.pitch + this.strip - CHANNEL * grow * strip + 2,
        width = Math.max(1.5, (end - start) * this.scale),
        box = { x: start * this.scale - this.left, y, width, height: CHANNEL * grow - 3 };
      painter.rect(box, `--${kind}0`, look.hidden.has(kind) ? 0.25 : 1, { class: "move", "data-move": name });
      const text = kind === "UNSHARD" ? String(parseInt(name)) : name; // its stage
      if (width > wide(text) + 3) painter.text(box, text, `--${kind}0-ink`, 1, { class: "label" }, this.width);
    }
  }

  // Above each lane, how many activations the rank holds, in one scale for all ranks; in a pixel, the most of its time.
  memory(painter) {
    this.model.lanes.forEach((lane, rank) => {
      const steps = this.shut(rank) ? [] : this.model.memory(rank),
        from = this.left / this.scale,
        bottom = this.rowOf[rank] * this.pitch + STRIP,
        up = (count) => bottom - (count / this.most) * (STRIP - 1);
      let at = 0,
        high = steps.length;
      while (at < high) {
        const middle = (at + high) >> 1;
        if (steps[middle][0] > from) high = middle;
        else at = middle + 1;
      }
      at = Math.max(0, at - 1);
      let peak = null,
        x = at < steps.length ? Math.max(0, steps[at][0] * this.scale - this.left) : 0,
        held = 0;
      for (; at < steps.length && x <= this.width; at += 1) {
        if (steps[at + 1]?.[0] === steps[at][0]) continue; // of changes at once, the last counts
        held = Math.max(held, steps[at][1]);
        if (look.now !== null && steps[at][0] >= look.now) break; // still to come
        const end = Math.min(steps[at + 1]?.[0] ?? this.span, look.now ?? this.span) * this.scale - this.left,
          until = Math.min(end, this.width),
          width = until - x;
        if (width < 1 && at + 1 < steps.length) continue;
        const part = (from, to, colour, marks) =>
          to > from && painter.rect({ x, y: up(to), width, height: up(from) - up(to) }, colour, 1, marks);
        part(0, held, "--memory", { class: "memory", "data-held": held });
        if (data.cap) part(data.cap, held, "--need", { class: "over" });
        if (held === lane.peak) peak ??= Math.max(x, 0);
        x = until;
        held = 0;
      }
      const write = (x, text) =>
        painter.note(Math.min(x + 3, this.width - wide(text)), bottom - 3, text, { class: "held" });
      if (peak !== null) write(peak, `peak ${lane.peak}`);
      if (!data.cap || this.shut(rank)) return;
      painter.rect({ x: 0, y: up(data.cap), width: this.width, height: 1 }, "--need", 1, { class: "cap" });
      write(this.width, `cap ${data.cap}`);
    });
  }

  // What shows the schedule's idea: the ways of micro-batches through the ranks, and the slices of a sequence.
  signs(painter) {
    if (this.crowded || this.rows[0].band || look.critical || look.now !== null || look.view !== "stack") return;
    const { model } = this,
      { ways, brackets, apart, first, start, end } = model,
      forward = (stage, m) => model.named(`${stage}F${m}`)[0];
    for (const m of ways)
      for (let s = 1; s < apart; s += 1) this.arrow(forward(s - 1, m), forward(s, m), "way", null, painter);
    brackets.forEach((count, rank) => {
      const { x, y, width } = this.box(start[first[rank]], end[first[rank] + count - 1], rank);
      if (count) painter.path(`M${x + 1} ${y + 5}v-7h${width - 2}v7`, "--text", "arrow way");
    });
  }

  // The times to write on an axis, each at its x.
  ticks(from, to) {
    const step = niceStep(90 / this.scale),
      found = [];
    for (let count = Math.ceil(from / step - 1e-9); count * step <= to + 1e-9 * step; count += 1)
      found.push([count * step * this.scale - this.left, number(count * step)]);
    return found;
  }

  drawAxes(from, to, width) {
    const range = this.spanning ?? this.chosen?.range;
    for (const axis of this.axes) {
      axis.replaceChildren(
        ...this.ticks(from, to).map(([x, name]) => {
          const made = tag("span", x + name.length * 4 <= width ? name : "", x < 8 ? "first" : "");
          made.style.left = `${x}px`;
          return made;
        }),
      );
      if (!range) continue;
      const made = tag("i"),
        box = this.boxOf({ range });
      Object.assign(made.style, { left: `${box.x}px`, width: `${Math.max(box.width, 1)}px` });
      axis.append(made);
    }
  }

  // The action or idle time under the pointer; null outside of the lanes.
  at(event) {
    const { model } = this,
      bounds = this.svg.getBoundingClientRect();
    const x = event.clientX - bounds.left,
      y = event.clientY - bounds.top,
      row = this.rows[Math.floor(y / this.pitch)];
    if (!row || x < 0) return null;
    if (row.band) return row;
    const rank = row.first;
    const moment = (x + this.left) / this.scale,
      reach = 2 / this.scale;
    const low = model.first[rank],
      high = model.first[rank + 1];
    let place = above(model.start, moment, low, high) - 1;
    if (place > low && model.half[place] === 2 && y - this.rowOf[rank] * this.pitch - this.strip < this.lane / 2)
      place -= 1;
    for (const [candidate, slack] of [
      [place, 0],
      [place, reach],
      [place + 1, reach],
    ]) {
      if (
        candidate >= low &&
        candidate < high &&
        model.start[candidate] - slack <= moment &&
        moment <= model.end[candidate] + slack
      )
        return { place: candidate };
    }
    const [idle] = model.idleIn(rank, moment, moment + 1e-12 * this.span);
    return idle ? { idle } : null;
  }

  hover(over, event = null) {
    this.hovered = over?.band ? null : over;
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
    const range = this.spanning ?? this.chosen?.range;
    if (range) return box({ range }, "range");
    if (!this.chosen) return look.critical ? this.path() : this.first();
    const { place, idle } = this.chosen,
      { model } = this;
    if (idle) {
      const next = model.next(idle.rank, idle.end),
        last = next < 0 ? null : model.waited(next);
      if (last) {
        box({ place: last[0] }, "needs");
        this.arrow(last[0], next, "needs");
      }
    } else {
      for (const giver of this.linked(model.needs(place))) {
        box({ place: giver }, "needs");
        this.arrow(giver, place, "needs");
      }
      for (const needer of this.linked(model.gives(place))) {
        box({ place: needer }, "gives");
        this.arrow(place, needer, "gives");
      }
    }
    box(this.chosen, "chosen");
  }

  // Without a click: what the longest idle time waits for.
  first(painter) {
    const wait = !this.crowded && look.now === null && look.view === "stack" && this.model.longestWait;
    if (wait && !this.shut(wait[0].rank)) this.arrow(wait[1], wait[2], "needs", this.boxOf({ idle: wait[0] }), painter);
  }

  // From each action of the critical path to the next on another rank.
  path() {
    const { critical, rank } = this.model;
    let before = -1;
    for (const place of this.crowded ? [] : critical) {
      if (before >= 0 && rank[before] !== rank[place]) this.arrow(before, place, "path");
      before = place;
    }
  }

  linked(places) {
    return places.length > 24 ? [] : places;
  } // an all-reduce needs every gradient of its stage

  // From the end of an action to the begin of another, or to the end of an idle time, by the edges that face each
  // other; on one rank, over it.
  arrow(giver, needer, name, idle = null, painter = svgPainter(this.mark)) {
    const from = this.boxOf({ place: giver }),
      to = idle ?? this.boxOf({ place: needer });
    const x1 = from.x + from.width - Math.min(8, from.width / 3),
      x2 = idle ? to.x + to.width - Math.min(8, to.width / 4) : to.x + Math.min(8, to.width / 3);
    if (Math.max(x1, x2) < -400 || Math.min(x1, x2) > this.width + 400) return;
    const down = Math.sign(to.y - from.y),
      [y1, y2] = [from.y + (down > 0 && from.height), to.y + (down < 0 && to.height)],
      turn = down ? Math.atan2(y2 - y1, x2 - x1) : Math.PI / 2,
      side = (by) => `M${x2} ${y2}l${-7 * Math.cos(turn + by)} ${-7 * Math.sin(turn + by)}`,
      shaft = `M${x1} ${y1}${down ? "L" : `C${x1} ${y1 - 12} ${x2} ${y2 - 12} `}${x2} ${y2}`,
      colour = { needs: "--need", gives: "--give" }[name] ?? "--text";
    painter.path(shaft + side(0.45) + side(-0.45), colour, `arrow ${name}${idle ? " first" : ""}`);
  }

  // Scroll so that an action or an idle time is visible.
  reveal(each) {
    const rank = each.idle?.rank ?? this.model.rank[each.place];
    if (rank !== undefined && this.shut(rank)) this.toggleBand({ first: rank - (rank % BAND) });
    const box = this.boxOf(each);
    if (box.x < 0 || box.x + box.width > this.width) this.scroller.scrollLeft += box.x - (this.width - box.width) / 2;
    this.redraw();
  }

  // The whole trace in a thin band, which can be dragged.
  drawMap() {
    this.map.hidden = this.zoom <= 1;
    if (this.map.hidden) return;
    const { width, model } = this,
      height = 24,
      context = this.map.getContext("2d"),
      { whole } = this;
    if (whole.shown !== palette || whole.found !== model.found || whole.width !== width) {
      Object.assign(whole, { shown: palette, found: model.found, width });
      whole.begin(width, height);
      whole.rect({ x: 0, y: 0, width, height }, "--idle", 1);
      this.busyShares(Math.round(width)).forEach(
        (share, column) =>
          share > 0 && whole.rect({ x: column, y: height * (1 - share), width: 1, height: height * share }, "--F0", 1),
      );
      for (const each of model.found)
        whole.rect({ x: ((each.start ?? model.start[each]) / this.span) * width, y: 0, width: 2, height }, "--text", 1);
      whole.end();
      Object.assign(this.map, { width: whole.wide, height: whole.high });
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(whole.canvas, 0, 0);
    context.scale(whole.ratio, whole.ratio);
    // What is not visible is faint, and nothing lies over the edges of what is.
    const from = this.left / this.zoom,
      until = from + Math.max(width / this.zoom, 3);
    Object.assign(context, { fillStyle: css("--paper"), globalAlpha: 0.7 });
    context.fillRect(0, 0, from, height);
    context.fillRect(until, 0, width - until, height);
  }

  // For each column of the map, the share of all ranks' time that is work.
  busyShares(columns) {
    if (this.shown?.length === columns) return this.shown;
    const { model } = this,
      busy = new Float64Array(columns),
      step = this.span / columns;
    for (let place = 0; place < model.count; place += 1) {
      for (
        let column = Math.floor(model.start[place] / step);
        column < columns && column * step < model.end[place];
        column += 1
      ) {
        const part = Math.min(model.end[place], (column + 1) * step) - Math.max(model.start[place], column * step);
        busy[column] += ((model.half[place] ? 0.5 : 1) * part) / step / model.lanes.length;
      }
    }
    return (this.shown = busy);
  }
}

function atLeast(box, width) {
  return box.width >= width ? box : { ...box, x: box.x - (width - box.width) / 2, width };
}

// Make the elements of a holder anew: the one that had the focus has it afterwards, found by its text.
function keepFocus(holder, change) {
  const name = holder.contains(document.activeElement) && document.activeElement.textContent;
  change();
  if (name) [...holder.querySelectorAll("button")].find((each) => each.textContent === name)?.focus();
}

function toggle(set, value) {
  if (!set.delete(value)) set.add(value);
}
