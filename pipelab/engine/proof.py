"""What `Pipeline.verify` returns: the proof, in numbers and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Verification"]

_MOST_NAMES = 4
"""How many parameters without a gradient are named."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The proof that a pipeline's gradients are right.

    Attributes:
        parameters: how many parameters were compared.
        microbatches: how many micro-batches the reference ran, one after another.
        exact: whether all gradients are equal bit for bit.
        largest_difference: the largest relative difference of a parameter's gradient, in the 2-norm.
        whole_batch_difference: likewise, against the whole batch at once through the model, or through its stages
            where they were given as a list or are on several devices; `None` where something is unproven.
        unproven: what cannot be proved, such as dropout.
        idle: the parameters that got no gradient, in the pipeline and in the plain model alike.
        compared: whether the gradients could be compared with the micro-batches' at all: where they differ, and random
            numbers drawn in another order may be why, nothing is proved.
    """

    parameters: int
    microbatches: int
    exact: bool
    largest_difference: float
    whole_batch_difference: float | None = None
    unproven: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    compared: bool = True

    def __str__(self) -> str:
        """Return the proof as a sentence."""
        remarks = [f"not proved: {reason}" for reason in self.unproven]
        if self.idle:
            named = ", ".join(self.idle[:_MOST_NAMES]) + (", …" if len(self.idle) > _MOST_NAMES else "")
            remarks.insert(0, f"{len(self.idle)} of them got none, in the plain model either: {named}")
        if not self.compared:
            could_not = (
                f"gradients of {self.parameters} parameters could not be compared: they differ by up to "
                f"{self.largest_difference:.1e} (2-norm, relative), and random numbers are drawn in another order"
            )
            return "\n".join([could_not, *remarks])
        how = (
            "bit for bit"
            if self.exact
            else f"within {self.largest_difference:.1e} (2-norm, relative), as sums in another order are"
        )
        whole = self.whole_batch_difference
        lines = [
            f"gradients of {self.parameters} parameters equal to the same {self.microbatches} micro-batches "
            f"one after another, {how}" + ("" if whole is None else f"; to the whole batch within {whole:.1e}"),
            *remarks,
        ]
        return "\n".join(lines)
