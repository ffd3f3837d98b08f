"""Attacks on `check`: the oracle's verdict on random plans, and time that follows the actions, not their numbers."""

from __future__ import annotations

import time
from itertools import count, repeat
from random import Random

import oracle
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from strategies import WIRES, Case, catalogue_plans, legal_cases, paired, random_cases, shuffled_cases

import pipelab
from pipelab import (
    LOAD,
    OFFLOAD,
    RESHARD,
    UNSHARD,
    Action,
    B,
    C,
    F,
    I,
    Plan,
    R,
    ScheduleError,
    U,
    W,
    check,
    lower,
    simulate,
)
from pipelab.errors import MOST_SLOTS, PipelabError, UsageError
from pipelab.plan.actions import EVERY_KIND

SECONDS = 20.0
"""How long a plan of a few thousand actions may take: far more than it does, far less than a table of huge numbers."""


@st.composite
def spoilt_cases(draw: st.DrawFn) -> Case:
    """A registered schedule's plan with a few actions dropped, repeated, moved or changed."""
    plan = draw(catalogue_plans())
    random = draw(st.randoms(use_true_random=False))
    rows = [list(row) for row in plan.rows]
    for _ in range(random.randrange(4)):
        row = random.choice([row for row in rows if row])
        at = random.randrange(len(row))
        match random.randrange(5):
            case 0:
                del row[at]
            case 1:
                random.choice(rows).insert(random.randrange(len(row) + 1), row[at])
            case 2:
                other = random.randrange(len(row))
                row[at], row[other] = row[other], row[at]
            case 3:
                row.insert(random.randrange(len(row) + 1), row.pop(at))
            case 4:
                numbers = random.randrange(-1, plan.microbatches + 1), random.randrange(-1, plan.stages + 1)
                row[at] = Action(random.choice("FBIW"), *numbers)
        rows = [row or [R(0)] for row in rows]
    return Case(tuple(map(tuple, rows)), plan.stages, plan.microbatches, tuple(plan.bound.rank_of_slot))


def every_kind(random: Random) -> Plan:
    """Return a plan with actions of every kind, replicas or slices, and pairs; half of them have a slip or two."""
    ranks, stages, microbatches = random.randint(1, 3), random.randint(1, 3), random.randint(1, 4)
    copies, sliced, some = random.random() < 0.3, random.choice([0.0, 0.0, 0.5]), random.random()
    sliced *= not copies
    home = [[random.randrange(ranks) for _ in range(stages)] for _ in range(microbatches if copies else 1)]
    before = {m: [e for e in range(m) if random.random() < sliced] for m in range(microbatches)}

    def place(m: int, s: int) -> int:
        return home[m % len(home)][s]

    todo = [F(m, s) for m in range(microbatches) for s in range(stages)]
    for forward in list(todo):
        at = forward.microbatch, forward.stage
        todo += [B(*at)] if random.random() < 0.6 else [I(*at), W(*at)]
        todo += [C(*at)] * (random.random() < 0.4 * some) + [U(*at)] * (random.random() < 0.3 * some and not copies)
    todo += [R(s) for s in range(stages) if random.random() < 0.3]
    optional = {value for each in todo for value in oracle.gives(each) if value[0] in ("again", "weights")}
    after = (lambda m, _: before[m]) if any(before.values()) else None
    rows: list[list[object]] = [[] for _ in range(ranks)]
    done: set[oracle.Value] = set()
    while todo:
        ready = [each for each in todo if oracle.needs(each, stages, microbatches, after, optional) <= done]
        todo.remove(action := random.choice(ready))
        done |= oracle.gives(action)
        whose = range(microbatches) if action.kind == "R" else [action.microbatch]
        for rank in {place(m, action.stage) for m in whose}:
            rows[rank].append(action)
    sharded = {s for s in range(stages) if random.random() < 0.4 * some}
    rows = [moving(random, paired(row, random) if random.random() < 0.3 else row, sharded) for row in rows]
    for _ in range(random.choice([0, 0, 1, 2])):
        row = random.choice(rows)
        other = row if random.random() < 0.7 else random.choice(rows)
        slip = Action(random.choice(EVERY_KIND), random.choice([None, *range(microbatches)]), random.randrange(stages))
        at = random.randrange(len(row) + 1)
        if at < len(row) and random.random() < 0.4:  # two of a kind change places, which slices forbid
            kinds = [(half.kind, half.stage) for half in (oracle.halves(item)[0] for item in row)]
            two = random.choice([index for index, kind in enumerate(kinds) if kind == kinds[at]])
            row[at], row[two] = row[two], row[at]
            continue
        taken = [row.pop(at)] if at < len(row) and random.random() < 0.8 else [slip]
        at = max(0, at + random.randint(-3, 3))
        other[at:at] = taken if random.random() < 0.8 else [slip] * random.randrange(2)
    return Plan(rows, stages, microbatches, place, after=after)


