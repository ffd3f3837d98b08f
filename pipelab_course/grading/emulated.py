"""GPUs on one processor: every tensor carries the name of the device where it would be.

On a GPU, a loss whose target is on another device raises. A processor has one device, where any code would do. So a
submission, from its import on, sees so many GPUs: `torch.cuda.is_available()` is true, `.to("cuda:1")` and
`torch.randn(..., device="cuda:1")` name a place, and `.device` returns it. What a GPU does beside that, such as
`torch.cuda.synchronize()`, does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")
"""Where a tensor is that was not moved."""


def gpu(index: int) -> torch.device:
    """Return an emulated GPU."""
    return torch.device("cuda", index)


def place_of(tensor: torch.Tensor) -> torch.device:
    """Return the device where a tensor would be."""
    found = vars(tensor).get("_place", HOST)
    assert isinstance(found, torch.device)
    return found


def put(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Say that a tensor is there; return it."""
    vars(tensor)["_place"] = place
    return tensor


class Calls(TorchFunctionMode):
    """While it is active, count the calls of `Tensor.to`, and collect the copies to other devices.

    Attributes:
        count: how often `Tensor.to` was called.
        moves: from where to where each copy went that landed on another device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.moves = 0, list[tuple[torch.device, torch.device]]()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MOVES:
            self.count += func is torch.Tensor.to
            if made.device != args[0].device:
                self.moves.append((args[0].device, made.device))
        return made


class Devices(TorchFunctionMode):
    """While it is active, tensors have places."""

    def __init__(self, count: int, look: Callable[[Sequence[torch.Tensor]], None]) -> None:
        super().__init__()
        self._count, self._look = count, look

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKED:
            return _ASKED[func](place_of(args[0]))
        if func is torch.Tensor.pin_memory:
            return args[0]
        goal = self._goal(func, args, kwargs)
        if goal is not None and func in _MOVES:
            return _moved(goal, *args, *kwargs.values())
        if goal is not None:
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        return self._called(func, args, kwargs, goal)

    def _called(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], goal: torch.device | None) -> Any:
        """Call a function; what it makes is at the goal, or where the tensors are that it is given."""
        tensors = _tensors((*args, *kwargs.values()))
        if func == _TENSOR.data.__set__:
            put(args[0], place_of(args[1]))
        elif len(tensors) > 1 and func not in _ACROSS:
            self._look(tensors)
        result = func(*args, **kwargs)
        placed = goal or max(map(place_of, tensors), key=lambda place: (place.type, place.index or 0), default=HOST)
        for made in _tensors([result]):
            if all(made is not given for given in tensors):
                put(made, placed)
        return result

    def _goal(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
        """Return where a call puts its result, or `None` if it does not say."""
        given = (*args[1:], *kwargs.values()) if func in _MOVES else ()
        kinds = (torch.device, str, torch.Tensor)
        goal = next((each for each in given if isinstance(each, kinds) or type(each) is int), kwargs.get("device"))
        if goal is None:
            return {torch.Tensor.cpu: HOST, torch.Tensor.cuda: gpu(0)}.get(func)
        if isinstance(goal, torch.Tensor):
            return place_of(goal)
        device = gpu(goal) if type(goal) is int else torch.device(goal)
        if device.type == "cuda" and (device.index or 0) >= self._count:
            raise RuntimeError(f"there is no {device}: the GPUs are cuda:0 to cuda:{self._count - 1}")
        return gpu(device.index or 0) if device.type == "cuda" else device


_TENSOR: Any = torch.Tensor  # whose properties have no types
_MOVES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)
_ACROSS = (torch.Tensor.copy_, torch._has_compatible_shallow_copy_type)  # noqa: SLF001 - Module.to asks it
_ASKED: dict[Any, Callable[[torch.device], Any]] = {
    _TENSOR.device.__get__: lambda place: place,
    _TENSOR.is_cuda.__get__: lambda place: place.type == "cuda",
    _TENSOR.get_device: lambda place: -1 if place == HOST else place.index,
}


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, and those in tuples and lists."""
    members = chain.from_iterable(value if isinstance(value, tuple | list) else [value] for value in values)
    return [member for member in members if isinstance(member, torch.Tensor)]


def _moved(goal: torch.device, tensor: torch.Tensor, *given: Any) -> torch.Tensor:
    """Return a tensor at its goal, in the last type that was given: itself, if it is there already."""
    moved = tensor
    for value in given:
        if isinstance(value, torch.dtype | torch.Tensor):
            moved = moved.to(getattr(value, "dtype", value))
    if moved is tensor and goal != place_of(tensor):
        moved = tensor.view_as(tensor)
    return tensor if moved is tensor else put(moved, goal)


_NOTHING = {"current_device": 0, "get_device_name": "emulated", "get_device_capability": (0, 0), "mem_get_info": (0, 0)}
_NOTHING |= {"get_device_properties": SimpleNamespace(name="emulated", total_memory=0, multi_processor_count=0)}
_NOTHING |= {f"{which}memory_{kind}": 0 for which in ("", "max_") for kind in ("allocated", "reserved")}
_CUDA = ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "Stream", "stream", "device")
_ANY = {"is_available": True, "current_accelerator": torch.device("cuda"), "current_device_index": 0}


def _answering(answers: Mapping[str, object], others: Sequence[str]) -> dict[str, Any]:
    return {name: MagicMock(return_value=value) for name, value in answers.items()} | {
        name: MagicMock() for name in others
    }


@contextmanager
def emulated(count: int, look: Callable[[Sequence[torch.Tensor]], None] = lambda _: None) -> Iterator[None]:
    """Emulate so many GPUs, in new threads too; `look` sees the tensors of every function of two or more.

    Example:
        >>> with emulated(2), Calls() as calls:
        ...     x = torch.ones(3).to("cuda:1")
        >>> calls.count, calls.moves
        (1, [(device(type='cpu'), device(type='cuda', index=1))])
    """
    mode = Devices(count, look)
    run, make = threading.Thread.run, nn.Parameter.__new__
    parse: Any = torch._C._nn._parse_to  # noqa: SLF001 - Module.to asks it
    cuda = _answering(_NOTHING | {"is_available": True, "device_count": count}, (*_CUDA, "current_stream", "Event"))
    cuda["Event"].return_value.elapsed_time.return_value = 0.0
    accelerator = _answering(_ANY | {"device_count": count}, ("synchronize", "set_device_index", "current_stream"))
    accelerator["current_stream"].return_value.is_capturing.return_value = False  # which an optimizer asks

    def run_emulated(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    def made(kind: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> torch.Tensor:
        parameter = make(kind, data, requires_grad)
        return put(parameter, HOST if data is None else place_of(data))

    def parsed(*args: Any, **kwargs: Any) -> Any:  # what Module.to was given, where a number is a GPU
        given = (*args, *([kwargs.pop("device")] if "device" in kwargs else []))
        return parse(*(gpu(each) if type(each) is int else each for each in given), **kwargs)

    with (
        patch.multiple(torch.cuda, **cuda),
        patch.multiple(torch.accelerator, **accelerator),
        patch.object(torch._C._nn, "_parse_to", parsed),  # noqa: SLF001
        patch.object(threading.Thread, "run", run_emulated),
        patch.object(nn.Parameter, "__new__", made),
        mode,
    ):
        yield
