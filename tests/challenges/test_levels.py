"""The levels: their pars are proven, their references reach them, and what may be placed is what `check` allows."""

from __future__ import annotations

import itertools
import re
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

import pytest

import pipelab
from pipelab.challenges.levels import judge, level, levels
from pipelab.errors import UsageError

LEVELS = list(levels().values())


@pytest.mark.teacher
@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_the_reference_reaches_par_and_nothing_is_better(each):
    attempt = judge(each, each.solution)
    assert (attempt.reached, attempt.score) == ("par", each.par)
    if each.listed:
        assert not any(is_enough(each, moved) for moved in choices(each, each.par - 1))
        assert any(is_enough(each, moved) for moved in choices(each, each.par))
    elif each.sharded:
        assert fewest_gathers(each, each.cap) == each.par
    elif each.queued:
        assert quicker(each, each.par) is None
        assert quicker(each, each.par + 0.5) == each.par
    else:
        cap = each.par - 1 if each.within else each.cap
        best = pipelab.optimum(each.solution, each.cost, memory_cap=cap, seconds=60)
        assert best.proven
        assert best.makespan > each.within if each.within else best.makespan == each.par


def choices(level, moves):
    """Return every choice of so many actions of the listed rows."""
    return itertools.combinations(" ".join(level.listed).split(), moves)


def is_enough(level, moved):
    """Return whether an order exists that leaves all others in their listed order: whether none waits for itself."""
    before = {}
    for word in " ".join(level.listed).split():
        stage, kind, m = re.fullmatch(r"(\d)([FB])(\d)", word).groups()
        needs = {f"{int(stage) - 1}F{m}"} if kind == "F" else {f"{stage}F{m}", f"{int(stage) + 1}B{m}"}
        before[word] = needs - {f"-1F{m}", f"{level.stages}B{m}"}
    for row in level.listed:
        for one, other in itertools.pairwise(word for word in row.split() if word not in moved):
            before[other].add(one)
    try:
        return bool(list(TopologicalSorter(before).static_order()))
    except CycleError:
        return False


def fewest_gathers(level, cap):
    """Return the fewest gathers of all orders: of the shortest ways through the states, the shortest.

    Micro-batches are alike, so a state is how many forwards and backwards each stage has behind it, and which stage's
    weights each rank has. A step to another stage of the rank counts one.
    """
    last = level.stages - 1
    fewest, states = {}, [(0, (0,) * level.stages, (0,) * level.stages, (None,) * level.ranks)]
    while states:
        count, forwards, backwards, there = heappop(states)
        if min(backwards) == level.microbatches:
            return count
        if (forwards, backwards, there) in fewest:
            continue
        fewest[forwards, backwards, there] = count
        for stage in range(level.stages):
            rank = level.rank_of(stage)
            now = (count + (there[rank] != stage), (*there[:rank], stage, *there[rank + 1 :]))
            held = sum(forwards[each] - backwards[each] for each in range(rank, level.stages, level.ranks))
            if held < cap and forwards[stage] < (forwards[stage - 1] if stage else level.microbatches):
                more = tuple(done + (each == stage) for each, done in enumerate(forwards))
                heappush(states, (now[0], more, backwards, now[1]))
            if backwards[stage] < (forwards[last] if stage == last else backwards[stage + 1]):
                more = tuple(done + (each == stage) for each, done in enumerate(backwards))
                heappush(states, (now[0], forwards, more, now[1]))
    return None


