"""Marks by which a batch says how it is cut: what every micro-batch gets whole, where rows are, pieces that are ready.

In `{"ids": ids, "mask": whole(mask)}`, with 4 micro-batches of 8 rows:

    ids   [8, tokens]      ──▶  [2, tokens]  [2, tokens]  [2, tokens]  [2, tokens]
    mask  [tokens, tokens] ──▶  mask         mask         mask         mask
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal

from torch import nn

from pipelab.engine.stage.pytree import open_with, rebuild, take_apart
from pipelab.errors import UsageError
from pipelab.plan.fault import shorten


@dataclass(frozen=True, slots=True)
class Marked:
    """A part of a batch that says how it is cut."""

    value: Any
    how: Literal["whole", "rows", "microbatches"]
    dim: int = 0


open_with(Marked, lambda each: ([each.value], (each.how, each.dim)), lambda values, how: Marked(*values, *how))


def whole(value: Any) -> Marked:
    """Mark a part of a batch that every micro-batch gets as it is, such as a causal mask `[tokens, tokens]`.

    Example:
        >>> import pipelab, torch
        >>> mask = torch.ones(5, 5).tril()
        >>> class Mix(torch.nn.Module):
        ...     def forward(self, given):
        ...         return given["mask"] @ given["x"]
        >>> x = {"x": torch.randn(8, 5, 4), "mask": pipelab.whole(mask)}
        >>> stages = [Mix(), torch.nn.Linear(4, 4)]
        >>> with pipelab.Pipeline(stages, pipelab.OneFOneB(2, 4), torch.nn.MSELoss()) as pipe:
        ...     verification = pipe.verify(x, torch.zeros(8, 5, 4))
        >>> verification.exact
        True

    Args:
        value: a tensor of any shape, or a tuple, list or dict of them.
    """
    return Marked(value, "whole")


def rows(value: Any, dim: int = 0) -> Marked:
    """Mark a part of a batch whose rows are along another dimension than the pipeline's `batch_dim`.

    With a schedule of slices, such a part has no tokens: every slice of a sequence gets all of the sequence's rows.

    Example:
        >>> import pipelab, torch
        >>> x, y = torch.randn(5, 8, 4), torch.randint(0, 3, (8,))  # [tokens, rows, width], and a class for each row
        >>> class Last(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x[-1, :, :3]
        >>> stages = [torch.nn.Linear(4, 4), Last()]
        >>> loss = torch.nn.CrossEntropyLoss()
        >>> with pipelab.Pipeline(stages, pipelab.OneFOneB(2, 4), loss, batch_dim=1) as pipe:
        ...     step = pipe.step(x, pipelab.rows(y))
        >>> step.outputs.shape
        torch.Size([8, 3])

    Args:
        value: a tensor, or a tuple, list or dict of them.
        dim: the dimension of its rows.

    Raises:
        UsageError: if `dim` is not a whole number.
    """
    if type(dim) is not int:
        raise UsageError(f"pipelab.rows(value, dim={shorten(dim)}): expected the number of a dimension")
    return Marked(value, "rows", dim)


def microbatches(pieces: Sequence[Any]) -> Marked:
    """Mark a batch, or a part of it, that is cut into micro-batches already; their shapes may differ.

    If you mark rows of `x` this way, outputs are a list too, with an entry for each piece. With a schedule of slices,
    each piece is a sequence, which pipelab cuts into its slices.

    Example:
        >>> import pipelab, torch
        >>> pieces = pipelab.microbatches([torch.randint(0, 9, (2, length)) for length in (5, 7, 6, 5)])
        >>> stages = [torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)]
        >>> loss = lambda output, target: torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
        >>> with pipelab.Pipeline(stages, pipelab.OneFOneB(2, 4), loss, reduction=torch.numel) as pipe:
        ...     verification = pipe.verify(pieces, pieces)  # this loss averages over all targets
        >>> verification.exact
        True

    Args:
        pieces: as many as the plan has micro-batches.

    Raises:
        UsageError: if `pieces` is not a list or tuple.
    """
    if not isinstance(pieces, (list, tuple)) or not pieces:
        raise UsageError("pipelab.microbatches(pieces): expected a list of micro-batches, one for each of the plan's")
    return Marked(list(pieces), "microbatches")


def unmarked(value: Any) -> Any:
    """Return a value without marks; what is cut already stays so."""
    leaves, spec = take_apart(value, (Marked,))
    return rebuild([unmarked(leaf.value) if isinstance(leaf, Marked) else leaf for leaf in leaves], spec)


# ── Keywords ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _names(module: nn.Module) -> tuple[list[str], bool]:
    """Return the names that a module's forward takes beside its input, and whether it takes all."""
    own = getattr(module, "_orig_mod", module)  # of what `torch.compile` returned
    kinds = {each.name: each.kind for each in signature(own.forward).parameters.values()}
    named = [name for name, kind in kinds.items() if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    first = next(iter(kinds.values()), None) is Parameter.POSITIONAL_OR_KEYWORD
    return named[first:], Parameter.VAR_KEYWORD in kinds.values()


def taken(module: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some keywords that a stage's module takes."""
    names, takes_all = _names(module)
    return {name: value for name, value in keywords.items() if takes_all or name in names}


def require_taken(modules: Sequence[nn.Module], keywords: Mapping[str, Any]) -> None:
    """Refuse a keyword that no stage takes."""
    if not isinstance(keywords, Mapping):
        raise UsageError(f"keywords={shorten(keywords)}: expected a dict of names and values, such as {{'mask': mask}}")
    for name in keywords:
        if not any(taken(module, {name: None}) for module in modules):
            found = "; ".join(
                f"stage {stage} ({type(module).__name__}) takes {', '.join(_names(module)[0]) or 'none'}"
                for stage, module in enumerate(modules)
            )
            raise UsageError(
                f"no stage takes the keyword {name!r}: {found}\n"
                f"  try: def forward(self, x, {name}=None) in a stage module of your own; an nn.Sequential, and a "
                f"model that pipelab has traced, take it within x: {{..., {name!r}: {name}}}"
            )
