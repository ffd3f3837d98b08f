"""Which action holds up all ranks, from what PyTorch's Flight Recorder keeps."""

from __future__ import annotations

import json
import pickle
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import processes
import pytest

import pipelab
from pipelab.errors import FormatError, UsageError
from pipelab.hub.flight_recorder import culprit

PLANS = {
    "1f1b": pipelab.OneFOneB(4, 8),
    "gpipe": pipelab.GPipe(3, 5),
    "zb-h1": pipelab.ZBH1(4, 6),
    "interleaved-1f1b": pipelab.Interleaved1F1B(4, 8),
    "zbv": pipelab.ZBV(4, 8),
}


ENTRY = {"record_id": 0, "p2p_seq_id": 1, "profiling_name": "nccl:send 0->1", "state": "completed"}

FORWARD = re.compile(r"^\d+(F|SEND_F|RECV_F)\d+$")


def is_transfer(word):
    return re.search("SEND|RECV", word) is not None


def opposite(word):
    """Return the receive of a send, or the send of a receive."""
    stage, way, letter, microbatch = re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", word).groups()
    step = (1 if letter == "F" else -1) * (1 if way == "SEND" else -1)
    return f"{int(stage) + step}{'RECV' if way == 'SEND' else 'SEND'}_{letter}{microbatch}"


def stalled(plan, rank, action, steps=1, ahead=False, tensors=1, coalesced=False, validations=()):
    """Run `steps` steps in which the last one's `action` never ends; return the recorder's entries, by rank.

    It is written apart from pipelab: the ranks go on in turns until none can. With `ahead`, all transfers are posted
    before anything is computed, as on a GPU, and their states say how far each is. Of the steps in `validations`, the
    ranks run the forwards alone.
    """
    lowered = pipelab.lower(plan).rows
    rank_of = {word: at for at, row in enumerate(lowered) for word in row}
    rows = [
        [(step, word) for step in range(steps) for word in row if step not in validations or FORWARD.search(word)]
        for row in lowered
    ]
    place, sent = [0] * len(rows), set()
    before = None
    while place != before:
        before = list(place)
        for at, row in enumerate(rows):
            while place[at] < len(row):
                step, word = row[place[at]]
                if "RECV" in word and (step, opposite(word)) not in sent:
                    break
                if (at, word, step) == (rank, action, steps - 1):
                    break
                sent.add((step, word))
                place[at] += 1
    entries = [[] for _ in rows]
    for at, row in enumerate(rows):
        number = 0
        for index, (_, word) in enumerate(row):
            reached = index < place[at] or (index == place[at] and "RECV" in word)
            if is_transfer(word) and (reached or ahead):
                state = "completed" if index < place[at] else "started" if reached else "scheduled"
                way = "send {}->{}" if "SEND" in word else "recv {}<-{}"
                named = [
                    (f"nccl:{way.format(at, rank_of[opposite(word)])}", "scheduled" if coalesced else state)
                ] * tensors
                number += coalesced
                for name, said in [*named, *([("nccl:coalesced", state)] if coalesced else [])]:
                    number += not coalesced
                    entry = {"record_id": len(entries[at]), "p2p_seq_id": number, "input_dtypes": ["Float"]}
                    entries[at].append(entry | {"profiling_name": name, "state": said})
    return entries


def written(folder, entries, pickled=True):
    paths = [folder / f"nccl_trace_rank_{rank}" for rank in range(len(entries))]
    for path, own in zip(paths, entries, strict=True):
        content = {"version": "2.10", "entries": own}
        path.write_bytes(pickle.dumps(content) if pickled else json.dumps(content).encode())
    return paths


@pytest.mark.parametrize("ahead", [False, True], ids=["posted in turn", "posted ahead"])
@pytest.mark.parametrize("name", PLANS)
def test_the_action_that_never_ends_is_named(name, ahead, tmp_path):
    plan, draw = PLANS[name], random.Random(name)  # noqa: S311 - the same ones on every run
    rows = pipelab.lower(plan).rows
    for _ in range(12):
        rank = draw.randrange(len(rows))
        action = draw.choice([word for word in rows[rank] if not is_transfer(word)])
        tensors = draw.choice([1, 2])
        entries = stalled(plan, rank, action, draw.choice([1, 3]), ahead, tensors, coalesced := draw.random() < 0.5)
        if any(entries):
            paths = written(tmp_path, entries, pickled=draw.random() < 0.5)
            found = culprit(plan, paths, tensors=1 if coalesced else tensors)
            named = (found.rank, action in found.actions) == (rank, True)
            assert named or not found.waits, (action, str(found))
            at_the_end = set(rows[rank][rows[rank].index(action) :])
            assert named or not any(map(is_transfer, at_the_end))


