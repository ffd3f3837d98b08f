"""What processes tell of themselves before they connect, and what is refused then."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

import processes
import pytest
import torch.distributed as dist

from pipelab import RankError
from pipelab.engine.torchrun.joining import _await, decline, facts_of_this_process, introduce
from pipelab.engine.torchrun.store import corner

SAME = {
    "plan": {"sizes": [2, 2, 2], "rows": ["", ""]},
    "model": [],
    "reduction": "mean",
    "replicated_buffers": "refuse",
}


def met(*facts):
    """Let as many processes meet, which have these facts; return what each was told."""
    store = dist.HashStore()
    found = [None] * len(facts)

    def come(rank):
        try:
            found[rank] = introduce(store, rank, len(facts), facts_of_this_process() | SAME | facts[rank], 20)
        except RankError as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_process_that_comes_just_when_it_is_given_up_is_not_missed():
    class Late(dist.HashStore):
        def check(self, keys):
            there = super().check(keys)
            self.set("hello/1", json.dumps(SAME))  # it comes while one looks who is missing
            return there

    assert _await(Late(), ["hello/1"], timeout=0) is None


def test_a_process_that_declines_is_heard_while_another_one_is_missing():
    store = dist.HashStore()
    decline(store, 1, ValueError("no such device"))
    with pytest.raises(RankError, match=r"^rank 1 made no Pipeline: no such device$") as told:
        introduce(store, 0, 3, facts_of_this_process() | SAME, 20)
    assert told.value.rank == 1


@pytest.mark.parametrize(("world", "apart"), [("2", True), ("4", False)])
def test_what_an_earlier_attempt_of_torchruns_wrote_is_not_read_again_on_one_machine(monkeypatch, world, apart):
    """Several machines each count their attempts alone: there the count tells processes apart that belong together."""
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    corner(store, "1").set("failed", "then")
    assert corner(store, "1").check(["failed"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert corner(store, "1").check(["failed"]) is not apart


@pytest.mark.dist
def test_a_process_that_declines_ends_where_torchruns_store_is_gone():
    script = """
    import plain
    from torch.nn.functional import mse_loss
    from pipelab import EngineError, OneFOneB, Pipeline

    try:
        Pipeline(plain.mlp(6), OneFOneB(3, 2), mse_loss, engine="torch", timeout=None)
    except EngineError as error:
        print(error)
    """
    env = processes.environment(TORCHELASTIC_USE_AGENT_STORE="True")
    (ended,) = processes.run_in(1, script, env=env, seconds=60)
    assert ended.out.startswith("the plan has 3 ranks and torchrun started 1 process: "), ended


def test_a_store_that_is_gone_is_told_as_such():
    class Gone(dist.HashStore):
        def set(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(RankError, match="which holds the store of this job, is gone"):
        introduce(Gone(), 1, 2, facts_of_this_process() | SAME, 20)


FIRST = {"host": "first", "address": "10.0.0.1", "networks": ["eth0"]}
SECOND = {"host": "second", "address": "10.0.0.2", "networks": ["eth0", "wlan0"]}


def test_every_process_learns_what_all_have():
    first, second = met(FIRST, SECOND)
    assert first == second
    assert [each["host"] for each in first] == ["first", "second"]


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_host_that_offers_others_an_address_of_its_own_is_refused_on_all_before_they_connect(address):
    first, second = met(FIRST, SECOND | {"address": address})
    assert isinstance(first, RankError)
    assert str(first) == str(second)
    assert first.rank == 1
    assert str(first).startswith(
        f"rank 1 cannot be reached from other hosts: the name of its host, second, stands for {address}"
    )
    assert str(first).endswith("with its network device's name: eth0, wlan0 on second")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, FIRST | {"address": "127.0.1.1"}),  # one host
        (FIRST, SECOND | {"address": ""}),  # gloo was told
        (FIRST, SECOND | {"address": "fe80::1%eth0"}),
    ],
)
def test_addresses_that_do_no_harm_are_let_be(first, second):
    assert all(isinstance(each, list) for each in met(first, second))


def test_the_address_is_what_the_hosts_name_stands_for_unless_gloo_is_told(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: asked.append(args) or [(0, 0, 0, "", ("10.1.2.3", 0))])
    assert facts_of_this_process()["address"] == "10.1.2.3"
    assert asked == [("here", None)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: (_ for _ in ()).throw(socket.gaierror("unknown")))
    assert facts_of_this_process()["address"] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert facts_of_this_process()["address"] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="process numbers are told apart by what only Linux tells")
def test_process_numbers_of_two_machines_are_not_mixed_up_where_both_have_one_name():
    facts = facts_of_this_process()
    assert facts["pid"] == os.getpid()
    boot, space, numbering = facts["processes"].partition(" ")
    assert (len(boot), space) == (36, " ")
    assert numbering.startswith("pid:[")
    assert json.loads(json.dumps(facts)) == facts
