"""Actions: the words in which a schedule is written.

A schedule says, for every rank, in which order it runs `F` (forward), `B` (full backward), `I` (input gradient), `W`
(weight gradient), `C` (the forward, run again for its backward), `U` (update of a stage's weights) and `R` (all-reduce
of a stage's gradients over its replicas). The notation is PyTorch's: `2F0` is stage 2, forward, micro-batch 0. Beside
these, a channel of the rank may move what the rank holds: `UNSHARD` gathers a stage's weights, `RESHARD` frees them,
`OFFLOAD` takes an activation away, and `LOAD` brings it back.
"""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from operator import index
from types import NoneType
from typing import Any, Literal

from pipelab.errors import FormatError
from pipelab.plan.fault import readable

Kind = Literal["F", "B", "I", "W", "C", "U", "R", "UNSHARD", "RESHARD", "OFFLOAD", "LOAD"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What holds for every action of one kind. Other code asks for these, not for the letter.

    Attributes:
        word: the kind in a word.
        needs: the values that it needs: at most one of the same stage, and one of a neighbour.
        gives: the values that it gives. Other actions wait for the first; a second one only its own rank needs.
        holds: the size of `Memory` that its rank holds from its start on.
        releases: the size of `Memory` that its rank no longer holds from its end on.
        method: the method of a `Stage` that runs it.
        cost: the field of `Cost` that says how long it takes; without one, it takes no time.
        colours: its colours on a rank's first, third … stage, and on its second, fourth …; see `draw/colours.py`.
        notation: PyTorch's word for it, if that is not the letter.
        optional: whether `Codes` lay it out only for plans that list it, so that it costs other plans nothing.
        channel: the channel of its rank on which it runs, beside computing, one after the other. An action with a
            channel is a *move*: it does not compute, it changes what its rank holds, and it may come several times.
            `now`: it takes no time.
    """

    word: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    holds: str = ""
    releases: str = ""
    method: str = ""
    cost: str = ""
    colours: tuple[str, str] = ("#CA5900", "#D26A17")
    notation: str = ""
    optional: bool = False
    channel: str = ""

    @property
    def computes(self) -> bool:
        """Whether its rank does nothing else meanwhile."""
        return not self.channel

    @property
    def collective(self) -> bool:
        """Whether it gives nothing, and runs once for all micro-batches, on all ranks of its stage together."""
        return not self.gives

    @property
    def forward(self) -> bool:
        """Whether it gives a stage's output."""
        return "out(m,s)" in self.gives

    @property
    def backward(self) -> bool:
        """Whether it gives the gradient of a stage's input."""
        return "gin(m,s)" in self.gives

    @property
    def weight_grad(self) -> bool:
        """Whether it gives the gradient of a stage's weights."""
        return "gw(m,s)" in self.gives

    @property
    def again(self) -> bool:
        """Whether it runs a forward again."""
        return "again(m,s)" in self.gives

    @property
    def updates(self) -> bool:
        """Whether it gives new weights."""
        return "weights(m,s)" in self.gives

    @property
    def gathers(self) -> bool:
        """Whether its rank holds a stage's whole weights from it on."""
        return self.holds == "gathered"

    @property
    def in_flight(self) -> int:
        """How many more activations its rank holds after it: 1, 0 or -1."""
        return (self.holds in _ACTIVATION) - (self.releases in _ACTIVATION)


# Okabe and Ito's hues; what the lightnesses are for, `draw/colours.py` says.
_BLUE, _ORANGE, _YELLOW = ("#00598A", "#1F78AF"), ("#DA9700", "#F3C15A"), ("#DFD112", "#F1EA9A")
_GREEN, _PURPLE = ("#008C66", "#45BD98"), ("#4F2044", "#7D4C72")
_VIOLET, _SKY = ("#B040F0", "#D291F8"), ("#56B4E9", "#9AD6F6")
_CHANNEL = ("#6B6B6B", "#848484")
_KEPT, _LEFT = _ACTIVATION = "activations", "for_weight_grad"
# fmt: off
TRAITS: dict[Kind, Traits] = {
    "F": Traits("forward", needs=("out(m,s-1)",), gives=("out(m,s)",), holds=_KEPT,
                method="forward", cost="forward", colours=_BLUE),
    "B": Traits("backward", needs=("out(m,s)", "gin(m,s+1)"), gives=("gin(m,s)", "gw(m,s)"), releases=_KEPT,
                method="backward", cost="backward", colours=_ORANGE),
    "I": Traits("input gradient", needs=("out(m,s)", "gin(m,s+1)"), gives=("gin(m,s)",), holds=_LEFT, releases=_KEPT,
                method="backward_input", cost="input_grad", colours=_YELLOW),
    "W": Traits("weight gradient", needs=("gin(m,s)",), gives=("gw(m,s)",), releases=_LEFT,
                method="backward_weight", cost="weight_grad", colours=_GREEN),
    "C": Traits("recomputation", needs=("out(m,s)",), gives=("again(m,s)",), holds=_KEPT,
                method="recompute", cost="recompute", colours=_SKY, optional=True),
    "U": Traits("update", needs=("gw(m,s)",), gives=("weights(m,s)",), method="update", cost="update",
                colours=_VIOLET, optional=True),
    "R": Traits("all-reduce", needs=("gw(m,s)",), gives=(),
                cost="all_reduce", colours=_PURPLE, notation="REDUCE_GRAD"),
    "UNSHARD": Traits("gather", needs=(), gives=(), holds="gathered",
                      cost="gather", colours=_CHANNEL, channel="gather"),
    "RESHARD": Traits("free", needs=(), gives=(), releases="gathered", colours=_CHANNEL, channel="now"),
    "OFFLOAD": Traits("offload", needs=("out(m,s)",), gives=("away(m,s)",), releases=_KEPT, cost="offload",
                      colours=_CHANNEL, channel="offload"),
    "LOAD": Traits("load", needs=("away(m,s)",), gives=("back(m,s)",), holds=_KEPT, cost="load",
                   colours=("#8F8F8F", "#A3A3A3"), channel="load"),
}
# fmt: on
"""The kinds of action, each a row: a new one is a row, and the method of `Stage` that it names."""
# The collective ones last, as in `Codes`.
EVERY_KIND = tuple(TRAITS)
"""All of them: a tuple, in which a student's list may be looked for too."""
KINDS = tuple(sorted((kind for kind in TRAITS if TRAITS[kind].computes), key=lambda kind: TRAITS[kind].collective))
"""The kinds that compute."""
PER_MICROBATCH = tuple(kind for kind in KINDS if not TRAITS[kind].collective)
"""The kinds that run once for each micro-batch and stage: all but `R`."""
OPTIONAL = tuple(kind for kind in KINDS if TRAITS[kind].optional)
"""The kinds that most plans do not use."""
HALVES = tuple(kind for kind in KINDS if TRAITS[kind].gives in (("gin(m,s)",), ("gw(m,s)",)))
"""The kinds of the halves of a split backward: `I` and `W`."""

_USUAL = {(str, microbatch, stage) for microbatch in (int, NoneType) for stage in (int, NoneType)}
"""The types of an action's parts, unless a student made it of something else."""
_NUMBER = "[0-9]{1,4300}"  # Python reads no more digits
_WHOLE = {word: kind for kind, each in TRAITS.items() if each.collective for word in (kind, each.notation) if word}
_NOTATION = re.compile(
    rf"(?P<stage>{_NUMBER})?(?:(?P<kind>{'|'.join(kind for kind in TRAITS if not TRAITS[kind].collective)})"
    rf"(?P<microbatch>{_NUMBER})|(?P<whole>{'|'.join(_WHOLE)}))"
)
_POSTING = re.compile(rf"({_NUMBER})(SEND|RECV|WAIT_SEND)_([FB])({_NUMBER})")
_OLD_BACKWARD = re.compile(r"([0-9]*)BW([0-9]+)")


def _try(text: str) -> str:
    """Return a hint for a text that is not an action, if it is clear what was meant."""
    text = text.strip().upper()
    if text == "…":
        return "\n  try: Plan.to_csv, which writes all; what print shows leaves out the middle of long rows"
    if _POSTING.fullmatch(text):
        return "\n  try: Plan.parse or Plan.from_csv, which read whole rows, with their sends and receives"
    if old := _OLD_BACKWARD.fullmatch(text):
        return f"\n  try: {old[1]}B{old[2]}, and I for each B: PyTorch before 2.6 wrote BW for B, and B for I"
    return f"\n  try: {reprlib.repr(text)}, in capital letters" if _NOTATION.fullmatch(text) else ""


@dataclass(frozen=True, slots=True, init=False)
class Action:
    """One thing that a rank does, such as to run one micro-batch through one stage, in one direction.

    Make actions with the function of their kind, such as `F(0)`; `Action.parse` reads the notation back.

    Attributes:
        kind: `"F"`, `"B"`, `"I"`, `"W"`, `"C"`, `"U"`, `"R"`, `"UNSHARD"`, `"RESHARD"`, `"OFFLOAD"` or `"LOAD"`.
        microbatch: the micro-batch, from 0; `None` for `R`, `UNSHARD` and `RESHARD`, which concern all of them.
        stage: the stage, from 0; `None` until the schedule binds it to the rank's only stage.

    Example:
        >>> Action("F", 0, 2)
        2F0
        >>> Action.parse("2F0") == F(0, stage=2)
        True
    """

    kind: Kind
    microbatch: int | None = None
    stage: int | None = None

    def __init__(self, kind: Kind, microbatch: int | None = None, stage: int | None = None) -> None:
        """Take NumPy's numbers as Python's."""
        if (type(kind), type(microbatch), type(stage)) not in _USUAL:
            kind, microbatch, stage = readable(kind), whole(microbatch), whole(stage)
        _set_kind(self, kind)  # a third quicker than the `__init__` that `dataclass` would make
        _set_microbatch(self, microbatch)
        _set_stage(self, stage)

    @property
    def word(self) -> str:
        """The action's kind in a word, such as `"forward"`."""
        return self.traits.word

    @property
    def traits(self) -> Traits:
        """What is true of every action of this kind."""
        return TRAITS[self.kind]

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read one action in PyTorch's notation, in which `2R` is `2REDUCE_GRAD`: both are read.

        Example:
            >>> Action.parse("3W1")
            3W1
            >>> Action.parse("F7").stage is None
            True

        Raises:
            FormatError: if the text is anything but one action.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None:
            raise FormatError(
                f"{reprlib.repr(text)} is not an action: expected [stage]kind[micro-batch], "
                f"such as 2F0, 2B0, 2I0, 2W0 or 2R{_try(text)}"
            )
        stage = None if match["stage"] is None else int(match["stage"])
        if match["whole"]:
            return cls(_WHOLE[match["whole"]], None, stage)
        kind: Kind = match["kind"]  # type: ignore[assignment]  # the pattern admits the kinds of the table only
        return cls(kind, int(match["microbatch"]), stage)

    def __str__(self) -> str:
        """Return the notation, such as `2F0`."""
        stage = "" if self.stage is None else self.stage
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{stage}{self.kind}{microbatch}"

    def __repr__(self) -> str:
        """Return the notation, so that a list of actions reads like a schedule."""
        return str(self)

    def __and__(self, other: Action) -> Pair:
        """Join a forward and a backward into an overlapped pair: `F(3) & B(1)`."""
        if not isinstance(other, Action):
            return NotImplemented
        return Pair(self, other)


_set_kind, _set_microbatch, _set_stage = (vars(Action)[name].__set__ for name in Action.__slots__)


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that a rank runs overlapped, as DualPipe does (DeepSeek-AI 2024, DeepSeek-V3, 3.2.1).

    For order and execution, it counts as the forward, then the backward. In simulation, `Cost(pair=...)` gives the pair
    one time.

    Example:
        >>> F(3) & B(1)
        (F3;B1)OVERLAP_F_B

    Raises:
        FormatError: if the two are not a forward and a backward, in this order.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        """Refuse anything but a forward and a backward."""
        kinds = tuple(getattr(half, "kind", None) for half in (self.forward, self.backward))
        if kinds != ("F", "B"):
            written = f"{self.forward!r} & {self.backward!r}"
            raise FormatError(f"{written}: an overlapped pair is a forward, then a backward: F(3) & B(1)")

    def __str__(self) -> str:
        """Return PyTorch's notation, such as `(0F3;3B1)OVERLAP_F_B`."""
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    __repr__ = __str__


Item = Action | Pair
"""What a row of a plan holds."""


@dataclass(frozen=True, slots=True)
class Posting:
    """A send or receive in the row of a rank, or the wait for a send: `0SEND_F3` sends what `0F3` gives."""

    stage: int
    word: str
    letter: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.word}_{self.letter}{self.microbatch}"