def test_a_recorder_that_kept_only_the_newest_entries_is_understood(tmp_path):
    plan = PLANS["1f1b"]
    entries = [own[-21:] for own in stalled(plan, 2, "2F5", steps=5)]
    found = culprit(plan, written(tmp_path, entries))
    assert (found.rank, found.actions, found.step) == (2, ("2F5",), 4)
    assert found.waits[3] == (2, "3RECV_F5")


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_validation_steps_are_stepped_over(name, tmp_path):
    plan, draw = PLANS[name], random.Random(name)  # noqa: S311 - the same ones on every run
    rows = pipelab.lower(plan).rows
    for _ in range(12):
        rank = draw.randrange(len(rows))
        action = draw.choice([word for word in rows[rank][:-1] if not is_transfer(word)])
        steps, kept = draw.randrange(3, 7), draw.choice([30, 60, 1000])
        # The step before is a training step: forwards alone may be the first half of one, too.
        validations = draw.sample(range(steps - 2), draw.randrange(1, min(3, steps - 1)))
        entries = [own[-kept:] for own in stalled(plan, rank, action, steps, validations=validations)]
        found = culprit(plan, written(tmp_path, entries))
        alone = culprit(plan, written(tmp_path, stalled(plan, rank, action)))
        assert (found.rank, action in found.actions or not found.waits) == (alone.rank, True), (action, validations)
        assert found.waits == alone.waits
        assert found.step == steps - 1 - len(validations) + len(validations) // 2 or not found.waits


def grouped(entries, number, name):
    return [entry | {"process_group": [number, name]} for entry in entries]


def other_sends(many, rank):
    """Return what a group for ring attention sends and receives."""
    ways = (f"nccl:send {rank % 2}->{1 - rank % 2}", f"nccl:recv {rank % 2}<-{1 - rank % 2}")
    entry = {"record_id": 0, "state": "completed", "input_dtypes": ["Float"]}
    return [entry | {"profiling_name": ways[at % 2], "p2p_seq_id": at + 1, "record_id": -at} for at in range(many)]


@pytest.mark.parametrize("pickled", [True, False])
def test_transfers_of_other_groups_are_left_out_and_of_several_pipelines_one_is_chosen(pickled, tmp_path):
    plan = PLANS["1f1b"]
    hung, well = stalled(plan, 2, "2F5", steps=3), stalled(plan, 3, "3F0", steps=4)
    for replica, own in ((0, well), (1, hung)):  # the ranks of the job are 2 x 4: replica, then pipeline
        for at, entries in enumerate(own):
            config = {
                f"{4 + replica}": {"desc": "mesh_pp", "ranks": str([4 * replica + each for each in range(4)])},
                "9": {"desc": "cp", "ranks": str([at, at + 4])},
            }
            mixed = [*grouped(other_sends(99, replica), "9", "cp"), *grouped(entries, f"{4 + replica}", "mesh_pp")]
            mixed.sort(key=lambda each: abs(each["record_id"]))
            content = {"entries": mixed, "pg_config": config}
            path = tmp_path / f"trace_rank_{4 * replica + at}"
            path.write_bytes(pickle.dumps(content) if pickled else json.dumps(content).encode())
    found = culprit(plan, tmp_path.glob("trace_rank_*"))
    assert (found.rank, found.actions, found.step) == (2, ("2F5",), 2)
    assert str(found).endswith("\n  of 2 pipelines, the one of the job's ranks 4 5 6 7 (group mesh_pp)")
    alone = culprit(plan, tmp_path.glob("trace_rank_[4567]"))
    assert (alone.rank, alone.waits, alone.pipeline) == (2, found.waits, "")
    (tmp_path / "trace_rank_6").write_text(
        json.dumps({"entries": [], "pg_config": {"5": {"desc": "mesh_pp", "ranks": "[4, 5, 6, 7]"}}})
    )
    quiet = culprit(plan, tmp_path.glob("trace_rank_[4567]"))
    assert (quiet.rank, quiet.missing) == (2, False)
    for name, path in zip("abc", sorted(tmp_path.glob("trace_rank_[457]")), strict=True):
        path.rename(tmp_path / name)  # the transfers say the rank
    assert culprit(plan, tmp_path.glob("[abc]")).missing


def test_a_rank_without_a_file_is_the_one(tmp_path):
    paths = written(tmp_path, stalled(PLANS["1f1b"], 2, "2F5"))
    found = culprit(PLANS["1f1b"], [path for path in paths if path.name != "nccl_trace_rank_2"])
    assert (found.rank, found.missing) == (2, True)


