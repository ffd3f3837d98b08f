"""Processes on two hosts, each with its own network, clock and process numbers: right numbers, faults told."""

from __future__ import annotations

import json
import re
import time

import hosts
import plain
import processes
import pytest
import torch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def two_hosts(folder):
    missing = hosts.missing(folder)
    if missing:
        pytest.skip(missing)
    with hosts.two_hosts(folder) as both:
        yield both


def run(two_hosts, folder, what, then, ended):
    """Run the script on both hosts; return what each process said, in the order of the ranks, until all is ended.

    As soon as one says "now", `then` happens. `ended(facts)` tells whether all has been said.
    """
    script = processes.SCRIPTS / "two_hosts.py"
    said = [folder / f"{host.name}.txt" for host in two_hosts]
    agents = [host.torchrun(script, what, ranks=2, said=file) for host, file in zip(two_hosts, said, strict=True)]
    deadline = time.monotonic() + 100

    def lines():
        return [line for file in said for line in file.read_text().splitlines()]

    def facts():
        return sorted((json.loads(line) for line in lines() if line.startswith("{")), key=lambda fact: fact["rank"])

    def wait_until(there):
        while not there():
            assert time.monotonic() < deadline, "\n".join(lines())
            time.sleep(0.05)

    try:
        wait_until(lambda: "now" in lines())
        then()
        wait_until(lambda: ended(facts()))
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    return facts()


def telling(facts):
    """Return the facts about an error."""
    return [fact for fact in facts if "told" in fact]


@pytest.fixture(scope="module")
def cut(two_hosts, folder):
    """What is said where the cable is pulled out in the second step. Torchrun itself takes minutes to end then."""
    _, second = two_hosts
    try:
        return run(two_hosts, folder, "slow", second.unplug, lambda facts: len(facts) == 8)
    finally:
        second.plug()


@pytest.fixture(scope="module")
def trained(cut):
    return [fact for fact in cut if "loss" in fact]


def test_two_hosts_train_what_one_process_trains(trained):
    assert [fact["host"] for fact in trained] in (
        ["first", "first", "second", "second"],
        ["second"] * 2 + ["first"] * 2,
    )
    assert all(fact["exact"] for fact in trained)
    (loss,) = {fact["loss"] for fact in trained}
    x, y = plain.batch(16)
    assert loss == pytest.approx(float(torch.nn.functional.mse_loss(plain.mlp(8)(x), y).detach()), rel=1e-6)


def test_clocks_that_are_half_an_hour_apart_make_one_trace(trained):
    clocks = {fact["host"]: fact["clock"] for fact in trained}
    assert clocks["second"] - clocks["first"] > 1700
    (note,), (error,) = {fact["note"] for fact in trained}, {fact["error"] for fact in trained}
    assert re.fullmatch(r"4 processes, clocks within [\d.]+ ms of rank 0's", note)
    assert 0 < error < 1000
    for fact in trained:
        assert fact["earliest"] >= -error  # nothing starts before what it needs has ended
        assert fact["makespan"] < 60_000


def test_where_the_network_is_cut_every_process_ends(cut):
    told = telling(cut)
    assert [fact["rank"] for fact in told] == [0, 1, 2, 3]
    silent = (
        r"^this job's store has not answered for 10 s: its host, or the network to it, is gone\n  rank \d (waits|was)"
    )
    for fact in told:
        missed = silent if fact["host"] == "second" else r"^no sign of rank \d, \d in this call: "
        assert re.search(missed, fact["told"])
        assert fact["seconds"] < 60


def test_a_process_that_is_killed_on_the_other_host_is_named(two_hosts, folder):
    facts = run(
        two_hosts, folder, "killed", lambda: None, lambda facts: {0, 1} <= {each["rank"] for each in telling(facts)}
    )
    for fact in telling(facts):
        assert fact["kind"] == "RankError"
        assert fact["told"].startswith("rank 2 is gone: ")
        assert f"\n  rank {fact['rank']} waits, before " in fact["told"]
        assert fact["seconds"] < 40
