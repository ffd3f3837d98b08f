"""PyTorch settings of the caller's thread that the workers apply too: autocast, and hooks on saved tensors.

As in plain training, forwards and losses run under autocast and backwards do not: a backward computes in the types of
its forward. Hooks on saved tensors, such as `torch.autograd.graph.save_on_cpu`, pack in the forward and unpack in the
backward; several workers may call them at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from pipelab.engine.stage.autograd import SavingHooks, saving_hooks


@dataclass(frozen=True, slots=True)
class CallerContext:
    """The caller's autocast, one for each kind of device, and its hooks on saved tensors."""

    autocast: tuple[partial[torch.autocast], ...] = ()
    saving: SavingHooks | None = None

    @classmethod
    def capture(cls, kinds: Iterable[str]) -> CallerContext:
        """Return the settings of this thread, for these kinds of device."""
        cache = torch.is_autocast_cache_enabled()
        return cls(
            tuple(
                partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=cache)
                for kind in sorted(set(kinds))
                if torch.is_autocast_enabled(kind)
            ),
            saving_hooks(),
        )

    @property
    def types(self) -> set[torch.dtype]:
        """What autocast casts to."""
        return {each.keywords["dtype"] for each in self.autocast}

    def enter(self, stack: ExitStack) -> None:
        """Apply the settings in this thread until the stack closes."""
        for context in self.autocast:
            stack.enter_context(context())
        if self.saving is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saving))

    @contextmanager
    def autocast_off(self) -> Iterator[None]:
        """Return a context without autocast, which does not clear autocast's cache of weights."""
        with ExitStack() as stack:
            for context in self.autocast:
                stack.enter_context(context(enabled=False))
            yield
