"""What `Pipeline.verify` returns: the proof, in numbers and as a sentence."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Verification"]


@dataclass(frozen=True, slots=True)
class Verification:
    """The proof that a pipeline's gradients are right.

    Attributes:
        parameters: how many parameters were compared.
        microbatches: how many micro-batches the reference ran, one after another.
        exact: whether all gradients are equal bit for bit.
        largest_difference: the largest relative difference of a parameter's gradient, in the 2-norm.
        whole_batch_difference: likewise, against the whole batch at once through the model; `None` where the model
            cannot be run so (stages given as a list, or on several devices), or where something is unproven.
        unproven: what cannot be proved, such as dropout.
        compared: whether the gradients could be compared with the micro-batches' at all: where they differ, and random
            numbers drawn in another order may be why, nothing is proved.
    """

    parameters: int
    microbatches: int
    exact: bool
    largest_difference: float
    whole_batch_difference: float | None = None
    unproven: tuple[str, ...] = ()
    compared: bool = True

    def __str__(self) -> str:
        """Return the proof as a sentence."""
        not_proved = [f"not proved: {reason}" for reason in self.unproven]
        if not self.compared:
            could_not = (
                f"gradients of {self.parameters} parameters could not be compared: they differ by up to "
                f"{self.largest_difference:.1e} (2-norm, relative), and random numbers are drawn in another order"
            )
            return "\n".join([could_not, *not_proved])
        how = (
            "bit for bit"
            if self.exact
            else f"within {self.largest_difference:.1e} (2-norm, relative), as sums in another order are"
        )
        whole = self.whole_batch_difference
        lines = [
            f"gradients of {self.parameters} parameters equal to the same {self.microbatches} micro-batches "
            f"one after another, {how}" + ("" if whole is None else f"; to the whole batch within {whole:.1e}"),
            *not_proved,
        ]
        return "\n".join(lines)
