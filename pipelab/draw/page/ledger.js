// What is work and what is idle, over all ranks: [name, time], without what is nothing.
function totalOf(sums) {
  const whole = sums.reduce((sum, each) => sum + [...each.values()].reduce((a, b) => a + b, 0), 0);
  return ["work", ...data.reasons]
    .map((name) => [name, sums.reduce((sum, each) => sum + (each.get(name) ?? 0), 0)])
    .filter(([, each]) => each > near * whole);
}

// For each rank, its work, and its idle time by reason.
function tableOf(sums, length) {
  const parts = totalOf(sums).map(([name]) => name),
    table = tag("table"),
    head = tag("tr");
  head.append(...["rank", ...parts, "idle"].map((name) => tag("th", name)));
  table.append(head);
  sums.forEach((each, rank) => {
    const line = tag("tr"),
      lost = length - each.get("work");
    line.append(
      tag("th", `rank ${rank}`),
      ...parts.map((name) => tag("td", number(each.get(name) ?? 0))),
      tag("td", `${number(lost)} (${((100 * lost) / length).toFixed(1)} %)`),
    );
    table.append(line);
  });
  return table;
}

// A span of time that was dragged over.
function explainRange({ model }, { from, to }) {
  const sums = model.sums(from, to),
    whole = (to - from) * model.lanes.length,
    ranks = counted(model.lanes.length, "rank"),
    scroll = tag("div", "", "figures");
  scroll.append(tableOf(sums, to - from));
  return [
    tag("h3", `From ${number(from)} to ${number(to)}`),
    tag("p", `${time(to - from, model.unit)} on ${ranks}: ${equation(whole, totalOf(sums))}`),
    scroll,
  ];
}

function equation(whole, parts) {
  return `${number(whole)} = ${parts.map(([name, each]) => `${name} ${number(each)}`).join(" + ")}`;
}

// Where the time of all ranks went, as a bar and, opened, as a table.
function ledgerOf(timeline) {
  const { model } = timeline,
    whole = model.span * model.lanes.length,
    sums = model.sums(),
    parts = totalOf(sums);
  const holder = tag("details", "", "ledger"),
    summary = tag("summary"),
    bar = tag("div", "", "parts");
  for (const [name, each] of parts) {
    const share = `${((100 * each) / whole).toFixed(1)} %`,
      part = tag("button", "", name === "work" ? "work" : "lost");
    const sum = name === "work" ? ` of ${number(whole)}, all ranks` : "";
    part.append(...[name, ` ${number(each)}`, sum, ` · ${share}`].map((text) => tag("span", text)));
    if (!sum) {
      const { ground } = GAPS[name];
      part.style.cssText = `background:var(--${ground});color:var(--${ground}-ink);border-color:var(--${ground}-edge)`;
    }
    part.style.flexGrow = each;
    part.title = `${name}: ${time(each, model.unit)}, ${share}. ${data.meanings[name] ?? ""}`;
    part.dataset.reason = name;
    part.addEventListener("click", (event) => {
      event.preventDefault();
      const longest = model.idle
        .filter((idle) => idle.reason === name)
        .reduce((most, idle) => (!most || idle.end - idle.start > most.end - most.start ? idle : most), null);
      if (longest) select(timeline, { idle: longest }, true);
    });
    bar.append(part);
  }
  summary.append(tag("span", models.length > 1 ? model.caption : "for each rank"));
  holder.append(summary, tableOf(sums, model.span));
  const both = tag("div");
  both.append(...(models.length > 1 ? [] : [bar]), holder); // side by side, timelines need the room
  return both;
}