def quicker(level, limit):
    """Return the shortest makespan below a limit of all orders in a level whose values queue; `None` if there is none.

    It tries every action that may come next, of every micro-batch, and leaves out what cannot end in time any more.
    """
    best, seen = limit, set()
    every = set(itertools.product(range(level.stages), "FB", range(level.microbatches)))
    states = [({}, (0.0,) * level.ranks, {})]  # when each action ends, when each rank is free, what is in each queue
    while states:
        ends, free, queues = states.pop()
        if len(ends) == len(every):
            best = min(best, max(free))
        for word in every - ends.keys():
            stage, kind, m = word
            rank, step = level.rank_of(stage), 1 if kind == "F" else -1
            giver, needer = (stage - step, kind, m), (stage + step, kind, m)
            held = sum(1 if other == "F" else -1 for at, other, _ in ends if level.rank_of(at) == rank)
            alike = (0, "F", m - 1) if word == (0, "F", m) and m else None  # micro-batches are alike: one order of them
            needs = {alike, giver if giver in every else None, (stage, "F", m) if kind == "B" else None} - {None}
            if not needs <= ends.keys() or (kind == "F" and held >= level.cap):
                continue
            start, left = free[rank], dict(queues)
            if giver in every and (home := level.rank_of(giver[0])) != rank:
                (first, arrives), *rest = queues[home, rank]
                if first != word:
                    continue
                start, left[home, rank] = max(start, arrives), tuple(rest)
            end = start + level.time(kind, rank)
            if needer in every and (target := level.rank_of(needer[0])) != rank:
                arrives = max(end, left.get(("sent", rank, target), 0)) + level.latency
                left[rank, target] = (*left.get((rank, target), ()), (needer, arrives))
                left["sent", rank, target] = arrives
            ended, frees = ends | {word: end}, tuple(end if at == rank else time for at, time in enumerate(free))
            work = [0.0] * level.ranks
            for at, other, _ in every - ended.keys():
                work[level.rank_of(at)] += level.time(other, level.rank_of(at))
            state = (frozenset(ended.items()), frees, frozenset(left.items()))
            if max(map(sum, zip(frees, work, strict=True))) < best and state not in seen:
                seen.add(state)
                states.append((ended, frees, left))
    return best if best < limit else None


@pytest.mark.parametrize("each", LEVELS, ids=lambda each: each.name)
def test_a_level_says_all_that_a_learner_needs(each):
    assert level(str(1 + LEVELS.index(each))) is level(each.name)
    assert each.par < each.good
    assert len(each.hints) == 3
    assert each.lesson.endswith(".")
    assert each.story.endswith(".")
    assert each.source


@pytest.mark.parametrize("unknown", ["0", "17", "nine"])
def test_an_unknown_level_is_told_with_those_there_are(unknown):
    with pytest.raises(UsageError, match="fill"):
        level(unknown)


@pytest.mark.parametrize(
    ("name", "schedule", "said"),
    [
        ("four", pipelab.GPipe(4, 8), "memory-cap"),
        ("four", pipelab.GPipe(3, 8), "3 ranks"),
        ("four", pipelab.GPipe(4, 4), "4 micro-batches"),
        ("around", pipelab.GPipe(2, 3), "stages_per_rank"),
        ("four", pipelab.ZBH1(4, 8), "F and B only"),
        ("valley", pipelab.Greedy(3, 4, stages_per_rank=2, memory_cap=6), "stage 3 is on rank 2"),
        ("light", pipelab.Naive(4, 5), "75 units, and the level allows 39"),
        ("circle", pipelab.Plan.parse(level("circle").listed), "deadlock"),
        ("queue", pipelab.Greedy(2, 3, stages_per_rank=2, memory_cap=4, cost=level("queue").cost), "transfer-deadlock"),
        ("around", pipelab.with_gathers(pipelab.Interleaved1F1B(2, 3)), "2R on rank 0: this level has F and B only"),
        ("fill", pipelab.Plan.parse(["0F0 0F1 0F2", "1F0 1F1 1F2", "2F0 2F1 2F2"]), "missing"),
    ],
)
def test_an_attempt_that_breaks_a_rule_is_refused_with_the_reason(name, schedule, said):
    attempt = judge(level(name), schedule)
    assert attempt.reached == "refused"
    assert said in attempt.refusals[0]


class Own(pipelab.OneFOneB):
    """Stand for a learner's class that builds 1F1B."""


def test_what_is_given_by_the_catalogues_name_is_looked_up_and_what_a_learner_builds_is_recognised():
    by_name, own = pipelab.OneFOneB(4, 8), Own(4, 8)
    rows = pipelab.Plan.parse([" ".join(map(str, row)) for row in own.plan().rows])
    attempts = [judge(level("four"), subject) for subject in (by_name, by_name.plan(), own, own.plan(), rows)]
    assert {(attempt.reached, attempt.recognised) for attempt in attempts} == {("par", "1f1b")}
    assert [attempt.looked_up for attempt in attempts] == [True, True, False, False, False]


def test_what_the_solver_returns_is_looked_up_and_the_same_order_written_by_hand_counts():
    solved = pipelab.optimum(pipelab.Naive(3, 3)).plan
    rows = pipelab.Plan.parse([" ".join(map(str, row)) for row in solved.rows])
    attempts = [judge(level("fill"), subject) for subject in (solved, rows)]
    assert [(attempt.reached, attempt.looked_up) for attempt in attempts] == [("par", True), ("par", False)]