def test_files_that_are_not_of_this_plan_are_refused(tmp_path):
    plan = PLANS["1f1b"]
    paths = written(tmp_path, stalled(plan, 2, "2F5"))
    with pytest.raises(FormatError, match="the transfers of rank 0 are not the plan's"):
        culprit(PLANS["interleaved-1f1b"], paths)
    with pytest.raises(UsageError, match="another file is of rank 1 too"):
        culprit(plan, [*paths, paths[1]])
    with pytest.raises(UsageError, match="is of rank 3, and the plan has 3 ranks"):
        culprit(pipelab.OneFOneB(3, 8), paths[3:])
    paths[0].write_bytes(pickle.dumps(pipelab.OneFOneB(2, 2)))
    with pytest.raises(FormatError, match="not a file of PyTorch's Flight Recorder: UnpicklingError"):
        culprit(plan, paths)
    with pytest.raises(UsageError, match="no file has a send or receive"):
        culprit(plan, written(tmp_path, [[]] * 4))


HOSTILE = {
    "a memo of 34 GB": b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytes without end": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "an array without end": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xffa.",
    "a frame without end": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f].",
    "a pair of pairs of pairs as a key": b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 99 + b"K\x01s.",
    "pairs in pairs as a key": b"\x80\x02}K\x01" + b"K\x01\x86" * 100_000 + b"K\x01s.",
    "a number cut short": b"\x80\x02J\x01",
    "nothing": b"\x80",
    "lists in lists": b"[" * 100_000,
    "a list": b"[]",
    "a number of 300 bits": pickle.dumps({"entries": [ENTRY | {"p2p_seq_id": 1 << 300}]}),
    "a number that is a text": pickle.dumps({"entries": [ENTRY | {"p2p_seq_id": "1"}]}),
    "a group without a name": pickle.dumps({"entries": [ENTRY | {"process_group": ["0"]}]}),
    "a group whose name is a number": pickle.dumps({"entries": [], "pg_config": {"0": {"desc": 3}}}),
}
REFUSED = """
import resource, sys
from pipelab import OneFOneB
from pipelab.errors import FormatError
from pipelab.hub.flight_recorder import culprit
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        sys.exit(f"{path}: {culprit(OneFOneB(2, 2), [path])}")
    except FormatError:
        pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_hostile_files_are_refused_with_100_megabytes(tmp_path):
    for name, data in HOSTILE.items():
        (tmp_path / name).write_bytes(data)
    words = [sys.executable, "-c", REFUSED, *map(str, tmp_path.iterdir())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def hung(plan, action, folder):
    """Run a plan in PyTorch's own runtime with an action that never ends; return the files of the recorder.

    gloo's recorder has no sends and receives, so the processes write their own. What both ends have posted is over.
    """
    sizes = (str(plan.stages), str(plan.microbatches))
    ended = processes.run_in(
        plan.ranks, "stalls.py", str(plan.to_csv(folder / "plan.csv")), str(folder), *sizes, action
    )
    assert [each.code for each in ended] == [0] * plan.ranks, processes.shown(ended)
    paths = sorted(folder.glob("trace_rank_*"))
    contents = [json.loads(path.read_text()) for path in paths]
    names = [Counter(each["profiling_name"] for each in content["entries"]) for content in contents]
    for rank, (path, content) in enumerate(zip(paths, contents, strict=True)):
        met = Counter()
        for entry in content["entries"]:
            name = entry["profiling_name"]
            peer = int(re.findall(r"\d+", name)[-1])
            there = f"gloo:recv {peer}<-{rank}" if "send" in name else f"gloo:send {peer}->{rank}"
            met[name] += 1
            entry["state"] = "completed" if met[name] <= names[peer][there] else "scheduled"
        path.write_text(json.dumps(content))
    return paths


def test_the_command_prints_what_the_page_shows(tmp_path, pipelab_command):
    plan = pipelab.OneFOneB(4, 6).plan()
    written(tmp_path, stalled(plan, 2, "2F1"))
    sizes = ("--ranks", "4", "--microbatches", "6")
    code, said, _ = pipelab_command("why", "1f1b", *sizes, "--recorder", str(tmp_path / "nccl_trace_rank_*"))
    page = Path(__file__).parents[2] / "docs" / "profiles.md"
    assert code == 0
    assert said in page.read_text(encoding="utf-8")
    code, _, said = pipelab_command("why", "1f1b", "--recorder", str(tmp_path / "nothing*"))
    assert (code, "no file of the Flight Recorder was found" in said) == (1, True)


@pytest.mark.dist
@pytest.mark.parametrize("action", ["2F1", "1B3"])
def test_a_stage_that_hangs_in_pytorchs_own_runtime_is_named(action, tmp_path):
    plan = pipelab.OneFOneB(4, 6).plan()
    found = culprit(plan, hung(plan, action, tmp_path))
    assert (found.rank, found.actions) == (int(action[0]), (action,)), str(found)
