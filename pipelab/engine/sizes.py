"""How large a module is, in few characters."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["count_parameters", "short"]


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers the module's parameters have; those that have no size yet count for nothing.

    Example:
        >>> count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def short(count: int) -> str:
    """Return a number in few characters.

    Example:
        >>> short(1632), short(12_345), short(999_900), short(1_050_000)
        ('1632', '12.3k', '1M', '1.05M')
    """
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= max(0.9995 * unit, 10_000):  # three digits of less would be rounded up to four
            return f"{count / unit:.3g}{name}"
    return str(count)
