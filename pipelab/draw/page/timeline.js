const SVG = document.getElementById("definitions").namespaceURI;
const AXIS = 44; // pixels below the lanes: ticks, their times, the unit
const FEW = 3000; // up to so many visible bars, each is an element of its own

function element(name, attributes = {}, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function tag(name, text, className = "") {
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

class Timeline {
  constructor(trace, index, span, changed) {
    this.trace = trace;
    this.span = span || 1;
    this.changed = changed; // called with this timeline when it was zoomed or scrolled
    this.zoom = 1;
    this.chosen = null; // { rank, index }
    this.halves = trace.ranks.map((rank) => new Set(rank.halves));
    this.where = new Map(); // name of an action -> rank, index
    trace.ranks.forEach((rank, r) => rank.actions.forEach((name, i) => this.where.set(name, { rank: r, index: i })));
    const count = trace.ranks.length;
    this.lane = count <= 8 ? 34 : count <= 16 ? 26 : count <= 32 ? 20 : 15;
    this.build(index);
  }

  build(index) {
    const section = tag("section", "");
    if (data.traces.length > 1) section.append(tag("h2", this.trace.name));
    const grid = tag("div", "", "timeline");
    const gutter = tag("div", "", "gutter");
    const heads = tag("div", "", "heads");
    heads.append(tag("span", ""), tag("span", "busy"), tag("span", "peak"));
    gutter.append(heads);
    this.trace.ranks.forEach((rank, r) => {
      const row = tag("div", "");
      row.style.height = `${this.lane}px`;
      row.append(tag("span", `rank ${r}`), tag("span", rank.busy), tag("span", rank.peak));
      if (rank.lane) row.title = rank.lane;
      gutter.append(row);
    });
    this.scroller = tag("div", "", "scroller");
    this.scroller.tabIndex = 0;
    this.scroller.setAttribute("role", "application");
    this.scroller.setAttribute("aria-label", `timeline of ${this.trace.name}; arrow keys go from action to action`);
    this.spacer = tag("div", "", "spacer");
    this.svg = element("svg", { height: this.lane * this.trace.ranks.length + AXIS, "data-trace": index });
    this.spacer.append(this.svg);
    this.scroller.append(this.spacer);
    grid.append(gutter, this.scroller);
    section.append(grid);
    document.getElementById("timelines").append(section);

    this.scroller.addEventListener("scroll", () => { this.draw(); this.changed(this); });
    this.scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.scroller.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("pointermove", (event) => this.choose(this.at(event), event));
    this.svg.addEventListener("pointerdown", (event) => this.choose(this.at(event), event));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    new ResizeObserver(() => this.draw()).observe(this.scroller);
  }

  get width() { return this.scroller.clientWidth; }
  get scale() { return (this.width * this.zoom) / this.span; } // pixels per unit of time

  // Zoom, keeping the time at `x` pixels from the left edge where it is.
  setZoom(zoom, x = this.width / 2) {
    const time = (this.scroller.scrollLeft + x) / this.scale;
    const most = Math.max(1, Math.min(8e6 / this.width, (200 * this.span) / ((this.trace.typical || this.span) * this.width)));
    this.zoom = Math.min(Math.max(zoom, 1), most);
    this.spacer.style.width = `${this.width * this.zoom}px`;
    this.scroller.scrollLeft = time * this.scale - x;
    this.draw();
    this.changed(this);
  }

  follow(other) {
    if (this.zoom === other.zoom && this.scroller.scrollLeft === other.scroller.scrollLeft) return;
    this.zoom = other.zoom;
    this.spacer.style.width = `${this.width * this.zoom}px`;
    this.scroller.scrollLeft = other.scroller.scrollLeft;
    this.draw();
  }

  // The box of an action in pixels, relative to what is visible.
  box(rank, index) {
    const { starts, ends } = this.trace.ranks[rank];
    const x = starts[index] * this.scale - this.scroller.scrollLeft;
    const upper = this.halves[rank].has(index), lower = this.halves[rank].has(index - 1);
    const high = this.lane * 0.86, half = upper || lower ? 0.5 : 1;
    const y = rank * this.lane + this.lane * 0.07 + (lower ? high / 2 : 0);
    return { x, y, width: Math.max((ends[index] - starts[index]) * this.scale, 1), height: high * half };
  }

  draw() {
    const width = this.width, left = this.scroller.scrollLeft;
    if (!width) return;
    this.svg.setAttribute("width", width);
    const lanes = element("g"), bars = element("g"), labels = element("g");
    const from = left / this.scale, to = (left + width) / this.scale;
    const ranges = this.trace.ranks.map((rank) => [above(rank.ends, from), above(rank.starts, to)]);
    const few = ranges.reduce((sum, [first, last]) => sum + last - first, 0) <= FEW;
    // Where full labels do not fit, the micro-batch alone, as the colour says the kind; never without the stage;
    // where not even that fits, from the bottom to the top of the bar.
    const widest = Math.max(1, ...this.trace.ranks.map((rank) => (rank.actions.length ? decode(this.trace, rank.actions.at(-1)).label.length : 0)));
    const short = !this.trace.namesStages && this.trace.typical * this.scale < widest * 7.5 + 3;
    const paths = new Map();
    ranges.forEach(([first, last], rank) => {
      const end = Math.min(this.trace.span * this.scale - left, width);
      lanes.append(element("rect", { class: "lane", x: -left, y: (rank + 0.07) * this.lane, width: Math.max(end + left, 0), height: this.lane * 0.86 }));
      for (let index = first; index < last; index += 1) {
        const action = decode(this.trace, this.trace.ranks[rank].actions[index]);
        const box = this.box(rank, index);
        const colour = action.letter + ((action.microbatch ?? 0) % 2);
        if (few) {
          const thin = box.width < 4 ? " thin" : "";
          bars.append(element("rect", { class: `bar${thin}`, ...box, style: `fill:var(--${colour})`, "data-action": action.name }));
        } else {
          const exact = (this.trace.ranks[rank].ends[index] - this.trace.ranks[rank].starts[index]) * this.scale;
          const piece = `M${box.x.toFixed(2)} ${box.y.toFixed(1)}h${exact.toFixed(3)}v${box.height.toFixed(1)}h${(-exact).toFixed(3)}z`;
          if (!paths.has(colour)) paths.set(colour, []);
          paths.get(colour).push(piece);
        }
        const text = short && action.microbatch !== null ? String(action.microbatch) : action.label;
        const begin = Math.max(box.x, 0), visible = Math.min(box.x + box.width, width) - begin;
        const x = begin + visible / 2, y = box.y + box.height / 2, long = text.length * 7.5 + 3;
        const place = long <= visible && box.height >= 12 ? {} : long <= box.height && visible >= 13 ? { transform: `rotate(-90 ${x} ${y})` } : null;
        if (place) labels.append(element("text", { class: "label", x, y, ...place, style: `fill:var(--${action.letter}-ink)` }, text));
      }
    });
    if (paths.size) lanes.append(...this.ground(ranges));
    for (const [colour, pieces] of paths) bars.append(element("path", { d: pieces.join(""), style: `fill:var(--${colour})` }));
    this.mark = element("g");
    this.svg.replaceChildren(lanes, bars, labels, this.axis(from, to), this.mark);
    this.outline();
  }

  // Where bars are thinner than a pixel, each covers a part of it, and the idle lane would shine through between two
  // that touch: so each unbroken run of work is laid under its bars, in the colour of the kind that takes most of it.
  ground(ranges) {
    const pieces = new Map(), left = this.scroller.scrollLeft, high = (this.lane * 0.86).toFixed(1);
    ranges.forEach(([first, last], rank) => {
      const { actions, starts, ends } = this.trace.ranks[rank];
      for (let index = first; index < last; ) {
        const begin = index, lasting = new Map();
        let end = starts[index];
        for (; index < last && starts[index] <= end + 1e-6 * this.span; index += 1) {
          const { letter } = decode(this.trace, actions[index]);
          lasting.set(letter, (lasting.get(letter) ?? 0) + ends[index] - starts[index]);
          end = Math.max(end, ends[index]);
        }
        if (index === begin + 1) continue;
        const [letter] = [...lasting].reduce((most, each) => (each[1] > most[1] ? each : most));
        const x = starts[begin] * this.scale - left, y = (rank + 0.07) * this.lane, long = (end - starts[begin]) * this.scale;
        if (!pieces.has(letter)) pieces.set(letter, []);
        pieces.get(letter).push(`M${x.toFixed(2)} ${y.toFixed(1)}h${long.toFixed(3)}v${high}h${(-long).toFixed(3)}z`);
      }
    });
    return [...pieces].map(([letter, each]) => element("path", { d: each.join(""), style: `fill:var(--${letter}0)` }));
  }

  axis(from, to) {
    const group = element("g"), y = this.trace.ranks.length * this.lane + 2, left = this.scroller.scrollLeft;
    group.append(element("line", { class: "base", x1: 0, x2: this.width, y1: y, y2: y }));
    const step = niceStep(90 / this.scale);
    for (let count = Math.ceil(from / step - 1e-9); count * step <= to + 1e-9 * step; count += 1) {
      const x = count * step * this.scale - left;
      group.append(element("line", { class: "tick", x1: x, x2: x, y1: y, y2: y + 5 }));
      const name = number(count * step);
      const fits = x + name.length * 4 <= this.width;
      if (fits) group.append(element("text", { class: `axis-text${x < 8 ? " first" : ""}`, x, y: y + 18 }, name));
    }
    group.append(element("text", { class: "axis-name", x: 0, y: y + 35 }, `time (${this.trace.unit})`));
    return group;
  }

  // The action under the pointer, or null where the rank is idle.
  at(event) {
    const bounds = this.svg.getBoundingClientRect();
    const x = event.clientX - bounds.left, y = event.clientY - bounds.top;
    const rank = Math.floor(y / this.lane);
    const lane = this.trace.ranks[rank];
    if (!lane) return null;
    const time = (x + this.scroller.scrollLeft) / this.scale, reach = 2 / this.scale;
    let index = above(lane.starts, time) - 1;
    if (this.halves[rank].has(index - 1) && y - rank * this.lane < this.lane / 2) index -= 1;
    for (const [candidate, slack] of [[index, 0], [index, reach], [index + 1, reach]]) {
      const hit = lane.starts[candidate] - slack <= time && time <= lane.ends[candidate] + slack;
      if (hit) return { rank, index: candidate };
    }
    return null;
  }

  choose(chosen, event = null) {
    this.chosen = chosen;
    this.outline();
    if (!chosen) { details.hidden = true; return; }
    explain(this.trace, chosen);
    const bounds = this.svg.getBoundingClientRect(), box = this.box(chosen.rank, chosen.index);
    const x = event ? event.clientX + 14 : bounds.left + box.x;
    const y = event ? event.clientY + 16 : bounds.top + box.y + box.height + 8;
    details.hidden = false;
    const size = details.getBoundingClientRect();
    const turned = y + size.height + 8 > innerHeight ? y - size.height - (event ? 32 : box.height + 16) : y;
    details.style.left = `${Math.max(8, Math.min(x, innerWidth - size.width - 8))}px`;
    details.style.top = `${Math.max(8, turned)}px`;
  }

  outline() {
    if (!this.mark) return;
    this.mark.replaceChildren();
    if (!this.chosen) return;
    const { rank, index } = this.chosen;
    const cause = this.where.get(this.trace.ranks[rank].waits[index]);
    if (cause) this.mark.append(element("rect", { class: "cause", ...this.box(cause.rank, cause.index) }));
    this.mark.append(element("rect", { class: "chosen", ...this.box(rank, index) }));
  }

  key(event) {
    const ranks = this.trace.ranks;
    const { rank, index } = this.chosen ?? { rank: 0, index: -1 };
    const last = ranks[rank].actions.length - 1;
    const beside = (other) => Math.min(Math.max(above(ranks[other].starts, ranks[rank].starts[Math.max(index, 0)]) - 1, 0), ranks[other].actions.length - 1);
    const moves = {
      ArrowRight: () => ({ rank, index: Math.min(index + 1, last) }),
      ArrowLeft: () => ({ rank, index: Math.max(index - 1, 0) }),
      ArrowDown: () => { const next = Math.min(rank + 1, ranks.length - 1); return { rank: next, index: beside(next) }; },
      ArrowUp: () => { const next = Math.max(rank - 1, 0); return { rank: next, index: beside(next) }; },
      Home: () => ({ rank, index: 0 }),
      End: () => ({ rank, index: last }),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      event.preventDefault();
      const chosen = moves[event.key]();
      if (ranks[chosen.rank].actions.length === 0) return;
      this.reveal(chosen);
      this.choose(chosen);
    } else if (event.key === "+" || event.key === "=") this.setZoom(this.zoom * 1.5);
    else if (event.key === "-") this.setZoom(this.zoom / 1.5);
    else if (event.key === "0") this.setZoom(1);
    else if (event.key === "Escape") this.choose(null);
  }

  // Scroll so that an action is visible.
  reveal({ rank, index }) {
    const box = this.box(rank, index);
    if (box.x < 0 || box.x + box.width > this.width) {
      this.scroller.scrollLeft += box.x - (this.width - box.width) / 2;
      this.draw();
    }
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // plain wheels scroll, as everywhere
    event.preventDefault();
    const x = event.clientX - this.scroller.getBoundingClientRect().left;
    this.setZoom(this.zoom * Math.exp(-event.deltaY / 300), x);
  }
}
