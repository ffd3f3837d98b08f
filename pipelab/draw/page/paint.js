// Two ways to paint the same: an element for each bar, which a reader can select and a test can find, or pixels.
const SVG = document.getElementById("definitions").namespaceURI;

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

let palette = null; // colours of the style sheet, read once for each theme
function css(name) {
  palette ??= new Map();
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return palette.get(name);
}

// How many times larger than 12 pixels type is, and rows with it: they grow with the window.
let grow = 1;
function sized(size = innerWidth / (look.fill ? 900 : 1280)) {
  grow = Math.min(Math.max(size, 1), 2.5);
  document.documentElement.style.setProperty("--grow", grow);
}

// How wide a text is.
const letters = new Map(),
  measure = tag("canvas").getContext("2d");
function wide(text) {
  measure.font = "12px system-ui, sans-serif";
  let sum = 0;
  for (const letter of text) {
    if (!letters.has(letter)) letters.set(letter, measure.measureText(letter).width);
    sum += letters.get(letter);
  }
  return sum * grow;
}

// Where a text stands in the visible part of a box: across, upright, or nowhere.
function place(box, text, right) {
  const begin = Math.max(box.x, 0),
    visible = Math.min(box.x + box.width, right) - begin;
  const spot = { x: begin + visible / 2, y: box.y + box.height / 2 },
    long = wide(text) + 3;
  if (long <= visible && box.height >= 12 * grow) return spot;
  return long <= box.height + 5 * grow && visible >= 13 * grow ? { ...spot, upright: true } : null;
}

function svgPainter(group) {
  const fill = (colour) => `fill:var(${colour})`;
  return {
    rect: (box, colour, opacity, attributes) =>
      group.append(
        element("rect", { ...box, style: fill(colour), "fill-opacity": opacity === 1 ? null : opacity, ...attributes }),
      ),
    gap: (box, { ground, pattern }, attributes) => {
      const rect = (style, more) => group.append(element("rect", { ...box, style, ...more }));
      rect(`fill:var(--${ground});stroke:var(--${ground}-edge)`, attributes);
      if (pattern && box.width > 6) rect(`fill:${pattern};pointer-events:none`, {});
    },
    text: (box, text, colour, opacity, attributes, right) => {
      const spot = place(box, text, right);
      if (spot)
        group.append(
          element(
            "text",
            {
              ...attributes,
              x: spot.x,
              y: spot.y,
              transform: spot.upright ? `rotate(-90 ${spot.x} ${spot.y})` : null,
              style: fill(opacity === 1 ? colour : "--text"),
            },
            text,
          ),
        );
    },
    note: (x, y, text, attributes) => group.append(element("text", { x, y, ...attributes }, text)),
    path: (d, colour, name) => group.append(element("path", { d, class: name, style: `stroke:var(${colour})` })),
    columns: (shares, columns, { y, height }, width, opacities) => {
      const wide = width / columns;
      const below = new Float64Array(columns);
      [...KINDS].forEach((letter, kind) => {
        let path = "";
        for (let column = 0; column < columns; column += 1) {
          const high = Math.min(shares[KINDS.length * column + kind], 1 - below[column]);
          if (high <= 0) continue;
          below[column] += high;
          const top = y + height * (1 - below[column]);
          const [left, upper, right, down, back] = [column * wide, top, wide, height * high, -wide].map((each) =>
            each.toFixed(2),
          );
          path += `M${left} ${upper}h${right}v${down}h${back}z`;
        }
        const style = fill(`--${letter}0`);
        if (path) group.append(element("path", { d: path, style, "fill-opacity": opacities[kind] }));
      });
    },
  };
}

// Rectangles are written into memory and put on the canvas at once, many times faster than one by one; texts follow.
class Pixels {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  // Begin a picture; `shift` is how far from its left edge x = 0 is.
  begin(width, height, shift = 0, ratio = window.devicePixelRatio || 1) {
    const wide = Math.round((width + shift) * ratio),
      high = Math.round(height * ratio),
      { canvas } = this;
    if (canvas.width !== wide || canvas.height !== high || !this.image) {
      Object.assign(canvas, { width: wide, height: high });
      Object.assign(canvas.style, { width: `${width + shift}px`, height: `${height}px` });
      this.image = this.context.createImageData(wide, high);
      this.data = new Int32Array(this.image.data.buffer);
    } else this.data.fill(0);
    Object.assign(this, { wide, high, ratio, shift, later: [], colours: new Map() });
    return this;
  }

  // A colour as a pixel in memory, where red comes first.
  pixel(name, opacity = 1) {
    const key = opacity === 1 ? name : name + opacity;
    let found = this.colours.get(key);
    if (found === undefined) {
      const [red, green, blue] = [1, 3, 5].map((at) => parseInt(css(name).slice(at, at + 2), 16));
      found = (Math.round(255 * opacity) << 24) | (blue << 16) | (green << 8) | red;
      this.colours.set(key, found);
    }
    return found;
  }

  rect(box, colour, opacity, { class: name = "" } = {}) {
    const { data, wide, ratio } = this,
      begin = (box.x + this.shift) * ratio;
    const left = Math.max(0, Math.round(begin)),
      top = Math.max(0, Math.round(box.y * ratio));
    const bottom = Math.min(this.high, Math.round((box.y + box.height) * ratio));
    let right = Math.round(begin + (box.width > 4 ? box.width - 0.7 : box.width) * ratio);
    right = Math.min(wide, Math.max(right, Math.round(begin) + 1));
    const pixel = this.pixel(colour, opacity);
    for (let row = top; row < bottom; row += 1) {
      const line = row * wide;
      if (right - left > 24) data.fill(pixel, line + left, line + right);
      else for (let at = line + left; at < line + right; at += 1) data[at] = pixel;
    }
    if (name && /critical|found|running|outline/.test(name))
      this.later.push((context) => {
        context.strokeStyle = css("--text");
        context.strokeRect(box.x, box.y, box.width, box.height);
      });
  }

