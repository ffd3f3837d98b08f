"use strict";

// What Python put in (see _trace in page.py), unpacked: every action has a place, a whole number, and each of its
// properties is a list by place. The actions of a rank lie side by side, in its order.
let data, models; // `show` in panel.js sets them

let KINDS; // their letters

// What an idle time of each reason looks like: its hatch, whether it waits for a value; from `GAPS`.
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

// Each action's number, written as the difference from that of the action before of its sort.
function column(order, list) {
  const before = {};
  return unpack(list).map((more, at) => (before[order[at]] = (before[order[at]] ?? 0) + more));
}

class Model {
  constructor(raw) {
    const { caption, idea, unit, tick, typical, strips, namesStages, ways, brackets, apart } = raw;
    Object.assign(this, { caption, idea, unit, tick, typical, strips, namesStages, ways, brackets, apart });
    Object.assign(this, { title: raw.name, span: raw.span * tick, directions: unpack(raw.directions) });
    const count = raw.ranks.reduce((sum, rank) => sum + rank.order.length, 0);
    this.lanes = raw.ranks.map(({ behind, busy, peak, lane }) => ({ behind, busy, peak, lane }));
    this.moves = raw.moves.map(([rank, start, end, name, kind, held, strip]) => {
      return { rank, start: start * raw.tick, end: end * raw.tick, name, kind, held, strip };
    });
    this.first = []; // by rank: its first place
    this.idleOf = []; // by rank: its idle times
    this.sort = []; // kind, stage, needs: see _row in page.py
    this.rank = new Int32Array(count);
    this.kind = new Uint8Array(count);
    this.stage = new Int32Array(count);
    this.microbatch = new Int32Array(count);
    this.code = new Int32Array(count); // its number, by which others need it and wait for it
    this.waitsFor = new Int32Array(count); // the number of what it waited for, its own if for nothing
    this.lag = new Float64Array(count); // how long its value from another rank travelled
    this.start = new Float64Array(count);
    this.end = new Float64Array(count);
    this.chunk = new Uint8Array(count); // of which stage of its rank, modulo 2: the tint
    this.half = new Uint8Array(count); // 1: the upper half of a slot, 2: the lower
    this.places = new Map(); // by number; an all-reduce has one on each rank of its group
    let place = 0;
    raw.ranks.forEach((rank, r) => {
      this.first.push(place);
      const { order, sorts } = rank,
        here = [...new Set(Object.values(sorts).map((sort) => sort.stage))].sort((a, b) => a - b);
      for (const sort of Object.values(sorts)) sort.needs = unpack(sort.needs);
      const [microbatches, gaps, lasts, lags, waited] = ["microbatches", "gaps", "lasts", "lags", "waited"].map(
        (name) => column(order, rank[name]),
      );
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
      for (let index = 0; index < order.length; index += 1, place += 1) {
        const sort = (this.sort[place] = sorts[order[index]]);
        this.rank[place] = r;
        this.kind[place] = KINDS.indexOf(sort.kind);
        this.stage[place] = sort.stage;
        this.chunk[place] = here.indexOf(sort.stage) % 2;
        this.microbatch[place] = microbatches[index];
        this.code[place] = sort.first + raw.apart * Math.max(microbatches[index], 0);
        this.waitsFor[place] = this.code[place] + waited[index];
        this.lag[place] = lags[index] * raw.tick;
        time += gaps[index];
        idleUntil(time);
        this.start[place] = time * raw.tick;
        time += lasts[index];
        this.end[place] = time * raw.tick;
        free = Math.max(free, time);
        this.places.set(this.code[place], [...(this.places.get(this.code[place]) ?? []), place]);
      }
      idleUntil(raw.span);
      this.idleOf.push(idle);
      for (const index of rank.halves) this.half.set([1, 2], this.first[r] + index);
    });
    this.first.push(place);
    this.count = count;
    this.idle = this.idleOf.flat();
    const on = (rank) => (place) => this.rank[place] === rank;
    this.critical = new Set(raw.critical.map(([rank, code]) => this.places.get(code).find(on(rank))));
    delete raw.ranks;
  }

  collective(place) {
    return this.microbatch[place] < 0;
  }