def moving(random: Random, row: list, sharded: set[int]) -> list:
    """Return a row that also gathers what is sharded and frees it, and takes activations away and brings them back."""
    again = {(each.microbatch, each.stage) for each in row if getattr(each, "kind", "") == "C"}
    found: list[object] = []
    gathered, kept, away = set[int](), set[tuple[int, int]](), set[tuple[int, int]]()
    for item in row:
        halves = oracle.halves(item)
        needed = {half.stage for half in halves if half.kind != "R"} & sharded
        back = {(half.microbatch, half.stage) for half in halves if half.kind in "BI"}
        found += [UNSHARD(s) for s in sorted(needed - gathered)]
        loaded = {each for each in away if each in back or random.random() < 0.3}
        found += [*(LOAD(*each) for each in sorted(loaded)), item]
        gathered |= needed
        away -= loaded
        at = [(half.kind, (half.microbatch, half.stage)) for half in halves]
        kept = (kept | {key for kind, key in at if kind == ("C" if key in again else "F")}) - back
        gone = {key for key in kept - away if random.random() < 0.1}
        found += [OFFLOAD(*key) for key in sorted(gone)]
        away |= gone
        free = {s for s in gathered if random.random() < 0.3 or item is row[-1]}
        found += [RESHARD(s) for s in sorted(free)]
        gathered -= free
    return found


def fuzz_kinds(number: int) -> str | None:
    """Compare the verdict on fifty plans with every kind of action with the oracle's, also with sends and receives."""
    for index in range(50 * number, 50 * number + 50):
        random = Random(index)
        plan = every_kind(random)
        faults, legal = check(plan), oracle.legal(plan.written, plan.stages, plan.microbatches, plan.place, plan.after)
        if (not faults) != legal:
            return f"plan {index}: {legal}, and found {faults}\n{plan}"
        if legal and plan.after is None and not plan.bound.pairs:
            wire = random.choice(WIRES)
            read = Plan.parse("; ".join(" ".join(row) for row in lower(plan, **wire).rows))
            told = {fault.code for fault in check(read, transport=wire["transport"])}
            if told != {fault.code for fault in check(plan, **wire)}:
                return f"plan {index}, {wire}: {told}\n{plan}\n{read}"
        if legal and not simulate(plan).makespan > 0:
            return f"plan {index}: no time\n{plan}"
    return None


def fuzz_plans(number: int) -> str | None:
    """Compare the verdict on twenty random plans with the oracle's; simulate refuses the same plans."""

    @seed(number)
    @settings(max_examples=20, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck)
    @given(random_cases() | shuffled_cases() | legal_cases() | spoilt_cases())
    def agree(case: Case) -> None:
        start = time.process_time()
        faults = check(case.plan)
        assert (not faults) == case.legal, faults
        for fault in faults:
            assert str(fault)
        refused = None
        try:
            simulate(case.plan)
        except ScheduleError as error:
            refused = str(error)
        assert (refused is None) == (not faults)
        assert refused is None or refused.startswith(f"{len(faults)} fault")
        assert time.process_time() - start < SECONDS

    agree()
    return None


fuzz_plans.seeds = 4
fuzz_kinds.seeds = 8


def fuzz_sizes(number: int) -> str | None:
    """Check a plan that names a few huge numbers, or a schedule of a huge size, in bounded time."""
    random = Random(number)
    start = time.process_time()
    try:
        what = _schedule(random) if random.random() < 0.3 else _plan(random)
        told = f"{type(what).__name__}, {len(faults)} faults" if (faults := check(what)) else "no fault"
        for fault in faults[:100]:
            assert str(fault)
    except PipelabError as error:
        told = str(error)
        if not isinstance(error, UsageError):
            return f"{type(error).__name__}: {error}"
    spent = time.process_time() - start
    return None if spent < SECONDS else f"{spent:.1f} s: {told[:300]}"


fuzz_sizes.seeds = 8


def _huge(random: Random) -> int:
    """Return a number that is as often small as it is huge."""
    return random.randrange(4) if random.random() < 0.5 else random.randrange(10 ** random.randrange(1, 12))


def _plan(random: Random) -> Plan:
    """Return rows of at most a few thousand actions, with an all-reduce here and there, and perhaps an endless row."""
    length, ranks = random.choice([1, 2, 5, 50, 300]), random.choice([1, 2, 3, 40, 500])
    named = random.random() < 0.8
    largest = _huge(random) + 1

    def one() -> Action:
        stage = random.choice([_huge(random), random.randrange(largest), 0]) if named else None
        if random.random() < 0.1:
            return R(stage)
        microbatch = random.choice([_huge(random), random.randrange(largest), random.randrange(length)])
        return Action(random.choice("FFBBIW"), microbatch, stage)

    rows: list[object] = [[one() for _ in range(random.randrange(length + 1))] for _ in range(ranks)]
    if length == 300:
        rows = rows[:20]
    if random.random() < 0.2:
        rows[random.randrange(len(rows))] = random.choice([repeat(one()), (Action("F", m) for m in count())])
    sizes = {}
    for name in ("stages", "microbatches"):
        if random.random() < 0.3:
            sizes[name] = random.choice([random.randrange(1, 300), MOST_SLOTS * random.randrange(2, 10**6)])
    return Plan(rows, **sizes)


def _schedule(random: Random) -> pipelab.Schedule:
    """Return a registered schedule in which one size at least is huge."""
    kind = random.choice(list(pipelab.schedules.values()))
    sizes = [random.randrange(1, 9), MOST_SLOTS * random.randrange(1, 10**9)]
    random.shuffle(sizes)
    made = kind(*sizes)
    return pipelab.replicate(made, random.randrange(1, 10**9)) if random.random() < 0.3 else made
