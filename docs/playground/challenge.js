// The page of challenges: place actions by hand, or write code.
// challenge.py says what may run next and what it is worth.
(() => {
  const root = document.getElementById("ch");
  if (!root) return;
  const base = new URL("./", document.currentScript.src),
    engine = window.pipelabEngine,
    KEPT = "pipelab-challenges";
  const find = (selector) => root.querySelector(selector);
  const tag = (name, text, more = {}) => Object.assign(document.createElement(name), { textContent: text, ...more });
  let levels = {},
    level = null,
    moves = [],
    hints = 0,
    turn = 0;

  const say = (text) => {
    find("#ch-state").value = text;
  };
  const best = () => {
    try {
      return JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      return {};
    }
  };
  const stars = (name) => {
    const own = best()[name],
      { par, good } = levels[name];
    return typeof own !== "number" ? "" : own <= par ? "★★★" : own <= good ? "★★" : "★";
  };

  function keep(makespan) {
    const own = best()[level.name];
    if (typeof own === "number" && own <= makespan) return;
    try {
      localStorage.setItem(KEPT, JSON.stringify({ ...best(), [level.name]: makespan }));
    } catch {
      /* a private window */
    }
    list();
  }

  function list() {
    find(".ch-levels").replaceChildren(
      ...Object.values(levels).map((each, at) => {
        const item = document.createElement("li"),
          button = tag("button", `${at + 1}. ${each.title}`, { type: "button" });
        button.append(tag("span", stars(each.name), { className: "ch-stars" }));
        button.ariaCurrent = each === level ? "true" : null;
        button.addEventListener("click", () => open(each.name, []));
        item.append(button);
        return item;
      }),
    );
  }

  function open(name, placed) {
    [level, moves, hints] = [levels[name], placed, 0];
    list();
    find(".ch-title").textContent = level.title;
    find(".ch-story").textContent = level.story;
    find(".ch-given").textContent = `${level.given}. Good: ${level.good}. Par: ${level.par}.`;
    hinted();
    find(".ch-worth").hidden = true;
    find(".ch-board").replaceChildren();
    show();
  }

  function hinted() {
    find(".ch-hints").replaceChildren(...level.hints.slice(0, hints).map((each) => tag("li", each)));
    find("#ch-hint").disabled = hints === level.hints.length;
  }

  const rows = () =>
    Array.from({ length: level.ranks }, (_, rank) => moves.filter((word) => level.home[parseInt(word, 10)] === rank));

  async function show() {
    history.replaceState(history.state, "", `#${level.name}${moves.length ? `:${moves.join(".")}` : ""}`);
    for (const id of ["undo", "reset"]) find(`#ch-${id}`).disabled = !moves.length;
    if (!engine.loaded) return;
    const mine = (turn += 1);
    try {
      const found = await engine.call("challenge.state", [level.name, rows()]);
      if (mine === turn) draw(found);
    } catch (error) {
      if (mine !== turn) return;
      moves = []; // a link that was edited
      await show();
      say(error.message.trim().split("\n").at(-1));
    }
  }

  // One lane for each rank: what is placed, to scale, and below it what may run next.
  function draw({ placed, ready, worth }) {
    const ends = placed.flat().map(([, , end]) => end),
      whole = Math.max(level.par * 1.15, ...ends) * 1.04,
      place = (time) => `${(100 * time) / whole}%`;
    const focused = document.activeElement?.dataset?.rank;
    find(".ch-board").replaceChildren(
      ...placed.map((row, rank) => {
        const lane = tag("div", "", { className: "ch-lane" }),
          bars = tag("div", "", { className: "ch-bars" }),
          next = tag("div", "", { className: "ch-next" });
        lane.append(tag("div", `rank ${rank}`, { className: "ch-rank" }), bars, next);
        for (const [word, start, end, colour] of row) {
          const bar = tag("div", word, { className: "ch-bar", title: `${word}, ${start} to ${end}` });
          Object.assign(bar.style, {
            left: place(start),
            width: place(end - start),
            background: colour,
            color: ink(colour),
          });
          bars.append(bar);
        }
        const par = tag("div", "", { className: "ch-line", title: `par, ${level.par}` });
        par.style.left = place(level.par);
        bars.append(par);
        for (const [word, start, colour] of ready[rank]) {
          const button = tag("button", word, {
            type: "button",
            ariaLabel: `${word} on rank ${rank}, begins at ${start}`,
          });
          button.append(tag("small", ` at ${start}`));
          button.dataset.rank = rank;
          button.style.borderColor = colour;
          button.addEventListener("click", () => {
            moves.push(word);
            show();
          });
          next.append(button);
        }
        if (!ready[rank].length) next.append(tag("span", worth ? "" : "waits for another rank, or is done"));
        return lane;
      }),
    );
    if (focused !== undefined) (find(`.ch-next button[data-rank="${focused}"]`) ?? find(".ch-next button"))?.focus();
    say(`${moves.length} placed; the latest ends at ${Math.max(0, ...ends)}`);
    valued(worth);
  }

  const ink = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#000" : "#fff";
  };

  function valued(worth) {
    const box = find(".ch-worth"),
      { reached, makespan, said } = worth ?? {};
    box.hidden = !worth;
    if (!worth) return;
    const words = {
      par: "Par! Nothing is quicker.",
      good: `Good. Par is ${level.par}.`,
      legal: `It counts. Good is ${level.good}, par ${level.par}.`,
      refused: "It does not count.",
    };
    box.className = `ch-worth ch-${reached}`;
    box.replaceChildren(
      tag("strong", makespan === undefined ? words[reached] : `${makespan} units. ${words[reached]}`),
    );
    if (said) box.append(tag("pre", said));
    if (makespan !== undefined) keep(makespan);
  }

  find("#ch-undo").addEventListener("click", () => {
    moves.pop();
    show();
  });
  find("#ch-reset").addEventListener("click", () => {
    moves = [];
    show();
  });
  find("#ch-hint").addEventListener("click", () => {
    hints += 1;
    hinted();
  });
  find("#ch-try").addEventListener("click", async () => {
    say("running …");
    try {
      const { worth, rows: made } = await engine.call("challenge.attempt", [level.name, find("#ch-code").value]);
      if (made) {
        // the order in which a player would place them: any in which nothing comes before what it needs
        const found = await engine.call("challenge.state", [level.name, made]);
        moves = found.placed
          .flat()
          .sort((one, other) => one[1] - other[1])
          .map(([word]) => word);
        await show();
      }
      valued(worth);
      say("");
    } catch (error) {
      say(error instanceof engine.Stopped ? `your code was ${error.message}` : error.message);
    }
  });

  async function offer() {
    const about = await (await fetch(new URL("engine.json", base))).json(),
      button = find("#ch-load"),
      mega = (bytes) => (bytes / 1e6).toFixed(1);
    if (about.reason) {
      button.hidden = true;
      return say(`Python cannot run here: ${about.reason}. Use pipelab challenge in a terminal.`);
    }
    const started = () => {
      find(".ch-start").hidden = true;
      find(".ch-play").hidden = false;
      return show();
    };
    if (engine.loaded) {
      await engine.load();
      return started();
    }
    button.textContent = `play (${mega(about.bytes)} MB, once)`;
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await engine.load((loaded) =>
          say(
            loaded < about.counted
              ? `loading Python: ${mega(loaded)} of ${mega(about.counted)} MB`
              : "starting Python …",
          ),
        );
        await started();
      } catch (error) {
        button.disabled = false;
        say(`Python could not be loaded: ${error.message}`);
      }
    });
  }

  function restore() {
    const [name, placed = ""] = location.hash.slice(1).split(":"),
      words = placed.split(".").filter(Boolean);
    const known = Object.hasOwn(levels, name) ? name : Object.keys(levels)[0];
    open(
      known,
      words.every((word) => /^\d{1,2}[FBIW]\d{1,2}$/.test(word) && parseInt(word, 10) in levels[known].home)
        ? words
        : [],
    );
  }

  (async () => {
    levels = await (await fetch(new URL("levels.json", base))).json();
    restore();
    addEventListener("hashchange", restore);
    await offer();
  })().catch((error) => say(`the levels could not be loaded: ${error.message}`));
})();