  // The idle times of a rank that overlap the time between `from` and `to`.
  idleIn(rank, from, to) {
    const all = this.idleOf[rank],
      found = [];
    this.idleEnds ??= this.idleOf.map((idle) => idle.map(({ end }) => end));
    for (let at = above(this.idleEnds[rank], from); at < all.length && all[at].start < to; at += 1) found.push(all[at]);
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

  what(place) {
    const of = this.collective(place) ? "" : ` of micro-batch ${this.microbatch[place]}`;
    return `${WORDS[KINDS[this.kind[place]]]}${of} on stage ${this.stage[place]}`;
  }

  label(place) {
    return this.namesStages ? this.name(place) : this.name(place).replace(/^\d+/, "");
  }

  // The places of the actions with a name: of an all-reduce, one on each rank of its group.
  named(name) {
    this.byName ??= new Map(Array.from(this.places.values(), (places) => [this.name(places[0]), places]));
    return this.byName.get(name.toUpperCase()) ?? [];
  }

  // The places of the actions whose values an action needs.
  needs(place) {
    let giver = this.code[place];
    return this.sort[place].needs.map((way) => this.places.get((giver += way))[0]);
  }

  // Whether two actions are the same pass of two slices of one sequence; I is the backward of a split one.
  slices(giver, place) {
    const [one, other] = [giver, place].map((each) => KINDS[this.kind[each]].replace("I", "B"));
    return one === other && this.microbatch[giver] !== this.microbatch[place];
  }

  // The places of the actions that need an action's values, first those of its own micro-batch, kind by kind.
  gives(place) {
    this.needers ??= [...this.code.keys()].reduce((needers, needer) => {
      for (const giver of this.needs(needer)) (needers[giver] ??= []).push(needer);
      return needers;
    }, []);
    const other = (needer) => !this.collective(needer) && this.microbatch[needer] !== this.microbatch[place];
    return (this.needers[place] ?? []).sort((a, b) => other(a) - other(b) || this.kind[a] - this.kind[b]);
  }

  arrives(giver, place) {
    const travels = this.rank[giver] !== this.rank[place] && !this.collective(place);
    return this.end[giver] + (travels ? this.lag[place] : 0);
  }

  // The place before an action on its rank, in an earlier slot; -1 if it is the first.
  before(place) {
    const previous = place - (this.half[place] === 2 ? 2 : 1);
    return previous >= this.first[this.rank[place]] ? previous : -1;
  }

  // What an action waited for last: [giver, when its value was there], or null if its rank was busy until it started.
  waited(place) {
    if (this.waitsFor[place] === this.code[place]) return null;
    const [giver] = this.places.get(this.waitsFor[place]),
      slot = [place, place + [0, 1, -1][this.half[place]]]; // starts when both halves have what they need
    return [giver, this.arrives(giver, slot.find((each) => this.needs(each).includes(giver)) ?? place)];
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
    const { reason } = idle,
      long = `${reason} ${number(idle.end - idle.start)}`,
      next = /fill|order|drain/.test(reason) ? -1 : this.next(idle.rank, idle.end),
      last = next < 0 ? null : this.waited(next);
    if (!last) return [long, reason];
    const rank = this.rank[last[0]],
      whose = `for ${this.label(last[0])} of rank ${rank}`;
    return [`${long} ${whose}`, `${reason} ${whose}`, whose, `for rank ${rank}`, `r${rank}`];
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
    this.curves ??= [];
    if (this.curves[rank]) return this.curves[rank];
    const changes = [];
    for (let place = this.first[rank]; place < this.first[rank + 1]; place += 1) {
      const { held } = this.sort[place];
      if (held) changes.push([held > 0 ? this.start[place] : this.end[place], held]);
    }
    for (const move of this.moves)
      if (move.rank === rank && move.held) changes.push([move.held > 0 ? move.start : move.end, move.held]);
    changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let held = 0;
    return (this.curves[rank] = changes.map(([time, change]) => [time, (held += change)]));
  }

  // The stage-0 rank of each micro-batch: schedules with two directions have two.
  direction(place) {
    return this.directions[Math.max(this.microbatch[place], 0)];
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

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

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
