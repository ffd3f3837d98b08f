const details = document.getElementById("details");

// Say everything about one action in the details box.
function explain(trace, { rank, index }) {
  const lane = trace.ranks[rank], action = decode(trace, lane.actions[index]);
  const start = lane.starts[index], end = lane.ends[index];
  const list = document.createElement("dl");
  const say = (name, value) => list.append(tag("dt", name), tag("dd", value));
  say("stage", action.stage);
  if (action.microbatch !== null) say("micro-batch", action.microbatch);
  say("rank", lane.lane ? `${rank} (${lane.lane})` : rank);
  say("start", time(start, trace.unit));
  say("end", time(end, trace.unit));
  say("duration", time(end - start, trace.unit));
  say("waited for", waited(trace, rank, index));
  details.replaceChildren(tag("h3", `${action.name}, ${data.kinds[action.letter]}`), list);
}

function waited(trace, rank, index) {
  const lane = trace.ranks[rank], start = lane.starts[index];
  const before = lane.halves.includes(index - 1) ? index - 2 : index - 1;
  const free = before < 0 ? 0 : lane.ends[before];
  const idle = time(start - free, trace.unit);
  const giver = lane.waits[index];
  if (giver !== "-") {
    const from = trace.ranks.findIndex((other) => other.actions.includes(giver));
    const behind = lane.behind[index] ? ` (${lane.behind[index]})` : "";
    return `${giver} on rank ${from}, there at ${number(lane.there[index])}${behind}; the rank was idle for ${idle}`;
  }
  if (start - free > 1e-6 * trace.span) return `nothing it needs: it started ${idle} after its rank was free`;
  return "nothing: it started when its rank was free";
}

function legend() {
  const place = document.querySelector(".legend");
  for (const [letter, word] of Object.entries(data.kinds)) {
    const entry = tag("span", `${letter} ${word}`);
    entry.style.setProperty("--swatch", `var(--${letter}0)`);
    place.append(entry);
  }
  place.append(tag("span", "idle", "idle"));
}

const longest = Math.max(...data.traces.map((trace) => trace.span));
const timelines = [];
const changed = (source) => { if (data.shared) timelines.forEach((each) => { if (each !== source) each.follow(source); }); };
data.traces.forEach((trace, at) => timelines.push(new Timeline(trace, at, data.shared ? longest : trace.span, changed)));
timelines.forEach((each) => each.draw());
legend();
const steps = { in: (each) => each.zoom * 1.5, out: (each) => each.zoom / 1.5, fit: () => 1 };
document.querySelectorAll("[data-zoom]").forEach((button) =>
  button.addEventListener("click", () => timelines.forEach((each) => each.setZoom(steps[button.dataset.zoom](each)))));
document.querySelectorAll("[hidden]:not(#details)").forEach((each) => { each.hidden = false; });