@pytest.mark.teacher
def test_a_built_schedule_is_recognised():
    assert judge(level("halves"), level("halves").solution).recognised == "zb-h1"
    assert judge(level("three"), level("three").solution).recognised is None


@pytest.mark.parametrize(
    ("name", "unit"), [("circle", "moves"), ("light", "activations"), ("queue", "units"), ("one-at-a-time", "gathers")]
)
def test_a_level_says_what_its_score_counts(name, unit):
    assert f"{level(name).good} {unit}; par: {level(name).par}" in level(name).goals


@pytest.mark.teacher
@pytest.mark.parametrize("name", ["fill", "four", "around", "halves"])
def test_a_level_cites_the_section_that_the_catalogue_cites(name):
    each = level(name)
    reference = judge(each, each.solution).recognised
    assert each.source.rpartition("section ")[2] in pipelab.schedules[reference].source.replace(",", "").split()


@pytest.mark.teacher
def test_what_teachers_read_about_transfers_and_other_orders_holds():
    around, four, queue = level("around"), level("four"), level("queue")
    plans = (pipelab.OneFOneB(2, 3), around.solution)
    assert [len(pipelab.simulate(plan, around.cost).transfers) for plan in plans] == [6, 18]
    assert "18 transfers instead of 6" in around.note
    greedy = pipelab.simulate(pipelab.Greedy(4, 8, memory_cap=4), four.cost)
    assert (greedy.makespan, greedy.peak_activations) == (33, (4, 4, 4, 1))
    assert "only order" in four.note
    assert pipelab.optimum(pipelab.Interleaved1F1B(2, 3), queue.cost, memory_cap=queue.cap).makespan == 25
    assert "25 units" in queue.story


def greedy(name, **more):
    each = level(name)
    return pipelab.Greedy(each.ranks, each.microbatches, memory_cap=each.cap, cost=each.cost, **more)


@pytest.mark.parametrize(
    ("name", "schedule", "makespan", "peak", "said"),
    [
        ("light", pipelab.OneFOneB(4, 5), 39, 4, "1F1B takes 39. It holds four"),
        ("slow", pipelab.OneFOneB(4, 4), 31, 4, "1F1B takes 31"),
        ("two", greedy("two"), 44, 2, "that takes 44"),
        ("far", pipelab.OneFOneB(4, 6), 33, 4, "1F1B takes 33"),
        ("three", greedy("three"), 35, 3, "that takes 35"),
        ("three", pipelab.OneFOneB(4, 5), 30, 4, "1F1B would hold four"),
        ("around-in-three", greedy("around-in-three", stages_per_rank=2), 16.5, 3, "that takes 16.5"),
        ("around-in-three", pipelab.Interleaved1F1B(2, 4), 13.5, 5, "holds five"),
        ("no-bubble", greedy("no-bubble", split=True), 20, 4, "that takes 20"),
        ("no-bubble", pipelab.ZBH2(3, 5), 18, 5, "holds five"),
    ],
)
def test_what_a_level_says_of_known_orders_holds(name, schedule, makespan, peak, said):
    trace = pipelab.simulate(schedule, level(name).cost)
    assert (trace.makespan, max(trace.peak_activations)) == (makespan, peak)
    assert said in " ".join([level(name).story, *level(name).hints])


@pytest.mark.teacher
def test_what_is_said_about_gathers_holds():
    each, before = level("one-at-a-time"), level("around-in-three")
    assert (each.score(pipelab.simulate(before.solution)), each.score(pipelab.simulate(pipelab.LoopedBFS(2, 4)))) == (
        16,
        6,
    )
    assert "16 times" in each.story
    assert "6 times" in each.hints[1]
    assert [fewest_gathers(each, cap) for cap in (3, 4, 5)] == [10, 10, 6]
    assert pipelab.simulate(each.solution, each.cost).makespan == 18
    cost = pipelab.Cost(gather=2.25)
    slow, quick = (pipelab.simulate(pipelab.with_gathers(plan, 1), cost) for plan in (each.solution, before.solution))
    assert slow.makespan == quick.makespan == 23.625
    assert ("takes 18 units instead of 16" in each.note, "with five it is 6" in each.note) == (True, True)
