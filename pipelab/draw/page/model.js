"use strict";

// What Python put in (see _trace in page.py), unpacked: every action has a place, a whole number, and each of its
// properties is a list by place. The actions of a rank lie side by side, in its order.
let data, models; // `show` in panel.js sets them

// The table of kinds: their letters, and by kind, which values it needs, who gives them and who needs its own.
let KINDS, TRAITS;

function readKinds(rows) {
  KINDS = rows.map(([letter]) => letter).join("");
  // "gin(m,s+1)" is the value gin of the next stage.
  const read = (text) => {
    const [, value, shift] = /^(\w+)\(m,s([+-]1)?\)$/.exec(text);
    return { value, shift: Number(shift ?? 0) };
  };
  const given = rows.map(([, , gives]) => gives.map((text) => read(text).value));
  TRAITS = rows.map(([, , gives, held]) => {
    return { held, gives: gives[0], collective: !gives.length, givers: [], needers: [] };
  });
  rows.forEach(([, needs], needer) => {
    for (const { value, shift } of needs.map(read)) {
      given.forEach((values, giver) => {
        if (!values.includes(value)) return;
        TRAITS[needer].givers.push({ kind: giver, shift });
        TRAITS[giver].needers.push({ kind: needer, shift: -shift });
      });
    }
  });
}

// What an idle time of each reason looks like: its word, its hatch, whether it waits for a value; from `GAPS`.
let GAPS;
const HATCH = { "-": "M0 4H8", "|": "M4 0V8", ".": "M3.5 4H4.5" };
HATCH["/"] = "M-2 2L2 -2M0 8L8 0M6 10L10 6";
HATCH["\\"] = "M-2 6L2 10M0 0L8 8M6 -2L10 2";
HATCH["+"] = HATCH["-"] + HATCH["|"];
HATCH.x = HATCH["/"] + HATCH["\\"];