  // An idle time: its ground, its hatch and its border.
  gap(box, { ground, hatch }, attributes) {
    this.rect(box, `--${ground}`, 1, attributes);
    const { data, wide, ratio } = this,
      [left, right] = [box.x + this.shift, box.x + this.shift + box.width].map((x) => Math.round(x * ratio)),
      [top, bottom] = [box.y, box.y + box.height].map((y) => Math.round(y * ratio)),
      [edge, line] = [this.pixel(`--${ground}-edge`), this.pixel(`--${ground}-lines`)];
    const step = Math.round(8 * ratio),
      lies = { "-": (_, y) => !(y % step), "|": (x) => !(x % step) };
    lies["/"] = (x, y) => !((x + y) % step);
    lies["\\"] = (x, y) => !((x - y + bottom) % step);
    lies.x = (x, y) => lies["/"](x, y) || lies["\\"](x, y);
    lies["."] = (x, y) => lies["-"](x, y) && lies["|"](x, y);
    const hatched = right - left > 6 && lies[hatch],
      walls = right - left > 4;
    for (let y = Math.max(top, 0); y < Math.min(bottom, this.high); y += 1)
      for (let x = Math.max(left, 0); x < Math.min(right, wide); x += 1)
        if (y === top || y === bottom - 1 || (walls && (x === left || x === right - 1))) data[y * wide + x] = edge;
        else if (hatched && hatched(x, y)) data[y * wide + x] = line;
  }

  // Each column as its shares of time, one kind above the other, idle time on top.
  // Where two share a pixel, it is mixed.
  columns(shares, columns, { y, height }, width, opacities) {
    const { data, wide, ratio, shift } = this,
      from = Math.round(shift * ratio),
      step = (width * ratio) / columns;
    const top = Math.round(y * ratio),
      rows = Math.min(Math.round(height * ratio), this.high - top);
    const of = (name) => [0, 8, 16].map((by) => (this.pixel(name) >> by) & 255),
      paper = of("--paper");
    const channels = Float64Array.from(
      [...[...KINDS].map((letter) => `--${letter}0`), "--idle"].flatMap((name, kind) =>
        of(name).map((channel, at) => Math.round(paper[at] + (channel - paper[at]) * (opacities[kind] ?? 1))),
      ),
    );
    const colours = Int32Array.from({ length: KINDS.length + 1 }, (_, kind) => {
      const [red, green, blue] = channels.subarray(3 * kind);
      return (255 << 24) | (blue << 16) | (green << 8) | red;
    });
    const mixed = new Float64Array(3);
    const write = (row, left, right, pixel) => {
      for (let at = (top + rows - 1 - row) * wide + left, end = at + right - left; at < end; at += 1) data[at] = pixel;
    };
    for (let column = 0; column < columns; column += 1) {
      const left = from + Math.round(column * step),
        right = from + Math.round((column + 1) * step);
      let filled = 0;
      for (let kind = 0; kind <= KINDS.length; kind += 1) {
        const share = kind < KINDS.length ? shares[KINDS.length * column + kind] : 1,
          until = Math.min(rows, filled + share * rows),
          full = Math.floor(until);
        if (until <= filled) continue;
        let row = Math.floor(filled),
          part = Math.min(until, row + 1) - filled;
        filled = until;
        if (part < 1) {
          // it shares a pixel with the kind below
          for (let at = 0; at < 3; at += 1) mixed[at] += part * channels[3 * kind + at];
          if (full === row) continue;
          write(row, left, right, (255 << 24) | ((mixed[2] + 0.5) << 16) | ((mixed[1] + 0.5) << 8) | (mixed[0] + 0.5));
          mixed.fill(0);
          row += 1;
        }
        for (; row < full; row += 1) write(row, left, right, colours[kind]);
        part = until - full;
        if (part > 0) for (let at = 0; at < 3; at += 1) mixed[at] += part * channels[3 * kind + at];
      }
    }
  }

  text(box, text, colour, opacity, attributes, right) {
    const spot = place(box, text, right);
    if (!spot) return;
    this.later.push((context) => {
      context.fillStyle = css(opacity === 1 ? colour : "--text");
      if (!spot.upright) return context.fillText(text, spot.x, spot.y);
      context.save();
      context.translate(spot.x, spot.y);
      context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    });
  }

  path(d, colour) {
    this.later.push((context) => {
      Object.assign(context, { strokeStyle: css(colour), lineWidth: 1.25 });
      context.stroke(new Path2D(d));
    });
  }

  note(x, y, text, { class: name = "" }) {
    this.later.push((context) => {
      context.save();
      Object.assign(context, {
        textAlign: name === "axis-text" ? "center" : "start",
        textBaseline: "alphabetic",
        fillStyle: css("--text"),
        globalAlpha: 1,
      });
      context.fillText(text, x, y);
      context.restore();
    });
  }

  end() {
    const { context, ratio } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.putImageData(this.image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, this.shift * ratio, 0);
    Object.assign(context, {
      textAlign: "center",
      textBaseline: "middle",
      font: `${12 * grow}px system-ui, sans-serif`,
      globalAlpha: 1,
    });
    for (const paint of this.later) paint(context);
  }
}
