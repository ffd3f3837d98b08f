"""What processes tell of themselves before they connect, and what is refused then."""

from __future__ import annotations

import json
import os
import re
import sys
import threading

import pytest
import torch.distributed as dist

from pipelab import RankError
from pipelab.engine.torchrun.start import introduce, prefix_store, process_info, warn_of_other_weights

SAME = {
    "plan": ["2 ranks, 2 stages, 2 micro-batches"],
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
            found[rank] = introduce(store, rank, len(facts), process_info() | SAME | facts[rank], 20)
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
            self.set("info/1", json.dumps(process_info() | SAME))  # it comes while one looks who is missing
            return there

    assert len(introduce(Late(), 0, 2, process_info() | SAME, timeout=0)) == 2


@pytest.mark.parametrize(("world", "apart"), [("2", True), ("4", False)])
def test_what_an_earlier_attempt_of_torchruns_wrote_is_not_read_again_on_one_machine(monkeypatch, world, apart):
    """Several machines each count their attempts alone: there the count tells processes apart that belong together."""
    store = dist.HashStore()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    prefix_store(store, "1").set("failed", "then")
    assert prefix_store(store, "1").check(["failed"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert prefix_store(store, "1").check(["failed"]) is not apart


def test_jobs_of_other_names_do_not_meet_in_one_store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    prefix_store(store, "1").set("failed", "then")
    assert prefix_store(store, "1").check(["failed"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert not prefix_store(store, "1").check(["failed"])


def test_a_rank_whose_place_is_taken_is_refused_and_leaves_the_place_as_it_is():
    store = dist.HashStore()
    taken = json.dumps(process_info() | SAME | {"pid": 4711, "host": "elsewhere"})
    store.set("info/1", taken)
    with pytest.raises(RankError, match="process 4711 on elsewhere came as rank 1 before this one: .* another job"):
        introduce(store, 1, 2, process_info() | SAME, 20)
    assert store.get("info/1").decode() == taken


def test_a_store_that_is_gone_is_told_as_such():
    class Gone(dist.HashStore):
        def compare_set(self, key, expected, value):
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(RankError, match="lost this job's store, which rank 0 or torchrun holds"):
        introduce(Gone(), 1, 2, process_info() | SAME, 20)


FIRST, SECOND = {"host": "first"}, {"host": "second"}


def test_every_process_learns_what_all_have():
    first, second = met(FIRST, SECOND)
    assert first == second
    assert [each["host"] for each in first] == ["first", "second"]


@pytest.mark.skipif(sys.platform != "linux", reason="process numbers are told apart by what only Linux tells")
def test_process_numbers_of_two_machines_are_not_mixed_up_where_both_have_one_name():
    facts = process_info()
    assert facts["pid"] == os.getpid()
    assert re.fullmatch(r"[\w-]{36}pid:\[\d+\]", facts["processes"])
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (["3 ranks"], ("3 ranks", "2 ranks, 2 stages, 2 micro-batches")),
        ([*SAME["plan"], "0F0 at position 0 of row 0"], ("0F0 at position 0 of row 0", "nothing more")),
    ],
)
def test_the_first_difference_between_two_plans_is_named_on_both_processes(plan, told):
    for error in met(FIRST, FIRST | {"plan": plan}):
        assert str(error) == "rank 1 has a plan with {}, rank 0 has a plan with {}".format(*told)
        assert error.rank == 1


def test_processes_that_begin_with_other_weights_are_named():
    with pytest.warns(UserWarning, match=r"^rank 1, 3 have other weights than rank 0: .*\n  try: the same"):
        warn_of_other_weights(["a", "b", None, "c", "a"])
    warn_of_other_weights(["a", "a", None])
    warn_of_other_weights([None, "b"])
