"""What users of `nn.Module` do out of habit: done where a pipeline can mean it, answered where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from torch import nn

from pipelab.errors import UsageError

if TYPE_CHECKING:
    from pipelab.engine.splitting import Stages

__all__ = ["ModuleHabits"]


class ModuleHabits:
    """The habits of `nn.Module` in a pipeline, which is none: its parameters and its mode are the model's own."""

    stages: Stages

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode, as `model.train()` does; return the pipeline."""
        self.stages.model.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode, as `model.eval()` does; return the pipeline."""
        return self.train(mode=False)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a call could mean an evaluation or a training step.

        Raises:
            UsageError: naming both.
        """
        raise UsageError(
            "a pipeline is not called: pipe.forward(x) gives the outputs, without gradients; "
            "pipe.step(x, y) runs forward and backward"
        )

    if not TYPE_CHECKING:  # a type checker should go on to refuse what is not there

        def __getattr__(self, name: str) -> NoReturn:
            """Name the model's own method where only a module has one."""
            kind = type(self).__name__
            if not name.startswith("_") and hasattr(nn.Module, name):
                raise AttributeError(f"a {kind} has no {name!r}: the model is yours as before, so use model.{name}")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
