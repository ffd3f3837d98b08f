// What hands do to a timeline: wheels, drags, fingers, clicks.
function gestures(line) {
  const { svg, scroller } = line;
  const xOf = (event) => event.clientX - scroller.getBoundingClientRect().left;
  scroller.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // plain wheels scroll, as everywhere
      event.preventDefault();
      line.setZoom(line.zoom * Math.exp(-event.deltaY / 300), xOf(event));
    },
    { passive: false },
  );
  svg.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse" && !event.buttons) line.hover(line.at(event), event);
  });
  svg.addEventListener("pointerleave", () => line.hover(null));
  svg.addEventListener("click", (event) => {
    if (line.dragged) return;
    const found = line.at(event);
    if (found?.band) line.toggleBand(found.band);
    else line.choose(found);
    scroller.focus({ preventScroll: true });
  });
  drags(line, svg, xOf, false);
  for (const axis of line.axes) drags(line, axis, xOf, true);
  fingers(line, xOf);
  const move = (event) => {
    scroller.scrollLeft = xOf(event) * line.zoom - line.width / 2;
  };
  line.map.addEventListener("pointerdown", (event) => {
    line.map.setPointerCapture(event.pointerId);
    move(event);
  });
  line.map.addEventListener("pointermove", (event) => {
    if (event.buttons) move(event);
  });
}

// A drag moves the picture; with Shift, or on the axis, it selects a span of time. Fingers scroll, as everywhere.
function drags(line, target, xOf, onAxis) {
  let begun = null;
  const time = (event) => Math.min(Math.max((line.left + xOf(event)) / line.scale, 0), line.span);
  target.addEventListener("pointerdown", (event) => {
    line.dragged = false;
    if (event.button || (event.pointerType !== "mouse" && !onAxis)) return;
    begun = { x: event.clientX, left: line.left, spans: onAxis || event.shiftKey, time: time(event) };
  });
  target.addEventListener("selectstart", (event) => begun && event.preventDefault());
  target.addEventListener("pointermove", (event) => {
    if (!begun || (!line.dragged && Math.abs(event.clientX - begun.x) < 4)) return;
    if (!line.dragged) target.setPointerCapture(event.pointerId);
    line.dragged = true;
    if (begun.spans) {
      const [from, to] = [begun.time, time(event)].sort((a, b) => a - b);
      line.spanning = { from, to };
      line.redraw();
    } else line.scroller.scrollLeft = begun.left + begun.x - event.clientX;
  });
  const end = () => {
    const range = line.spanning;
    begun = line.spanning = null;
    if (range && range.to > range.from) line.choose({ range });
  };
  target.addEventListener("pointerup", end);
  target.addEventListener("pointercancel", end);
}

// Two fingers zoom about the time between them.
function fingers(line, xOf) {
  let before = null;
  const read = ({ touches: [one, other] }) => ({
    apart: Math.max(20, Math.abs(one.clientX - other.clientX)),
    x: (xOf(one) + xOf(other)) / 2,
  });
  const follow = (event) => {
    if (event.touches.length !== 2) return (before = null);
    event.preventDefault();
    const now = read(event);
    if (before) {
      line.setZoom((line.zoom * now.apart) / before.apart, now.x);
      line.scroller.scrollLeft -= now.x - before.x;
    }
    return (before = now);
  };
  for (const name of ["touchstart", "touchmove", "touchend"])
    line.scroller.addEventListener(name, follow, { passive: false });
}
