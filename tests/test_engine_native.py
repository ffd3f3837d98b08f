"""The contract with PyTorch's private pipelining names: a torch that moved one must fail here, by name."""

from __future__ import annotations

import inspect

import pytest

from pipelab.engine import native
from pipelab.engine.recording import NATIVE, RecordingStage
from pipelab.errors import EngineError


@pytest.fixture
def asked_anew():
    """Let `load` look again, before and after."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_this_torch_has_every_name() -> None:
    """Actions read and write as pipelab's do, and the runtime takes an order."""
    found = native.load()
    assert str(found.action.from_str("2B3")) == "2B3"
    assert callable(found.runtime._prepare_schedule_with_comms)
    assert issubclass(found.schedules.ScheduleDualPipeV, found.runtime)


@pytest.mark.parametrize("kind", NATIVE.values())
def test_this_torch_has_every_schedule_and_it_takes_stages_microbatches_and_a_loss(kind: str) -> None:
    parameters = list(inspect.signature(native.schedule_class(kind)).parameters)
    assert parameters[0] in {"stage", "stages"}
    assert parameters[1] == "n_microbatches"
    assert {"loss_fn", "scale_grads"} <= set(parameters)


def test_the_recording_stage_has_the_names_of_pytorchs_stage() -> None:
    """What a native schedule asks of a recording stage, a real one has: a name that moved is recorded no more."""
    stage = native.load().stage
    methods = [name for name, value in vars(RecordingStage).items() if callable(value) and not name.startswith("_")]
    assert len(methods) == 13
    assert [name for name in methods if not callable(getattr(stage, name, None))] == []
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        ours, theirs = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (RecordingStage, stage))
        named = [parameter for parameter in ours if not parameter.startswith("_")]
        assert theirs[: len(named)] == named, name


@pytest.mark.usefixtures("asked_anew")
def test_a_name_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where the name was looked for."""
    monkeypatch.setitem(native._NAMES, "action", ("schedules", "_MovedAction"))
    with pytest.raises(EngineError, match=r"has no torch\.distributed\.pipelining\.schedules\._MovedAction"):
        native.load()


@pytest.mark.usefixtures("asked_anew")
def test_a_method_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native._METHODS, "PipelineScheduleSingle", ("_moved_setup",))
    with pytest.raises(EngineError, match=r"has no .*schedules\.PipelineScheduleSingle\._moved_setup"):
        native.load()


def test_a_schedule_that_this_torch_lacks_is_named() -> None:
    with pytest.raises(EngineError, match=r"has no torch\.distributed\.pipelining\.schedules\.ScheduleOfTomorrow"):
        native.schedule_class("ScheduleOfTomorrow")
