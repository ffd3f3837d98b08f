// The page of challenges: place actions by hand, by the rules of board.js; or write code, which Python judges.
(() => {
  const root = document.getElementById("ch");
  if (!root) return;
  const base = new URL("./", document.currentScript.src),
    engine = window.pipelabEngine,
    code = window.pipelabEditor?.(document.getElementById("ch-code")) ?? document.getElementById("ch-code"),
    KEPT = "pipelab-challenges";
  const find = (selector) => root.querySelector(selector);
  const tag = (name, text, more = {}) => Object.assign(document.createElement(name), { textContent: text, ...more });
  let levels = {},
    level = null,
    moves = [],
    undone = [], // what redo brings back
    hints = 0,
    looked = false; // whether the order came from the catalogue or a solver

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
    if (typeof own !== "number") return own === "looked up" ? own : "";
    return own <= par ? "★★★" : own <= good ? "★★" : "★";
  };

  function keep(score) {
    const own = best()[level.name];
    if ((typeof own === "number" && own <= score) || (looked && own !== undefined)) return;
    try {
      localStorage.setItem(KEPT, JSON.stringify({ ...best(), [level.name]: looked ? "looked up" : score }));
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
    [level, moves, undone, hints, looked] = [levels[name], placed, [], 0, false];
    list();
    if (level.circle) find(".ch-circle").replaceChildren(window.pipelabOrder(level.circle));
    find(".ch-title").textContent = level.title;
    find(".ch-story").textContent = level.story;
    find(".ch-given").textContent = `${level.given}; ${level.goals}.`;
    hinted();
    if (!placed.length) forced();
    show();
  }

  function hinted() {
    find(".ch-hints").replaceChildren(...level.hints.slice(0, hints).map((each) => tag("li", each)));
    find("#ch-hint").disabled = hints === level.hints.length;
  }

  // Place what leaves no choice, and remember what the player chose.
  function forced() {
    const board = new window.pipelabBoard(level, moves);
    for (let word = board.forced; word; word = board.forced) {
      board.place(word);
      moves.push(word);
    }
  }

  // Take back the last choice, and what followed from it.
  function undo() {
    if (find("#ch-undo").disabled) return;
    undone.push(moves);
    const before = [...moves];
    while (before.length) {
      before.pop();
      const board = new window.pipelabBoard(level, before);
      if (!board.forced) break;
    }
    moves = before;
    if (!moves.length) forced();
    show();
  }

  function redo() {
    moves = undone.pop() ?? moves;
    show();
  }

  function hint() {
    hints = Math.min(hints + 1, level.hints.length);
    hinted();
    show();
  }

  function show() {
    let board;
    try {
      board = new window.pipelabBoard(level, moves);
    } catch (error) {
      moves = []; // a link that was edited
      say(error.message);
      board = new window.pipelabBoard(level);
    }
    history.replaceState(history.state, "", `#${level.name}${moves.length ? `:${moves.join(".")}` : ""}`);
    for (const id of ["undo", "reset"]) find(`#ch-${id}`).disabled = !moves.length;
    find("#ch-redo").disabled = !undone.length;
    find(".ch-circle").hidden = !level.circle || board.complete;
    draw(board);
  }

  // Labels are short where each rank has one stage.
  const label = (word) => (level.home.length === level.times.length ? word.replace(/^\d+/, "") : word);
  const colour = (word) => {
    const [, stage, kind] = /^(\d+)(\D)/.exec(word),
      rank = level.home[stage];
    return level.kinds[kind].colours[level.home.filter((each, at) => each === rank && at < stage).length % 2];
  };

  // The smallest of 1, 2, 5, 10 ... that gives at most twelve ticks.
  const step = (whole) => [1, 2, 5, 10, 20, 50].find((each) => whole / each <= 12) ?? 100;

  // What a player has to know of a rank: what is left of its listed row, or what waits in its queue.
  function note(board, rank) {
    const names = (words) => words.map(label).join(" ");
    if (level.listed.length) return `listed next: ${names(board.left[rank]) || "nothing"}`;
    if (!level.queued) return "";
    return board.waiting(rank).length ? `in its queue, for ${names(board.waiting(rank))}` : "its queue is empty";
  }

  // One lane for each rank: what it holds, what is placed, and below it, at its time, what may run next.
  function draw(board) {
    const { ready } = board,
      ends = [board.makespan, ...ready.flat().map(([, , end]) => end)],
      goal = level.unit === "units" ? level.par : (level.within ?? 0),
      whole = Math.max(goal * 1.15, ...ends, 10) * 1.04,
      place = (time) => `${(100 * time) / whole}%`,
      deepest = Math.max(1, ...ready.map((each) => each.length));
    const spread = (element, start, end, word) => {
      Object.assign(element.style, { left: place(start), width: place(end - start), background: colour(word) });
      element.style.color = ink(colour(word));
      return element;
    };
    const critical = new Set(board.complete ? board.critical : []),
      most = level.cap ?? Math.max(level.good, ...board.peak);
    const focused = document.activeElement?.dataset?.rank;
    const lanes = level.times.map((_, rank) => {
      const lane = tag("div", "", { className: "ch-lane" }),
        head = tag("div", `rank ${rank}`, { className: "ch-rank" }),
        bars = tag("div", "", { className: "ch-bars" }),
        next = tag("div", "", { className: "ch-next" });
      if (level.cap || level.within) {
        const held = board.held[rank],
          peak = level.cap ?? board.peak[rank],
          boxes = "■".repeat(held) + "□".repeat(peak - held),
          about = `holds ${held} activations, ${level.cap ? `of ${peak}` : `at most ${peak} so far`}`;
        const className = level.cap && held >= level.cap ? "ch-held ch-full" : "ch-held";
        head.append(tag("small", boxes, { className, title: about, ariaLabel: about }));
      }
      for (const [word, [home, start, end]] of board.placed)
        if (home === rank) {
          const className = critical.has(word) ? "ch-bar ch-critical" : "ch-bar",
            bar = tag("div", label(word), { className, title: `${word}, ${start} to ${end}` });
          bars.append(spread(bar, start, end, word));
        }
      if (goal) {
        const line = tag("div", "", { className: "ch-line", title: `${level.within ? "allowed" : "par"}, ${goal}` });
        line.style.left = place(goal);
        bars.append(line);
      }
      next.style.height = `${deepest * 2}rem`;
      ready[rank].forEach(([word, start, end], row) => {
        const button = tag("button", label(word), {
          type: "button",
          ariaLabel: `${label(word)}: ${word} on rank ${rank}, begins at ${start}`,
        });
        button.dataset.rank = rank;
        spread(button, start, end, word).style.top = `${row * 2}rem`;
        button.addEventListener("click", () => {
          moves.push(word);
          undone = [];
          forced();
          show();
        });
        next.append(button);
      });
      const memory = tag("div", "", { className: "ch-memory", hidden: !level.cap && !level.within });
      for (const [from, until, held] of board.memory(rank)) {
        const full = level.cap ? held >= level.cap : held > level.par,
          title = `${held} activations, ${from} to ${until}`,
          step = tag("div", "", { className: full ? "ch-full" : "", title });
        Object.assign(step.style, { left: place(from), width: place(until - from), height: `${(100 * held) / most}%` });
        memory.append(step);
      }
      lane.append(head, bars, memory, tag("small", note(board, rank), { className: "ch-note" }), next);
      return lane;
    });
    const axis = tag("div", "", { className: "ch-axis" });
    for (let time = 0; time < whole; time += step(whole)) {
      const tick = tag("span", time);
      tick.style.left = place(time);
      axis.append(tick);
    }
    const foot = tag("div", "", { className: "ch-lane" }),
      top = tag("div", "", { className: "ch-lane", hidden: !goal }),
      named = tag("span", `${level.within ? "allowed" : "par"} ${goal}`, { className: "ch-named" });
    named.style.left = place(goal);
    top.append(tag("div", ""), tag("div", "", { className: "ch-axis" }));
    top.lastChild.append(named);
    foot.append(tag("div", ""), axis);
    find(".ch-board").replaceChildren(top, ...lanes, foot);
    const narrow = [...root.querySelectorAll(".ch-bar")].filter((bar) => bar.scrollWidth > bar.clientWidth);
    for (const bar of narrow) bar.textContent = /\d+$/.exec(bar.textContent); // a micro-batch; its colour says the kind
    if (focused !== undefined) (find(`.ch-next button[data-rank="${focused}"]`) ?? find(".ch-next button"))?.focus();
    const more = level.unit === "units" ? "" : `; ${counted(board.score)}`;
    say(`${board.placed.size} placed; the latest ends at ${board.makespan}${more}`);
    valued(ready.flat().length ? null : worth(board));
    scored(board);
  }

  // The scoreboard: the numbers now and to be reached; of a complete order, each rank beside what par leaves it.
  function scored(board) {
    const rows = { now: counted(board.score), good: level.good, par: level.par },
      own = best()[level.name];
    if (own !== undefined) rows.best = `${own} ${typeof own === "number" ? stars(level.name) : ""}`;
    rows.hints = `${hints} of ${level.hints.length}`;
    find(".ch-score dl").replaceChildren(
      ...Object.entries(rows).flatMap(([name, value]) => [tag("dt", name), tag("dd", value)]),
    );
    const table = find(".ch-score table"),
      idles = level.unit === "units";
    table.hidden = !board.complete || !(idles || level.within);
    const row = (kind, cells) => {
      const made = document.createElement("tr");
      made.append(...cells.map((cell) => tag(kind, cell)));
      return made;
    };
    const work = level.times.map((_, rank) =>
      [...board.placed.values()].reduce((sum, [home, start, end]) => sum + (home === rank ? end - start : 0), 0),
    );
    const round = (number) => Number(number.toFixed(3));
    table.tHead.replaceChildren(row("th", idles ? ["rank", "idle", "at par"] : ["rank", "holds", "at par"]));
    table.tBodies[0].replaceChildren(
      ...work.map((busy, rank) =>
        row(
          "td",
          idles
            ? [rank, round(board.makespan - busy), round(level.par - busy)]
            : [rank, board.peak[rank], `up to ${level.par}`],
        ),
      ),
    );
  }

  function worth(board) {
    if (!board.complete)
      return {
        reached: "refused",
        said: `A dead end: each rank waits, ${
          level.queued ? "for what is not the first in its queue, " : ""
        }or holds as many activations as fit. Undo, and let a backward come sooner.`,
      };
    const { makespan, score } = board,
      name = level.known[board.rows.join("; ")],
      reached = score <= level.par ? "par" : score <= level.good ? "good" : "legal";
    if (level.within && makespan > level.within)
      return { reached: "refused", said: `It takes ${makespan} units, and the level allows ${level.within}.` };
    return { reached, score, said: name ?? "" };
  }

  const counted = (score) => `${score} ${score === 1 ? level.unit.slice(0, -1) : level.unit}`;
  const ink = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#000" : "#fff";
  };

  function valued(worth) {
    const box = find(".ch-worth"),
      { reached, score, said } = worth ?? {};
    box.hidden = !worth;
    if (!worth) return;
    const words = {
      par: "Par! No order does better.",
      good: `Good. Par is ${level.par}.`,
      legal: `It counts. Good is ${level.good}, par ${level.par}.`,
      refused: "It does not count.",
    };
    box.className = `ch-worth ch-${reached}`;
    box.replaceChildren(
      tag("strong", score === undefined ? words[reached] : `${counted(score)}. ${words[reached]}`),
    );
    if (reached === "par") box.append(tag("p", level.lesson));
    if (score !== undefined)
      box.append(tag("p", "Between red lines: the critical path, a chain of actions that sets the time."));
    if (looked && score !== undefined)
      box.append(tag("p", "Looked up: now you know where it leads. Place it yourself, and it counts."));
    if (said) box.append(tag("pre", said));
    const names = Object.keys(levels),
      following = names[names.indexOf(level.name) + 1];
    if (score !== undefined && following) {
      const button = tag("button", `next level: ${levels[following].title}`, { type: "button" });
      button.addEventListener("click", () => open(following, []));
      box.append(button);
    }
    if (score !== undefined) keep(score);
  }

  find("#ch-undo").addEventListener("click", undo);
  find("#ch-redo").addEventListener("click", redo);
  find("#ch-reset").addEventListener("click", () => open(level.name, []));
  find("#ch-hint").addEventListener("click", hint);
  addEventListener("keydown", (event) => {
    const act = { u: undo, r: redo, h: hint }[event.key],
      writes = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (act && root.isConnected && !writes && !event.ctrlKey && !event.altKey && !event.metaKey) act();
  });
  find("#ch-try").addEventListener("click", async () => {
    const button = find("#ch-try"),
      mega = (bytes) => (bytes / 1e6).toFixed(1);
    button.disabled = true;
    try {
      const about = await (await fetch(new URL("engine.json", base))).json();
      if (about.reason) return say(`Python cannot run here: ${about.reason}. Use pipelab challenge in a terminal.`);
      await engine.load((loaded) =>
        say(
          loaded < about.counted
            ? `loading Python: ${mega(loaded)} of ${mega(about.counted)} MB`
            : "starting Python …",
        ),
      );
      say("running …");
      const { worth: found, moves: made, looked: up } = await engine.call("challenge.attempt", [
        level.name,
        code.value,
      ]);
      looked = up;
      if (made) {
        [moves, undone] = [made, []];
        show();
      }
      valued(found);
      say("");
    } catch (error) {
      say(error instanceof engine.Stopped ? `your code was ${error.message}` : error.message);
    } finally {
      button.disabled = false;
    }
  });

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
  })().catch((error) => say(`the levels could not be loaded: ${error.message}`));
})();
