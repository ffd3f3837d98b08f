// The whole state in the address, so that a link shows the same: zoom, selection, layers.
let keeping = null;
hooks.keep = () => {
  clearTimeout(keeping);
  keeping = setTimeout(() => {
    const hash = hashOf();
    try {
      history.replaceState(null, "", hash || " ");
    } catch {
      /* a frame without an address */
    }
  }, 200);
};
hooks.copy = () => navigator.clipboard?.writeText(location.href.split("#")[0] + hashOf());

const digits = (value, count) => Number(value.toPrecision(count));

function hashOf() {
  const [first] = timelines;
  const parts = ["v=1"];
  if (first.zoom > 1) {
    const shown = [first.left / first.scale, (first.left + first.width) / first.scale];
    parts.push(`z=${shown.map((each) => digits(each, 6)).join(",")}`);
  }
  if (state.chosen) parts.push(`s=${timelines.indexOf(state.timeline)}:${hashOfChosen()}`);
  const layers = [look.critical && "c", look.memory && "a"].filter(Boolean);
  if (layers.length) parts.push(`l=${layers.join(",")}`);
  if (look.view !== data.view) parts.push(`w=${look.view}`);
  if (look.colour !== "kind" || look.view === "diff") parts.push(`k=${look.colour}`);
  return parts.length > 1 ? `#${parts.join("&")}` : "";
}

function hashOfChosen() {
  const { model } = state.timeline;
  const { place, idle, range } = state.chosen;
  if (range) return `from.${digits(range.from, 7)}to${digits(range.to, 7)}`;
  if (idle) return `idle.${idle.rank}.${digits(idle.start, 7)}`;
  return `${model.name(place)}.${model.rank[place]}`;
}

function restore(hash) {
  const parts = new Map(
    hash
      .replace(/^#/, "")
      .split("&")
      .map((each) => each.split("=", 2)),
  );
  if (parts.get("v") !== "1") return;
  const layers = (parts.get("l") ?? "").split(",");
  setLook("critical", layers.includes("c"));
  setLook("memory", layers.includes("a"));
  if (compared.length && parts.get("w") in VIEWS) setView(parts.get("w"));
  if ([...document.getElementById("colour").options].some((each) => each.value === parts.get("k")))
    setLook("colour", parts.get("k"));
  restoreSelection(parts.get("s") ?? ""); // before the zoom: the panel takes a part of the width
  const [from, to] = (parts.get("z") ?? "").split(",").map(Number);
  if (from >= 0 && to > from) timelines[0].show(from, to);
}

function restoreSelection(text) {
  const chosen = /^(\d+):(?:idle\.(\d+)\.([\d.e+-]+)|from\.([\d.e+-]+)to([\d.e+-]+)|(\w+)\.(\d+))$/.exec(text),
    timeline = chosen && timelines[chosen[1]];
  if (!timeline) return;
  const { model } = timeline;
  if (chosen[4]) {
    const [from, to] = [Number(chosen[4]), Number(chosen[5])];
    if (from >= 0 && to > from && to <= model.span * (1 + near)) select(timeline, { range: { from, to } });
  } else if (chosen[6]) {
    const place = model.named(chosen[6]).find((each) => model.rank[each] === Number(chosen[7]));
    if (place !== undefined) select(timeline, { place });
  } else {
    const idle = model.idle.find(
      (each) => each.rank === Number(chosen[2]) && Math.abs(each.start - Number(chosen[3])) <= 1e-5 * model.span,
    );
    if (idle) select(timeline, { idle });
  }
}

// What a page around this one sends in place of the data: see `content` in page.py.
function replace(content) {
  const [heads = [], ...rows] = content.table, // one trace has none
    first = !timelines.length;
  const line = (name, cells) => {
    const made = tag("tr");
    made.append(...cells.map((cell) => tag(name, cell)));
    if (name === "td")
      heads.forEach((head, at) => {
        made.children[at].dataset.head = head;
      });
    return made;
  };
  document.title = document.querySelector("h1").textContent = content.title;
  document.querySelector(".subtitle").textContent = content.subtitle;
  document
    .querySelector(".figures table")
    .replaceChildren(line("th", heads), ...rows.map((cells) => line("td", cells)));
  const hash = first ? "" : hashOf(); // the same zoom, selection and layers
  show(content.data);
  restore(hash);
  if (!first) return;
  start();
  follow();
}
addEventListener("message", (event) => {
  if (event.data?.pipelabContent) replace(event.data.pipelabContent);
});

function follow() {
  restore(location.hash);
  addEventListener("hashchange", () => restore(location.hash));
}
if (given) follow();