def halves_of(item: Any) -> tuple[Any, ...]:
    """Return the two actions of a pair; of anything else, itself alone."""
    return (item.forward, item.backward) if isinstance(item, Pair) else (item,)


FINITE = "0 or between 1e-30 and 1e+30"
"""How large a time or a size may be: so sums, products and ratios of them are finite too."""


# All ranks name the same few actions without stages: each is made once and shared, which a frozen value allows.
# `typed` keeps F(1.0) apart from F(1): the first is a mistake that `check` explains.
_shared = lru_cache(maxsize=1 << 16, typed=True)(Action)


def F(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - the field's notation
    """Forward of one micro-batch; the stage may be left out if the rank has only one.

    Example:
        >>> F(3), F(3, stage=1)
        (F3, 1F3)
    """
    return _shared("F", microbatch) if stage is None else Action("F", microbatch, stage)


def B(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - the field's notation
    """Full backward of one micro-batch: the input gradient and the weight gradient together.

    Example:
        >>> B(0)
        B0
    """
    return _shared("B", microbatch) if stage is None else Action("B", microbatch, stage)


def I(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802, E743 - the field's notation
    """Input gradient only: what the stage before is waiting for. A `W` must follow.

    Zero bubble papers call it "B" (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).
    """
    return _shared("I", microbatch) if stage is None else Action("I", microbatch, stage)


def W(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - the field's notation
    """Weight gradient only: no rank waits for it, so it can fill idle time."""
    return _shared("W", microbatch) if stage is None else Action("W", microbatch, stage)


def C(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - the field's notation
    """Run a stage's forward again, for the backward of this micro-batch, which waits for it.

    The forward `F` then keeps only its input, and `C` keeps the activations. It needs nothing from other ranks, so it
    can fill the time in which its rank waits for a gradient (Huang et al. 2019, "GPipe", section 2.3; Liu et al. 2025,
    "Mario", PPoPP '25).

    Example:
        >>> C(3, stage=0)
        0C3
    """
    return Action("C", microbatch, stage)


def U(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - the field's notation
    """Update of a stage's weights, with the gradients up to this micro-batch that no earlier update has used.

    Later forwards of the stage use the new weights. A backward uses the weights of its forward, which the rank keeps
    until then: they are *versions* (Narayanan et al. 2019, "PipeDream", section 3.3, weight stashing).

    Example:
        >>> U(3, stage=0)
        0U3
    """
    return Action("U", microbatch, stage)


def R(stage: int | None = None) -> Action:  # noqa: N802 - the field's notation
    """All-reduce of a stage's gradients over the ranks that hold the stage.

    Example:
        >>> R(stage=2)
        2R
    """
    return Action("R", None, stage)


def UNSHARD(stage: int | None = None) -> Action:  # noqa: N802 - PyTorch's word
    """Gather a stage's weights, which are sharded over other ranks, on this rank; `RESHARD` frees them.

    Each `F`, `B`, `I` and `W` of a stage that a plan gathers needs its weights gathered. A gather begins when its rank
    comes to it and its channel is free. The rank computes meanwhile, until it comes to an action that needs these
    weights.

    Example:
        >>> UNSHARD(stage=2)
        2UNSHARD
    """
    return Action("UNSHARD", None, stage)


def RESHARD(stage: int | None = None) -> Action:  # noqa: N802 - PyTorch's word
    """Free a stage's gathered weights, which takes no time; the rank keeps its shard.

    Example:
        >>> RESHARD(stage=2)
        2RESHARD
    """
    return Action("RESHARD", None, stage)


def OFFLOAD(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - a word beside PyTorch's
    """Send what a forward keeps for its backward to another memory; `LOAD` must bring it back before that.

    Example:
        >>> OFFLOAD(3, stage=2)
        2OFFLOAD3
    """
    return Action("OFFLOAD", microbatch, stage)


def LOAD(microbatch: int, stage: int | None = None) -> Action:  # noqa: N802 - a word beside PyTorch's
    """Bring back what `OFFLOAD` took away.

    Example:
        >>> LOAD(3, stage=2)
        2LOAD3
    """
    return Action("LOAD", microbatch, stage)


def whole(number: Any) -> Any:
    """Return NumPy's and tensors' whole numbers as Python's; leave anything else for `check` to explain."""
    try:
        return number if number is None or isinstance(number, (int, float)) else index(number)
    except Exception:  # noqa: BLE001 - a student's object: whatever it raises
        return readable(number)


def finite(value: Any) -> float | None:
    """Return a number in `FINITE` as Python's, if it is NumPy's; `None` if it is none.

    Example:
        >>> finite(3), finite(-1), finite("3"), finite(1e31)
        (3, None, None, None)
    """
    if not isinstance(value, (int, float)):
        value = whole(value)
    if not isinstance(value, int):
        value = float(value) if isinstance(value, Real) else -1.0
    return value if value == 0 or 1e-30 <= value <= 1e30 else None


def parse_item(text: str, where: str) -> Item:
    """Read one action, or one overlapped pair, in PyTorch's notation."""
    text = text.strip()
    try:
        if text.startswith("(") and text.endswith(")OVERLAP_F_B"):
            forward, _, backward = text[1:].removesuffix(")OVERLAP_F_B").partition(";")
            return Pair(Action.parse(forward), Action.parse(backward))
        return Action.parse(text)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None


def parse_word(text: str, where: str) -> Item | Posting:
    """Read one action, one pair, or one send or receive, in PyTorch's notation."""
    if match := _POSTING.fullmatch(text.strip()):
        return Posting(int(match[1]), match[2], match[3], int(match[4]))
    return parse_item(text, where)
