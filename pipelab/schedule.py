"""Schedules: what a student writes in ten lines, and copies of it side by side."""

from __future__ import annotations

import gc
import inspect
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import compress
from types import ModuleType
from typing import Any, ClassVar

from pipelab.checking.checker import Faults, as_plan, require_legal
from pipelab.errors import counted, require_size, require_slots
from pipelab.plan.actions import RESHARD, UNSHARD, Action, Item, Pair
from pipelab.plan.all_reduce import with_reduces
from pipelab.plan.binding import After
from pipelab.plan.bound import MOST_ACTIONS, endless_limit, read
from pipelab.plan.fault import Fault, ScheduleError, misfit, raised, readable, shorten, students_fault, students_line
from pipelab.plan.order import units
from pipelab.plan.plan import Plan
from pipelab.plan.transfers import Lookahead, Step, lookaheads, residence

DOCSTRINGS: dict[str, str] = {}
"""What each schedule's class says of itself, by its name."""


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Let Python's garbage collector wait: it would look at a plan's millions of actions again and again."""
    on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if on:  # it is never off afterwards because of two threads, or of an interrupt
            gc.enable()


class Schedule(ABC):
    """The order in which every rank runs its actions, for any number of ranks and micro-batches.

    Subclass it and write `actions`. By default, stage `s` is on rank `s % ranks`; override `place` to put it elsewhere.
    If each rank holds several stages, set `stages_per_rank` in the class.

    Args:
        ranks: how many workers the pipeline has.
        microbatches: how many slices the batch is cut into.
        stages_per_rank: how many stages each rank holds; by default, the class's own number.

    Example:
        >>> import pipelab
        >>> from pipelab import B, F, I, W
        >>> class AllThenAll(pipelab.Schedule):
        ...     def actions(self, rank):
        ...         for m in range(self.microbatches):
        ...             yield F(m)
        ...         for m in range(self.microbatches):
        ...             yield B(m)
        >>> AllThenAll(ranks=2, microbatches=2).plan().rows
        ((0F0, 0F1, 0B0, 0B1), (1F0, 1F1, 1B0, 1B1))

        This one has two stages on every rank, down the ranks and back up, and splits every backward in two halves:

        >>> class Valley(pipelab.Schedule):
        ...     stages_per_rank = 2
        ...     def place(self, microbatch, stage):
        ...         return min(stage, self.stages - 1 - stage)
        ...     def actions(self, rank):
        ...         down, up = rank, self.stages - 1 - rank
        ...         for m in range(self.microbatches):
        ...             yield from (F(m, down), F(m, up), I(m, up), I(m, down), W(m, up), W(m, down))
        >>> Valley(ranks=2, microbatches=1).plan().rows
        ((0F0, 3F0, 3I0, 0I0, 3W0, 0W0), (1F0, 2F0, 2I0, 1I0, 2W0, 1W0))

    Raises:
        UsageError: if a number is not a positive whole number, or above 4,194,304.
    """

    source: ClassVar[str] = ""
    """Where the schedule comes from: paper and section."""

    closed_forms: ClassVar[Mapping[str, str]] = {}
    """Formulas for `"makespan"`, `"bubble"`, `"span"` and `"peak"`; after `if`, when one holds: `"peak if M >= P"`.

    `P` ranks, `M` micro-batches, `v` stages per rank, `k` slices per sequence, rank `r`, longest round `L`; `F`, `B`,
    `I`, `W` and `FB` are the times of a rank's share of the model: forward, backward, its two halves, an overlapped
    pair. `T` is the time of a transfer, in `"makespan with latency"`; all other formulas are for transfers that take no
    time. `C` is the time of a forward that runs again, in `"makespan with recomputation"`: see `with_recompute`.
    """

    needs: ClassVar[Mapping[str, str]] = {}
    """What the schedule needs to exist, in words, each with its formula: `{"an even number of ranks": "P % 2 == 0"}`.

    The letters are as in `closed_forms`. A schedule without needs accepts any size.
    """

    def __init_subclass__(cls) -> None:
        """Note the docstring: of classes of one name, the one written last."""
        DOCSTRINGS[cls.__name__] = cls.__doc__ or ""

    stages_per_rank: int = 1
    """How many stages each rank holds by default."""

    slices: int = 1
    """Into how many slices each sequence is cut: micro-batch `m` is slice `m % slices` of sequence `m // slices`."""

    def __init__(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> None:
        """Keep the sizes."""
        self.ranks = require_size("ranks", ranks)
        self.microbatches = require_size("microbatches", microbatches)
        self.stages_per_rank = require_size(
            "stages_per_rank", self.stages_per_rank if stages_per_rank is None else stages_per_rank
        )

    @abstractmethod
    def actions(self, rank: int) -> Iterable[Item]:
        """Yield what one rank does, in order."""

    @property
    def stages(self) -> int:
        """How many stages the model is split into."""
        return self.ranks * self.stages_per_rank

    def place(self, microbatch: int, stage: int) -> int:  # noqa: ARG002 - schedules that override it use both
        """Return the rank that runs a stage for a micro-batch."""
        return stage % self.ranks

    def after(self, microbatch: int, stage: int) -> Iterable[int]:  # noqa: ARG002 - schedules that override it use both
        """Return the micro-batches that come before one on a stage: by default the slice before it, if there is one.

        Causal attention lets a slice of a sequence read the slices before it. So their forwards come first on each
        stage, and their backwards last. `slices` cuts every sequence into so many; override this for anything else,
        and name only micro-batches with lower numbers.

        Example:
            >>> import pipelab
            >>> class Sliced(pipelab.OneFOneB):
            ...     slices = 2
            >>> [list(Sliced(ranks=1, microbatches=4).after(m, 0)) for m in range(4)]
            [[], [0], [], [2]]
        """
        return [microbatch - 1] if microbatch % self.slices else []

    @classmethod
    def refusal(cls, ranks: int, microbatches: int) -> str | None:  # noqa: ARG003 - schedules that override it use both
        """Return why the schedule cannot exist at this size, with the nearest sizes that can; `None` if it can."""
        return None

    @_collecting_later()
    def draft(self) -> Plan:
        """Return the plan unchecked: `pipelab.check` then explains what is wrong.

        Raises:
            ScheduleError: if the size is refused, or if `actions` raises.
            UsageError: if there are more than 4,194,304 stages times micro-batches.
        """
        name = self._name()
        if unsound := self._unsound():
            raise ScheduleError([unsound], name)
        stages = self.stages
        require_slots(stages, self.microbatches)
        limit = endless_limit(stages, self.microbatches)
        room = MOST_ACTIONS
        rows: list[list[object]] = []
        faults: list[Fault] = []
        for rank in range(self.ranks):
            row: list[object] = []
            try:
                # The actions before an error show where it happened.
                read(row, _iterable(self.actions(rank)), min(limit, room))
            except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is reported with its line
                faults.append(_raised(self, rank, row, error))
                cause = error
            rows.append(row)
            room -= len(row)
            if room < 0:
                raise ScheduleError([_too_many(rank, row)], name)
        if faults:
            raise ScheduleError(_merged(faults), name) from cause
        return Plan(rows, stages, self.microbatches, self.place, name, self._after)

    @property
    def _after(self) -> After | None:
        """The method `after`, if it names any micro-batch: a plan without slices is made more quickly."""
        return self.after if self.slices > 1 or type(self).after is not Schedule.after else None

    def _unsound(self) -> Fault | None:
        """Return why `actions` cannot be called at this size; `None` if it can."""
        if not (hasattr(self, "ranks") and hasattr(self, "microbatches")):
            message = f"{type(self).__name__} has no sizes: its __init__ does not call the one of Schedule"
            hint = "call super().__init__(ranks, microbatches) there, first"
            return students_fault(message, type(self).__init__, hint)
        return (
            misfit("refusal", self.refusal, "ranks", "microbatches")
            or self._refused()
            or self._without_stages()
            or misfit("actions", self.actions, "rank")
        )

    def _refused(self) -> Fault | None:
        """Return that the size is refused, or what is wrong with `refusal`; `None` if the size is accepted."""
        asked = f"refusal({self.ranks}, {self.microbatches})"
        try:
            reason: object = self.refusal(self.ranks, self.microbatches)
        except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is reported with its line
            return raised(asked, error, self.refusal, "fix that line")
        if reason is None or isinstance(reason, str):
            return None if reason is None else Fault("refused", None, None, None, reason)
        hint = "return None if the size is right, and otherwise the reason, as a text"
        return students_fault(f"{asked} returned {shorten(reason)}", self.refusal, hint)

    def _without_stages(self) -> Fault | None:
        """Return what is wrong with `stages`; `None` if it is a positive whole number."""
        written = getattr(type(self).stages, "fget", type(self).stages)
        try:
            stages: object = self.stages
            if callable(stages):
                hint = "write @property above def stages(self)"
                return students_fault("stages is a method, not a number", written, hint)
            require_size("stages", stages)
        except Exception as error:  # noqa: BLE001 - a student's code: whatever it raises is reported with its line
            return raised("asking for stages", error, written, "return how many stages there are, a whole number")
        return None

    def plan(self) -> Plan:
        """Return the checked plan.

        Raises:
            ScheduleError: if the size is refused, if `actions` raises, or if the plan has faults; it lists all of them.
        """
        plan = self.draft()
        require_legal(plan)
        return plan

    def forwards(self) -> Plan:
        """Return the checked plan of the forwards alone, for evaluation: see `Plan.forwards`.

        `actions` need not yield backwards for it.

        Example:
            >>> import pipelab
            >>> print(pipelab.DualPipe(ranks=2, microbatches=4).forwards())
            rank 0 | 0F0 1F2 0F1 1F3
            rank 1 | 0F2 1F0 0F3 1F1

        Raises:
            ScheduleError: as `plan`.
        """
        plan = self.draft().forwards()
        require_legal(plan)
        return plan

    def _name(self) -> str:
        """Return `repr`, or the class's name if `repr` raises."""
        try:
            return repr(self)
        except Exception:  # noqa: BLE001 - a student's code, or one that has not set its sizes
            return type(self).__name__

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the plan, or why there is none."""
        try:
            return self.draft()._repr_html_()
        except ScheduleError as error:
            return Faults(error.faults, self._name())._repr_html_()

    def __repr__(self) -> str:
        """Return the schedule's name, its sizes, and its own parameters that differ from their defaults."""
        shown = [f"ranks={self.ranks}", f"microbatches={self.microbatches}"]
        if self.stages_per_rank != 1:
            shown.append(f"stages_per_rank={self.stages_per_rank}")
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = vars(self).get(name, vars(self).get(f"_{name}", parameter.default))
            # Compared as text, because arrays have no single answer to `==`.
            if name not in ("ranks", "microbatches", "stages_per_rank") and _argument(value) != _argument(
                parameter.default
            ):
                shown.append(f"{name}={_argument(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _argument(value: object) -> str:
    """Return an argument as text on one line: a function's name, or the object's `repr`."""
    return str(getattr(value, "__name__", "")) or shorten(value)


def _iterable(returned: Any) -> Iterable[object]:
    """Return what `actions` returned if it is a sequence or a generator."""
    guess = "did you mean to yield the actions, or to return a list of them?"
    if isinstance(returned, Sequence) and not isinstance(returned, str) and any(map(_is_row, returned)):
        rows = sum(map(_is_row, returned))
        raise TypeError(
            f"actions(rank) returned {counted(rows, 'list')} within a list, {shorten(returned)}: return "
            "one list with the actions of this rank only, or join the lists"
        )
    if isinstance(returned, (Mapping, AbstractSet)):
        guess = f"a {type(returned).__name__} has no order; return the list of one rank's actions"
    elif isinstance(returned, Generator):
        return _yielded(returned)
    elif isinstance(returned, Iterable) and not isinstance(returned, str):
        return returned
    elif callable(returned):
        guess = "did you mean to call it?"
    raise TypeError(f"actions(rank) returned {shorten(returned)}, which is not a sequence of actions: {guess}")


def _yielded(generator: Generator[object, None, object]) -> Iterator[object]:
    """Yield what a generator yields; refuse a returned value, which would be lost."""
    lost = yield from generator
    if lost is not None:
        raise TypeError(
            f"actions(rank) returned {shorten(lost)}, but it also has a yield, so the returned value would be lost: "
            "write yield from instead of return"
        )


def _is_row(item: object) -> bool:
    """Tell whether something is a list of actions."""
    if type(item) in (Action, Pair):
        return False
    item = readable(item)
    return isinstance(item, (list, tuple)) and bool(item) and all(isinstance(each, (Action, Pair)) for each in item)


def _raised(schedule: Schedule, rank: int, row: list[object], error: Exception) -> Fault:
    after = f" after {counted(len(row), 'action')}, the last one {shorten(row[-1])}" if row else ""
    line = students_line(error, schedule.actions)
    message = f"actions({rank}) raised {type(error).__name__}{after}: {error}\n  at {line}"
    hint = "fix that line; the schedule itself was not checked yet"
    return Fault("exception", rank, len(row), None, message, hint)


def _too_many(rank: int, row: list[object]) -> Fault:
    where = f"the ranks up to {rank} list" if rank else "rank 0 lists"
    message = f"{where} more than {MOST_ACTIONS} actions, the most that a plan may have; pipelab read no further"
    hint = "end the loop after the last backward, so that the generator stops"
    return Fault("endless", rank, len(row) - 1, row[-1], message, hint)


def _merged(faults: list[Fault]) -> list[Fault]:
    """Return one fault if every rank failed at the same line."""
    first, *others = faults
    tail = first.message.partition(" raised ")[2]
    if others and all(other.message.partition(" raised ")[2] == tail for other in others):
        ranks = ", ".join(str(other.rank) for other in others)
        summary, line, rest = first.message.partition("\n")
        return [replace(first, message=f"{summary} (and so on rank {ranks}){line}{rest}")]
    return faults


class Replicated(Schedule):
    """Several copies of one pipeline that share the batch; `replicate` makes it."""

    source = "Narayanan et al. 2021, Megatron-LM (arXiv:2104.04473), section 3: pipeline and data parallelism combined"

    def __init__(self, schedule: Schedule | Plan, replicas: int) -> None:
        """Keep the pipeline, and compute the sizes of all copies."""
        replicas = require_size("replicas", replicas)
        if not isinstance(schedule, Plan) and not hasattr(schedule, "microbatches"):
            schedule = as_plan(schedule)  # explains an object without sizes
        per_rank = getattr(schedule, "stages_per_rank", -(-schedule.stages // schedule.ranks))
        super().__init__(schedule.ranks * replicas, schedule.microbatches * replicas, per_rank)
        self.schedule = schedule
        self.replicas = replicas

    @property
    def stages(self) -> int:
        """How many stages the model is split into: each is on one rank of every replica."""
        return self.schedule.stages

    def place(self, microbatch: int, stage: int) -> int:
        """Return the rank that runs a stage: micro-batches are dealt to the replicas in turn."""
        turn, replica = divmod(microbatch, self.replicas)
        return replica * self._copied.ranks + self._copied.bound.route(turn)[stage]

    def actions(self, rank: int) -> Iterator[Any]:
        """Yield what the pipeline's own rank does, with the micro-batches of this replica."""
        replica, inner = divmod(rank, self._copied.ranks)
        for item in self._copied.written[inner]:
            yield self._dealt(item, replica)

    def draft(self) -> Plan:
        """Return the plan of all replicas."""
        require_legal(self._copied)  # in `actions`, they would be reported as errors of that method
        plan = super().draft()
        return plan.forwards() if self._copied.forwards_only else plan

    def after(self, microbatch: int, stage: int) -> Iterable[int]:
        """Return the slices before one, all of the same replica."""
        turn, replica = divmod(microbatch, self.replicas)
        assert self._copied.after is not None
        return [each * self.replicas + replica for each in self._copied.after(turn, stage)]

    @property
    def _after(self) -> After | None:
        return None if self._copied.after is None else self.after

    @cached_property
    def _copied(self) -> Plan:
        """The plan of one replica."""
        plan = as_plan(self.schedule)
        require_legal(plan)
        return plan

    def _dealt(self, item: Any, replica: int) -> Any:
        """Return an item with its micro-batch's number among all replicas' micro-batches."""
        if isinstance(item, Pair):
            return Pair(self._dealt(item.forward, replica), self._dealt(item.backward, replica))
        assert isinstance(item, Action)
        if item.microbatch is None:
            return item
        return Action(item.kind, item.microbatch * self.replicas + replica, item.stage)

    def __repr__(self) -> str:
        """Return the call that made it."""
        name = self.schedule.name if isinstance(self.schedule, Plan) else repr(self.schedule)
        return f"replicate({name}, {self.replicas})"


def with_gathers(plan: Schedule | Plan, max_active_stages: int = 3, unshard_lookahead: Lookahead = "full") -> Plan:
    """Return a plan whose stages are sharded, with gathers, frees and reductions where PyTorch's runtime puts them.

    Before each action, a rank frees all but the next few stages that it comes to, and gathers the missing ones. After a
    stage's last gradient, its gradients are reduced.

    Args:
        plan: the plan or schedule.
        max_active_stages: how many stages' weights a rank keeps gathered; with 1, pairs are taken apart. With more, the
            next pair's second stage may be one more, as in PyTorch.
        unshard_lookahead: how many of its coming stages it gathers: `"full"`, as many as it keeps; `"auto"`, at most
            so many, but only 2 on rank 0, 3 on rank 1, and so on; or one number for each rank.

    Example:
        >>> import pipelab
        >>> print(with_gathers(pipelab.LoopedBFS(ranks=1, microbatches=2), max_active_stages=1))
        rank 0 | 0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1B1 1B0 1R 1RESHARD 0UNSHARD 0B1 0B0 0R 0RESHARD

    Raises:
        ScheduleError: if the plan has faults, such as gathers already in it.
        UsageError: if a number is not a positive whole number, or if `unshard_lookahead` is not one of these.
    """
    plan = as_plan(plan)
    require_legal(plan)
    most = require_size("max_active_stages", max_active_stages)
    bound = with_reduces(plan.bound, every_stage=True)
    rows: list[list[Item]] = []
    for rank, ahead in enumerate(lookaheads(unshard_lookahead, plan.ranks, most)):
        items = list(map(tuple, units(bound.lists[rank], bound.pairs if most > 1 else ())))
        gathered = [bound.computes(first) and not bound.codes.collective[first] for first, *_ in items]
        moves = residence(bound, list(compress(items, gathered)), most, ahead)
        rows.append([])
        for needs_weights, item in zip(gathered, items, strict=True):
            actions = map(bound.codes.action, item)
            rows[-1] += _moves(next(moves)) if needs_weights else ()
            rows[-1] += [Pair(*actions)] if len(item) > 1 else actions
        rows[-1] += _moves(next(moves))
    return plan.with_rows(rows, f"{plan.name}, sharded")


def _moves(steps: Iterable[Step]) -> Iterator[Action]:
    return ((UNSHARD if word == "UNSHARD" else RESHARD)(stage) for word, (stage,) in steps)


def replicate(plan: Schedule | Plan, replicas: int) -> Replicated:
    """Return a schedule of several copies of a pipeline that share the batch: data parallelism over pipelines.

    Replica `d` of `D` has the ranks `d * P` to `d * P + P - 1` and the micro-batches `d`, `d + D`, `d + 2 * D` and so
    on. Every stage is on one rank of each replica, and these ranks all-reduce its gradients. If the pipeline lists no
    `R` for a stage, pipelab inserts one right after the stage's last gradient on each rank:

        rank 0 | F0 F2    B0    B2 R
        rank 1 |    F0 B0 F2 B2 R
        rank 2 | F1 F3    B1    B3 R
        rank 3 |    F1 B1 F3 B3 R

    Args:
        plan: the pipeline to copy: a schedule, or a plan.
        replicas: how many copies.

    Example:
        >>> import pipelab
        >>> both = pipelab.replicate(pipelab.OneFOneB(ranks=2, microbatches=8), 2)
        >>> both.ranks, both.microbatches, both.stages
        (4, 16, 2)
        >>> both.plan().replicas
        {0: (0, 2), 1: (1, 3)}
        >>> pipelab.simulate(both, pipelab.Cost(all_reduce=5)).makespan
        32.0

    Raises:
        UsageError: if `replicas` is not a positive whole number.
        TypeError: if the first argument is neither a schedule nor a plan.
    """
    return Replicated(plan, replicas)


def own_schedules(module: ModuleType) -> dict[str, type[Schedule]]:
    """Return the schedules that are written in a module, by name."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, Schedule) and kind.__module__ == module.__name__
    }
