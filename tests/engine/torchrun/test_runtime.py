"""The contract with PyTorch's private pipelining names: a torch that moved one must fail here, by name."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from conformance.recording import NATIVE, RecordingStage, order_table
from conformance.steps import group_of_one
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

import pipelab
from pipelab.engine.torchrun import runtime
from pipelab.engine.torchrun.stage import ProcessStage
from pipelab.errors import NO_TORCH, EngineError

ROOT = Path(pipelab.__file__).parents[1]


@pytest.fixture
def asked_anew():
    """Let `load` look again, before and after."""
    runtime.load.cache_clear()
    yield
    runtime.load.cache_clear()


def test_this_torch_has_every_name() -> None:
    """Actions read and write as pipelab's do, and the runtime takes an order."""
    found = runtime.load()
    assert str(found.action.from_str("2B3")) == "2B3"
    assert str(found.action(2, found.schedules._ComputationType.REDUCE_GRAD, None)) == "2REDUCE_GRAD"
    assert issubclass(found.schedules.ScheduleDualPipeV, found.runtime)


def test_every_private_name_of_pytorchs_that_is_used_stands_in_the_table() -> None:
    table = {part for names in runtime._NAMES.values() for name in names for part in name.split(".")}
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(runtime))) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if re.match("_[^_]", node.attr) and ast.unparse(node.value) != "self"}
    assert used <= table


@pytest.mark.parametrize("kind", NATIVE.values())
def test_this_torch_has_every_schedule_and_it_takes_stages_microbatches_and_a_loss(kind: str) -> None:
    parameters = list(inspect.signature(getattr(runtime.load().schedules, kind)).parameters)
    assert parameters[0] in {"stage", "stages"}
    assert parameters[1] == "n_microbatches"
    assert {"loss_fn", "scale_grads"} <= set(parameters)
    stages_per_rank = 1 if parameters[0] == "stage" else 2
    assert order_table(kind, 2, 4, stages_per_rank)[0][0] == "0F0"


def test_the_stages_that_pipelab_hands_to_pytorch_have_the_names_of_pytorchs_own() -> None:
    """What a native schedule asks of a recording stage, a real one has: a name that moved is recorded no more."""
    methods = {name for name, value in vars(RecordingStage).items() if callable(value) and not name.startswith("_")}
    assert {name for name in methods if not hasattr(PipelineStage, name)} <= {"release_fwd_send_outputs"}, "since 2.15"
    assert methods - vars(ProcessStage).keys() == {"clear_runtime_states", "scale_grads"}, "only `step` calls these"
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        kinds = (RecordingStage, PipelineStage)
        ours, theirs = (list(inspect.signature(getattr(kind, name)).parameters) for kind in kinds)
        named = [parameter for parameter in ours if not parameter.startswith("_")]
        assert theirs[: len(named)] == named, name


def test_a_real_stage_has_every_attribute_that_a_schedule_reads_of_ours() -> None:
    read = {name for name in vars(RecordingStage(0, 1, 0, 1, [])) if not name.startswith("_")} | {"device", "group"}
    with group_of_one():
        stage = PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"))
    assert [name for name in sorted(read) if not hasattr(stage, name)] == []


def test_what_the_tracer_makes_has_what_is_read_of_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of its own internals
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        made = pipeline(model, mb_args=(torch.ones(1, 2),), split_spec={"1": SplitPoint.BEGINNING})
    assert made.num_stages == 2
    assert isinstance(made.split_gm.graph, torch.fx.Graph)
    assert isinstance(made.get_stage_module(1), nn.Module)


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("module", runtime._NAMES)
@pytest.mark.parametrize("name", ["_moved", "_Action._moved"])
def test_a_name_that_moved_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where the name was looked for, and with which torch this pipelab was tested."""
    monkeypatch.setitem(runtime._NAMES, module, (name,))
    with pytest.raises(EngineError) as raised:
        runtime.load()
    said = str(raised.value)
    assert said.startswith(f"torch {torch.__version__} has no {module}.{name}, which")
    assert "pip install -U pipelab-schedules" in said
    assert f"this is {pipelab.__version__}, tested with torch {' to '.join(runtime.TESTED)}" in said


def test_the_oldest_torch_that_is_tested_is_the_oldest_that_is_installed() -> None:
    oldest = runtime.TESTED[0]
    assert f'"torch>={oldest}"' in NO_TORCH
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"{oldest} or newer" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("version", ["2.15.3", "2.16.0", "3.0.0.dev20270101"])
@pytest.mark.usefixtures("asked_anew")
def test_a_newer_torch_that_has_what_is_called_is_not_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert runtime.load().runtime is not None