function readGaps(gaps) {
  GAPS = gaps;
  const patterns = Object.values(gaps).map((gap, at) => {
    const { hatch, ground } = gap,
      size = { width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      made = element("pattern", { id: `hatch${at}`, ...size });
    made.append(element("path", { d: HATCH[hatch] ?? "", style: `fill:none;stroke:var(--${ground}-lines)` }));
    gap.pattern = hatch && `url(#hatch${at})`;
    return made;
  });
  const place = document.querySelector("#definitions defs");
  place.querySelectorAll("pattern").forEach((each) => each.remove());
  place.append(...patterns);
}

// Runs of a number are written as [number, count].
const unpack = (list) => list.flatMap((each) => (Array.isArray(each) ? new Array(each[1]).fill(each[0]) : each));

class Model {
  constructor(raw) {
    Object.assign(this, {
      title: raw.name,
      unit: raw.unit,
      span: raw.span * raw.tick,
      tick: raw.tick,
      typical: raw.typical,
      strips: raw.strips,
    });
    Object.assign(this, { microbatches: raw.microbatches, namesStages: raw.namesStages, lanes: raw.ranks });
    const count = raw.ranks.reduce((sum, rank) => sum + rank.kinds.length, 0);
    this.moves = raw.moves.map(([rank, start, end, name, kind, held, strip]) => {
      return { rank, start: start * raw.tick, end: end * raw.tick, name, kind, held, strip };
    });
    this.first = []; // by rank: its first place
    this.idleOf = []; // by rank: its idle times
    this.rank = new Int32Array(count);
    this.kind = new Uint8Array(count);
    this.stage = new Int32Array(count);
    this.microbatch = new Int32Array(count);
    this.start = new Float64Array(count);
    this.end = new Float64Array(count);
    this.chunk = new Uint8Array(count); // of which stage of its rank, modulo 2: the tint
    this.half = new Uint8Array(count); // 1: the upper half of a slot, 2: the lower
    const depth = raw.ranks.reduce((most, rank) => unpack(rank.stage).reduce((a, b) => Math.max(a, b), most), 0) + 1;
    this.places = new Int32Array(KINDS.length * depth * raw.microbatches).fill(-1); // by kind, stage and micro-batch
    this.depth = depth;
    this.reduces = new Map(); // stage -> places of its all-reduce
    let place = 0;
    raw.ranks.forEach((rank, r) => {
      this.first.push(place);
      const before = TRAITS.map(() => 0),
        last = TRAITS.map(() => 0);
      const [kept, numbers, gaps, lasts] = ["stage", "microbatches", "gaps", "lasts"].map((name) => unpack(rank[name]));
      const reasons = unpack(rank.idle),
        idle = [];
      let time = 0,
        free = 0,
        part = 0;
      const idleUntil = (until) => {
        while (free < until) {
          const reason = reasons[part++],
            end = reason < 0 ? free + reasons[part++] : until;
          idle.push({
            rank: r,
            reason: data.reasons[reason < 0 ? -1 - reason : reason],
            start: free * raw.tick,
            end: end * raw.tick,
          });
          free = end;
        }
      };
      for (let index = 0; index < rank.kinds.length; index += 1, place += 1) {
        const kind = KINDS.indexOf(rank.kinds[index]);
        this.rank[place] = r;
        this.kind[place] = kind;
        this.stage[place] = kept[index];
        before[kind] += numbers[index];
        this.microbatch[place] = TRAITS[kind].collective ? -1 : before[kind];
        time += gaps[index];
        idleUntil(time);
        this.start[place] = time * raw.tick;
        time += last[kind] += lasts[index];
        this.end[place] = time * raw.tick;
        free = Math.max(free, time);
        if (!TRAITS[kind].collective) this.places[this.slot(kind, this.stage[place], before[kind])] = place;
        else this.reduces.set(this.stage[place], [...(this.reduces.get(this.stage[place]) ?? []), place]);
      }
      idleUntil(raw.span);
      const known = [...new Set(kept)].sort((a, b) => a - b);
      kept.forEach((stage, index) => (this.chunk[this.first[r] + index] = known.indexOf(stage) % 2));
      this.idleOf.push(idle);
      for (const index of rank.halves) this.half.set([1, 2], this.first[r] + index);
    });
    this.first.push(place);
    this.count = count;
    // What an action needs, and what needs it, beside what the table of kinds says: places by place.
    const pairs = (at) => raw.further.reduce((all, each) => {
      if (!all.has(each[at])) all.set(each[at], []);
      all.get(each[at]).push(each[1 - at]);
      return all;
    }, new Map());
    [this.furtherNeeds, this.furtherGives] = [pairs(0), pairs(1)];
    this.unpackLags(raw);
    this.idle = this.idleOf.flat();
    const unpacked = ["kinds", "stage", "microbatches", "gaps", "lasts", "lags", "idle"];
    for (const rank of raw.ranks) for (const name of unpacked) delete rank[name];
    this.critical = new Set(raw.critical.map(([rank, index]) => this.first[rank] + index));
  }

  // How long values travel, by "giver,needer"; nothing where all are there at once.
  unpackLags(raw) {
    this.lags = new Map();
    raw.ranks.forEach((rank, r) => {
      const lags = unpack(rank.lags);
      let at = 0;
      if (!lags.length) return;
      for (let place = this.first[r]; place < this.first[r + 1]; place += 1) {
        for (const giver of this.needs(place)) {
          if (this.rank[giver] !== r && !this.collective(place))
            this.lags.set(giver * this.count + place, lags[at++] * raw.tick);
        }
      }
    });
  }

  collective(place) {
    return TRAITS[this.kind[place]].collective;
  }

  slot(kind, stage, microbatch) {
    return (kind * this.depth + stage) * this.microbatches + microbatch;
  }

  find(kind, stage, microbatch) {
    return stage < 0 || stage >= this.depth || microbatch >= this.microbatches
      ? -1
      : this.places[this.slot(kind, stage, microbatch)];
  }

  // The idle times of a rank that overlap the time between `from` and `to`.
  idleIn(rank, from, to) {
    const all = this.idleOf[rank],
      found = [];
    let low = 0,
      high = all.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (all[middle].end > from) high = middle;
      else low = middle + 1;
    }
    for (; low < all.length && all[low].start < to; low += 1) found.push(all[low]);
    return found;
  }

  // Where each rank's time between `from` and `to` went: a map from "work" and the reasons of idle times to time.
  sums(from = 0, to = this.span) {
    return this.lanes.map((_, rank) => {
      const sums = new Map([["work", to - from]]);
      for (const idle of this.idleIn(rank, from, to)) {
        const lost = Math.min(idle.end, to) - Math.max(idle.start, from);
        sums.set("work", sums.get("work") - lost);
        sums.set(idle.reason, (sums.get(idle.reason) ?? 0) + lost);
      }
      return sums;
    });
  }

  name(place) {
    return `${this.stage[place]}${KINDS[this.kind[place]]}${this.collective(place) ? "" : this.microbatch[place]}`;
  }

  label(place) {
    return this.namesStages ? this.name(place) : this.name(place).replace(/^\d+/, "");
  }

  named(name) {
    const parts = new RegExp(`^(\\d+)([${KINDS}])(\\d*)$`, "i").exec(name);
    if (!parts) return -1;
    const kind = KINDS.indexOf(parts[2].toUpperCase());
    if (TRAITS[kind].collective) return this.reduces.get(Number(parts[1]))?.[0] ?? -1;
    return this.find(kind, Number(parts[1]), Number(parts[3]));
  }

  // The places of the actions whose values an action needs.
  needs(place) {
    const found = [],
      [stage, microbatch] = [this.stage[place], this.microbatch[place]];
    const [from, to] = this.collective(place) ? [0, this.microbatches] : [microbatch, microbatch + 1];
    for (let each = from; each < to; each += 1)
      for (const { kind, shift } of TRAITS[this.kind[place]].givers) {
        const giver = this.find(kind, stage + shift, each);
        if (giver >= 0) found.push(giver);
      }
    return found.concat(this.furtherNeeds.get(place) ?? []);
  }

  // Whether two actions are the same pass of two slices of one sequence.
  slices(giver, place) {
    const [one, other] = [giver, place].map((each) => TRAITS[this.kind[each]].gives);
    return one === other && (this.furtherNeeds.get(place) ?? []).includes(giver);
  }

  // Whether a C runs an action's forward again, and holds the activation in its stead.
  again(place) {
    return this.find(KINDS.indexOf("C"), this.stage[place], this.microbatch[place]) >= 0;
  }

  gives(place) {
    const found = [],
      [stage, microbatch] = [this.stage[place], this.microbatch[place]];
    for (const { kind, shift } of TRAITS[this.kind[place]].needers) {
      if (TRAITS[kind].collective) found.push(...(this.reduces.get(stage) ?? []));
      else if (this.find(kind, stage + shift, microbatch) >= 0)
        found.push(this.find(kind, stage + shift, microbatch));
    }
    return found.concat(this.furtherGives.get(place) ?? []);
  }

  arrives(giver, place) {
    return this.end[giver] + (this.lags.get(giver * this.count + place) ?? 0);
  }

  // The place before an action on its rank, in an earlier slot; -1 if it is the first.
  before(place) {
    const previous = place - (this.half[place] === 2 ? 2 : 1);
    return previous >= this.first[this.rank[place]] ? previous : -1;
  }

  // What an action waited for last: [giver, when its value was there], or null if its rank was busy until it started.
  waited(place) {
    let givers = this.needs(place).map((giver) => [giver, this.arrives(giver, place)]);
    if (this.half[place] === 1)
      givers = givers.concat(this.needs(place + 1).map((giver) => [giver, this.arrives(giver, place + 1)]));
    if (this.half[place] === 2)
      givers = givers.concat(this.needs(place - 1).map((giver) => [giver, this.arrives(giver, place - 1)]));
    if (this.collective(place)) {
      const lasts = this.reduces
        .get(this.stage[place])
        .map((each) => this.before(each))
        .filter((each) => each >= 0);
      givers = lasts.map((each) => [each, this.end[each]]);
    }
    const before = this.before(place),
      free = before < 0 ? 0 : this.end[before];
    const last = givers.reduce((most, each) => (most === null || each[1] > most[1] ? each : most), null);
    return last && last[1] > free + 1e-6 * this.span ? last : null;
  }

  // The longest idle time that waits for a value of another rank, the first of equals: [idle, giver, needer], or null.
  get longestWait() {
    if (this.longest !== undefined) return this.longest;
    let most = near * this.span,
      found = null;
    for (const idle of this.idle) {
      if (!GAPS[idle.reason].waits || idle.end - idle.start <= most * (1 + near)) continue;
      const needer = this.next(idle.rank, idle.end),
        last = needer < 0 ? null : this.waited(needer);
      if (last) [most, found] = [idle.end - idle.start, [idle, last[0], needer]];
    }
    return (this.longest = found);
  }

  // What an idle time is, in words, the longest first; never a bare number, which is a micro-batch.
  words(idle) {
    const { word } = GAPS[idle.reason],
      least = [`${word} ${number(idle.end - idle.start)}`, word];
    if (/fill|order|drain/.test(idle.reason)) return least;
    const next = this.next(idle.rank, idle.end),
      last = next < 0 ? null : this.waited(next);
    if (!last) return least;
    const whole = `${least[0]} for ${this.label(last[0])}`;
    return [`${whole} of rank ${this.rank[last[0]]}`, whole, ...least];
  }

  // The first action of a rank that starts at a time or later; -1 after its last.
  next(rank, time) {
    const place = above(this.start, time - 1e-7 * this.span, this.first[rank], this.first[rank + 1]);
    return place < this.first[rank + 1] ? place : -1;
  }

  // How much later each action could end without a longer makespan, if nothing else changed.
  get slack() {
    if (this.slackByPlace) return this.slackByPlace;
    const late = new Float64Array(this.count).fill(this.span);
    const order = [...late.keys()].sort((a, b) => this.end[b] - this.end[a] || this.start[b] - this.start[a] || b - a);
    for (const place of order) {
      const limit = (needer, lag) => {
        late[place] = Math.min(late[place], late[needer] - (this.end[needer] - this.start[needer]) - lag);
      };
      for (const needer of this.gives(place)) limit(needer, this.arrives(place, needer) - this.end[place]);
      const following = place + (this.half[place] === 1 ? 2 : 1);
      if (following < this.first[this.rank[place] + 1]) limit(following, 0);
    }
    this.slackByPlace = late.map((time, place) => Math.max(0, time - this.end[place]));
    return this.slackByPlace;
  }

  // How many activations a rank holds, as [time, count] from then on.
  memory(rank) {
    this.held ??= [];
    if (this.held[rank]) return this.held[rank];
    const changes = [];
    for (let place = this.first[rank]; place < this.first[rank + 1]; place += 1) {
      const { held } = TRAITS[this.kind[place]];
      if (held > 0 && KINDS[this.kind[place]] === "F" && this.again(place)) continue;
      if (held) changes.push([held > 0 ? this.start[place] : this.end[place], held]);
    }
    for (const move of this.moves)
      if (move.rank === rank && move.held) changes.push([move.held > 0 ? move.start : move.end, move.held]);
    changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let held = 0;
    return (this.held[rank] = changes.map(([time, change]) => [time, (held += change)]));
  }

  // The stage-0 rank of each micro-batch: schedules with two directions have two.
  direction(place) {
    const first = this.find(0, 0, Math.max(this.microbatch[place], 0));
    return first < 0 ? 0 : this.rank[first];
  }
}

// The first index from `low` whose value is above `bound`, in a list that rises.
function above(values, bound, low = 0, high = values.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > bound) high = middle;
    else low = middle + 1;
  }
  return low;
}

// As `number` in wording.py: numbers with at most two decimals in full, others with three digits.
function number(value) {
  const known = Number(value.toPrecision(7)), // as many digits as the data have
    exact = Math.abs(known * 100 - Math.round(known * 100)) <= 1e-9 * Math.max(1, Math.abs(known * 100));
  const short = Math.abs(known) >= 100 ? Math.round(known) : Number((known * (1 + 1e-12)).toPrecision(3));
  const shown = exact ? known : short;
  return shown.toLocaleString("en-US", { maximumFractionDigits: 12 });
}

// A time with its unit; "units" is what abstract times are called.
function time(value, unit) {
  const text = number(value);
  return `${text} ${unit === "units" && text === "1" ? "unit" : unit}`;
}
