// A level's board: what may run next and when, by the rules of pipelab's `check` and `simulate`, and what is forced.
// The level comes from Python (see `_levels` in pyodide.py); tests hold each state of random games against Python.
window.pipelabBoard ??= class Board {
  constructor(level, moves = []) {
    this.level = level;
    this.there = new Map(); // value -> [when, on which rank, made by which word]
    this.placed = new Map(); // word -> [rank, start, end]
    this.free = level.home.map(() => 0);
    this.held = level.home.map(() => 0);
    this.peak = level.home.map(() => 0);
    this.queues = {}; // "0>1" -> who may take the next values from rank 0 to 1, if they wait for each other
    this.sent = {}; // "0>1" -> when the last one left
    for (const word of moves) this.place(word);
  }

  // "gin(m,s+1)" of an action: the value's name; null at the pipeline's ends, where nothing is needed.
  value(text, microbatch, stage) {
    const [, name, shift] = /^(\w+)\(m,s([+-]1)?\)$/.exec(text),
      where = stage + Number(shift ?? 0);
    return where < 0 || where >= this.level.home.length ? null : `${name}.${microbatch}.${where}`;
  }

  // When an action could begin; null if something that it needs is not made, if it is done, or if its rank is full.
  begins(kind, microbatch, stage) {
    const { level } = this,
      { needs, held, instead } = level.kinds[kind],
      rank = level.home[stage];
    if ([kind, ...instead].some((each) => this.placed.has(`${stage}${each}${microbatch}`))) return null;
    if (level.cap && held > 0 && this.held[rank] >= level.cap) return null;
    let start = this.free[rank];
    for (const text of needs) {
      const value = this.value(text, microbatch, stage);
      if (value === null) continue;
      if (!this.there.has(value)) return null;
      const [when, home] = this.there.get(value);
      if (level.queued && home !== rank && this.queues[`${home}>${rank}`][0] !== `${stage}${kind}${microbatch}`)
        return null;
      start = Math.max(start, when + (home === rank ? 0 : level.latency));
    }
    return start;
  }

  // For each rank, what may run next, with its start and end: of each kind and stage, the first micro-batch.
  get ready() {
    const { level } = this,
      found = level.times.map(() => []);
    level.home.forEach((rank, stage) => {
      for (const kind of Object.keys(level.kinds))
        for (let microbatch = 0; microbatch < level.microbatches; microbatch += 1) {
          const start = this.begins(kind, microbatch, stage);
          if (start === null) continue;
          found[rank].push([`${stage}${kind}${microbatch}`, start, start + level.times[rank][kind]]);
          break;
        }
    });
    return found;
  }

  place(word) {
    const [, stage, kind, microbatch] = /^(\d+)([A-Z])(\d+)$/.exec(word) ?? [],
      known = this.level.kinds[kind] && stage in this.level.home && microbatch < this.level.microbatches,
      start = known ? this.begins(kind, Number(microbatch), Number(stage)) : null;
    if (start === null) throw new Error(`${word} cannot be placed here`);
    const rank = this.level.home[stage],
      end = start + this.level.times[rank][kind];
    this.placed.set(word, [rank, start, end]);
    this.free[rank] = end;
    this.held[rank] += this.level.kinds[kind].held;
    this.peak[rank] = Math.max(this.peak[rank], this.held[rank]);
    for (const queue of Object.values(this.queues)) if (queue[0] === word) queue.shift();
    for (const text of this.level.kinds[kind].gives)
      this.there.set(this.value(text, Number(microbatch), Number(stage)), [
        this.leaves(text, word, rank, end),
        rank,
        word,
      ]);
    return this;
  }

  // When a value leaves: when it is made, but in a queue not before the one ahead of it has arrived.
  leaves(text, word, rank, end) {
    const [, stage, , microbatch] = /^(\d+)([A-Z])(\d+)$/.exec(word),
      next = Number(stage) + ({ "out(m,s)": 1, "gin(m,s)": -1 }[text] ?? 0),
      home = this.level.home[next],
      ends = `${rank}>${home}`;
    if (!this.level.queued || home === undefined || home === rank) return end;
    (this.queues[ends] ??= []).push(`${next}${next > stage ? "F" : "B"}${microbatch}`);
    this.sent[ends] = Math.max(end, this.level.latency + (this.sent[ends] ?? -Infinity));
    return this.sent[ends];
  }

  // The next action of a rank if there is no choice: if nothing else could ever come first there, whatever the other
  // ranks do, even without a cap. Of listed rows, the next one where it can run. Queues can block, so there is none.
  get forced() {
    const { level } = this;
    if (level.listed.length) {
      const ready = this.ready.flat().map(([word]) => word);
      return this.left.map(([next]) => next).find((next) => ready.includes(next)) ?? null;
    }
    if (level.queued) return null;
    for (const [rank, choices] of this.ready.entries()) {
      if (choices.length !== 1) continue;
      const later = new this.constructor({ ...level, cap: null }, this.placed.keys());
      for (let more = true; more; ) {
        const others = later.ready.filter((_, each) => each !== rank).flat();
        more = others.length > 0;
        if (more) later.place(others[0][0]);
      }
      const full = level.cap && this.held[rank] >= level.cap,
        open = later.ready[rank].filter(([word]) => !(full && level.kinds[/[A-Z]/.exec(word)[0]].held > 0));
      if (open.length === 1) return choices[0][0];
    }
    return null;
  }

  // Whether every micro-batch has been forward and backward on every stage.
  get complete() {
    const gives = Object.values(this.level.kinds).flatMap((each) => each.gives),
      every = this.level.home.length * this.level.microbatches * new Set(gives).size;
    return this.there.size === every;
  }

  get makespan() {
    return Math.max(0, ...this.free);
  }

  // The words of one chain without a gap from the beginning to the end: each begins when the one before it lets it.
  get critical() {
    const chain = [],
      words = [...this.placed],
      same = (a, b) => Math.abs(a - b) < 1e-9;
    let next = words.find(([, [, , end]]) => same(end, this.makespan))?.[0];
    while (next) {
      chain.unshift(next);
      const [rank, start] = this.placed.get(next),
        [, stage, kind, microbatch] = /^(\d+)([A-Z])(\d+)$/.exec(next);
      const given = this.level.kinds[kind].needs.map((text) =>
        this.there.get(this.value(text, Number(microbatch), Number(stage))),
      );
      const late = given.find((each) => each && same(each[0] + (each[1] === rank ? 0 : this.level.latency), start));
      next = words.find(([, [home, , end]]) => home === rank && same(end, start))?.[0] ?? late?.[2];
    }
    return chain;
  }

  // What a rank holds over time: [from, until, how many activations], from each forward's start to its backward's end.
  memory(rank) {
    const changes = [...this.placed]
      .filter(([, [home]]) => home === rank)
      .map(([word, [, start, end]]) => [this.level.kinds[/[A-Z]/.exec(word)[0]].held, start, end])
      .filter(([held]) => held)
      .map(([held, start, end]) => [held > 0 ? start : end, held])
      .sort(([a, up], [b, down]) => a - b || up - down);
    let held = 0;
    return changes.map(([from, by], at) => [from, changes[at + 1]?.[0] ?? this.makespan, (held += by)]);
  }

  // Of listed rows, what is not placed yet.
  get left() {
    return this.level.listed.map((row) => row.filter((word) => !this.placed.has(word)));
  }

  // What the order is worth, as Python's Level.score: the time, the peak, how often ranks go to another stage, whose
  // weights they gather, or the moves if what is left stays as listed.
  get score() {
    if (this.level.within) return Math.max(...this.peak);
    if (this.level.sharded) {
      const stages = this.rows.map((row) => row.match(/\d+(?=[A-Z])/g) ?? []);
      return stages.flatMap((each) => each.filter((stage, at) => stage !== each[at - 1])).length;
    }
    if (!this.level.listed.length) return this.makespan;
    const { left, rows } = this;
    let moves = 0;
    this.level.listed.forEach((listed, rank) => {
      const kept = [],
        row = [...rows[rank].split(" ").filter(Boolean), ...left[rank]];
      for (const at of row.map((word) => listed.indexOf(word))) {
        const length = kept.findIndex((end) => end >= at);
        kept[length < 0 ? kept.length : length] = at;
      }
      moves += row.length - kept.length;
    });
    return moves;
  }

  // Who may take what waits in the queues before a rank, the next one first.
  waiting(rank) {
    return Object.keys(this.queues).flatMap((ends) => (ends.endsWith(`>${rank}`) ? this.queues[ends] : []));
  }

  // The rows as text, to be compared with those of known schedules.
  get rows() {
    const rows = this.level.times.map(() => []);
    for (const [word, [rank]] of this.placed) rows[rank].push(word);
    return rows.map((row) => row.join(" "));
  }
};
