"""Check that a student's function takes pipelab's arguments; if not, report its line instead of one of pipelab's."""

from __future__ import annotations

import inspect

from pipelab.plan.fault import Fault, line_of_function, shorten


def misfit(name: str, function: object, *given: str) -> Fault | None:
    """Return the fault of a function that cannot be called with these arguments, or `None`.

    Example:
        >>> def of_stage(stage): ...
        >>> misfit("place", of_stage, "microbatch", "stage").hint
        'write def place(microbatch, stage)'
    """
    if not callable(function):
        message = f"{name} is {shorten(function)}, not a method"
        return Fault("exception", None, None, None, message, _write(name, ("self", *given)))
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        pass
    except ValueError:  # of a function written in C, which has none
        return None
    else:
        return None
    plain = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)
    expected = given if owner is None else ("cls" if isinstance(owner, type) else "self", *given)
    qualified = getattr(plain, "__qualname__", name).rpartition("<locals>.")[2]
    message = f"pipelab calls {name}({', '.join(expected)}), but it is written {qualified}{inspect.signature(plain)}"
    line = line_of_function(plain)
    return Fault("exception", None, None, None, message + (f"\n  at {line}" if line else ""), _write(name, expected))


def _write(name: str, parameters: tuple[str, ...]) -> str:
    return f"write def {name}({', '.join(parameters)})"
