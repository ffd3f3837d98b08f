"""The contract with PyTorch's private pipelining names: a torch that moved one must fail here, by name."""

from __future__ import annotations

import pytest

from pipelab.engine import native
from pipelab.errors import EngineError


def test_this_torch_has_every_name() -> None:
    """Actions read and write as pipelab's do, and the runtime takes an order."""
    found = native.load()
    assert str(found.action.from_str("2B3")) == "2B3"
    assert callable(found.runtime._prepare_schedule_with_comms)
    assert issubclass(found.schedules.ScheduleDualPipeV, found.runtime)


def test_a_name_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where the name was looked for."""
    monkeypatch.setitem(native._NAMES, "action", ("schedules", "_MovedAction"))
    native.load.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"has no torch\.distributed\.pipelining\.schedules\._MovedAction"):
            native.load()
    finally:
        native.load.cache_clear()
