"""The torch engine on CUDA devices: two processes that share a GPU, and NCCL with a process per GPU."""

from __future__ import annotations

import processes
import pytest
import torch

pytestmark = [pytest.mark.dist, pytest.mark.gpu]


def said(ranks):
    ended = processes.run_well(ranks, "on_gpus.py", env=processes.environment(LOCAL_WORLD_SIZE=str(ranks)))
    facts = [each.facts[-1] for each in ended]
    for fact in facts:
        assert fact["difference"] < 1e-5
        assert fact["proof"] < 1e-5
        assert fact["forward"]
        assert fact["after"]
        assert fact["transfers"]
        assert fact["state"]
    return facts


def test_two_processes_share_a_gpu_by_way_of_the_processors_memory():
    if torch.cuda.device_count() > 1:
        pytest.skip("needs a machine with one GPU: two processes would have one each")
    for fact in said(2):
        assert fact["devices"] == ["cuda:0"]
        assert fact["backend"] == "gloo"
        assert "the processes share GPUs" in fact["warned"][0]


def test_nccl_connects_a_process_per_gpu():
    ranks = torch.cuda.device_count()
    for rank, fact in enumerate(said(ranks)):
        assert fact["devices"] == [f"cuda:{rank}"]
        assert fact["backend"] == "nccl"
        assert fact["warned"] == []
