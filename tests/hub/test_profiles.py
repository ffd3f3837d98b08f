"""Profiles of PyTorch's own pipelining: read as traces, with device times, clocks and steps; or refused.

The files were made by `tests/scripts/make_profiles.py`: two ranks, four micro-batches, two steps, forwards of 2 ms and
backwards of 4 ms.
"""

from __future__ import annotations

import gzip
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from fuzz.files import fuzz_profile
from traces import assert_obeys

import pipelab
from pipelab import Trace, compare, simulate, what_if
from pipelab.errors import FormatError, UsageError
from pipelab.files import read_text
from pipelab.hub import profiles
from pipelab.trace.waits import half

FOLDER = Path(__file__).parent / "profiles"
KINDS = {
    "gpipe": pipelab.GPipe,
    "1f1b": pipelab.OneFOneB,
    "interleaved-1f1b": pipelab.Interleaved1F1B,
    "interleaved-1f1b-slow-rank-1": pipelab.Interleaved1F1B,
    "zbv": pipelab.ZBV,
    "dualpipev": pipelab.DualPipeV,
}
NOISE = 0.1
"""In milliseconds: two processes do not read the same clock alike."""


def load(name, step=None):
    return profiles.load(FOLDER / name / "rank*.json.gz", step)


def data_of(name):
    """Return the data of both ranks."""
    files = sorted((FOLDER / name).iterdir())
    return [json.loads(gzip.decompress(file.read_bytes())) for file in files]


def written(folder, *data):
    """Write each rank's data; return the files."""
    paths = [folder / f"rank{rank}.json" for rank in range(len(data))]
    for path, each in zip(paths, data, strict=True):
        path.write_text(json.dumps(each))
    return paths


def labels(data, text):
    """Return the events whose name begins so, in order of time."""
    found = [event for event in data["traceEvents"] if event.get("name", "").startswith(text) and event["ph"] == "X"]
    return sorted(found, key=lambda event: event["ts"])


def moved(data, milliseconds):
    """Return a rank's data as if its clock were ahead."""
    return data | {"baseTimeNanoseconds": data["baseTimeNanoseconds"] + int(milliseconds * 1e6)}


def order(plan):
    """Return each rank's actions, without the all-reduces that PyTorch labels for every stage."""
    action = plan.bound.codes.action
    return [[str(action(code)) for code in row if action(code).kind != "R"] for row in plan.bound.computing]


# What a profile shows


@pytest.mark.parametrize("name", KINDS)
def test_a_profile_shows_the_order_of_the_schedule_that_ran(name):
    trace = load(name)
    pairs = trace.plan.bound.pairs
    assert bool(pairs) == (name == "dualpipev")
    if pairs:  # PyTorch labels both halves together
        assert {half(trace, 0, index) for index in range(len(trace.starts[0]))} == {"whole", "upper", "lower"}
    else:
        assert_obeys(trace, trace.plan, slack=NOISE)
    assert order(trace.plan) == order(KINDS[name](2, 4).plan())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_a_wait_for_a_value_is_no_work(name):
    trace = load(name)
    forwards, backwards = (
        sorted(event.duration for event in trace.events if event.action.kind == kind) for kind in "FB"
    )
    assert min(forwards) >= 2
    assert min(backwards) >= 4
    assert forwards[len(forwards) // 2] < 3.5
    assert backwards[len(backwards) // 2] < 6
    total = sum(trace.busy) + sum(trace.ledger.total.values())
    assert total == pytest.approx(trace.ranks * trace.makespan)


def test_a_slow_rank_shows_in_the_ledger_and_in_what_if():
    trace = load("interleaved-1f1b-slow-rank-1")
    assert trace.ledger[0]["wait"] > 0.5 * trace.makespan
    assert what_if(trace, 0).change > -0.03
    quick = what_if(trace, 1)
    assert -0.7 < quick.change < -0.5
    assert quick.trace.makespan == pytest.approx(load("interleaved-1f1b").makespan, rel=0.25)
    assert compare(trace, quick.trace).rows[1].makespan == quick.trace.makespan


def test_the_step_of_median_length_is_read_unless_another_is_asked_for():
    both = [load("zbv", step) for step in (0, 1)]
    assert load("zbv") == min(both, key=lambda trace: trace.makespan)
    assert both[0] != both[1]
    assert [trace.note for trace in both] == ["step 0 of 0 to 1", "step 1 of 0 to 1"]
    with pytest.raises(UsageError, match="the files hold steps 0 to 1"):
        load("zbv", 2)


@pytest.mark.parametrize("kept", ["from the middle of step 0", "to the middle of step 1"])
def test_a_step_that_the_profiler_did_not_see_whole_is_left_out(tmp_path, kept):
    data = data_of("interleaved-1f1b")
    for each in data:
        third = labels(each, "PP:1B1" if labels(each, "PP:1B1") else "PP:0B1")
        first, second = (event["ts"] for event in third)
        each["traceEvents"] = [
            event
            for event in each["traceEvents"]
            if event["ph"] != "X" or (event["ts"] > first if "from" in kept else event["ts"] < second)
        ]
    trace = profiles.load(written(tmp_path, *data))
    assert trace.note == ""
    assert trace.starts == load("interleaved-1f1b", 1 if "from" in kept else 0).starts


def test_a_saved_profile_is_loaded_as_a_trace(tmp_path):
    trace = load("1f1b")
    assert profiles.load(trace.save(tmp_path / "trace.json")) == trace


def test_the_page_about_profiles_says_what_its_lines_print(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text(encoding="utf-8")
    code, _, fitted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    shutil.copytree(FOLDER / "interleaved-1f1b-slow-rank-1", tmp_path / "traces")
    monkeypatch.chdir(tmp_path)
    Path("read.py").write_text(code + fitted, encoding="utf-8")
    runpy.run_path("read.py")
    printed = " ".join(capsys.readouterr().out.split())
    for lines in expected.split("\n\n"):
        assert " ".join(lines.split()) in printed
    assert (tmp_path / "job.html").stat().st_size > 10_000
    assert "ZB-V" in printed


# Clocks


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
@pytest.mark.parametrize("host", ["vm", "another"])
@pytest.mark.parametrize("ahead", [-5000, 3, 1e9])
def test_the_clocks_of_two_machines_are_aligned(tmp_path, name, host, ahead):
    first, second = data_of(name)
    trace = profiles.load(written(tmp_path, first, moved(second, ahead) | {"host_name": host}), 0)
    by, within = map(float, re.search(r"moved by up to (\S+) ms, aligned within (\S+) ms", trace.note).groups())
    within = within * 1.05 + NOISE
    assert by == pytest.approx(abs(ahead), rel=0.01, abs=within)
    true = load(name, 0)
    assert trace.makespan == pytest.approx(true.makespan, abs=within)
    assert trace.starts[1] == pytest.approx(true.starts[1], abs=within)
    assert_obeys(trace, trace.plan, slack=NOISE)


def test_clocks_that_cannot_be_aligned_are_refused(tmp_path):
    first, second = data_of("zbv")
    for event in second["traceEvents"]:
        event["ts"] *= 1.5
    with pytest.raises(FormatError, match="no clocks fit"):
        profiles.load(written(tmp_path, first, second))


# Devices


LATE, LAST = 3000.0, 500.0
"""In microseconds: how much later than the host a GPU is, and how long its kernels take."""


def on_gpu(data):
    """Return a rank's data as of a GPU: for each label a kernel, launched by another thread, that ends `LATE`.

    Beside it run a communication kernel and one on another stream, both later. A receive ends 50 before its kernel.
    """
    events = []
    for number, label in enumerate(labels(data, "PP:")):
        received = re.fullmatch(r"PP:(\d)RECV_([FB])(\d)", label["name"])
        if received:
            user = next(
                each for each in labels(data, "PP:{}{}{}".format(*received.groups())) if each["ts"] > label["ts"]
            )
            there = user["ts"] + user["dur"] + LATE - LAST - 50
            kernels = [("ncclDevKernel_SendRecv", 22, 10.0, there)]
        elif any(part in label["name"] for part in ("SEND", "SHARD", "REDUCE")):
            continue
        else:
            end = label["ts"] + label["dur"] + LATE
            kernels = [
                ("gemm", 7, LAST, end),
                ("ncclDevKernel_AllGather", 7, 9.0, end + 9),
                ("copy", 21, 9.0, end + 200),
            ]
        for which, (name, stream, last, until) in enumerate(kernels):
            link = {"correlation": 10 * number + which}
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": label["ts"] + 1, "dur": 1}
            kernel = {"ph": "X", "cat": "kernel", "name": name, "ts": until - last, "dur": last}
            events += [launch | {"args": link}, kernel | {"args": link | {"stream": stream}}]
    return data | {"traceEvents": events + data["traceEvents"]}


def test_on_a_gpu_the_times_of_its_kernels_count(tmp_path):
    data = data_of("interleaved-1f1b")
    trace = profiles.load(written(tmp_path, *map(on_gpu, data)), 0)
    origin = labels(data[0], "PP:0F0")[0]
    for event in trace.events_of(0):
        if event.action.kind != "R":
            label = labels(data[0], f"PP:{event.action}")[0]
            end = label["ts"] + label["dur"] - origin["ts"] - origin["dur"] + LAST
            assert (event.start, event.end) == pytest.approx(((end - LAST) / 1e3, end / 1e3), abs=1e-3)
    for moved in trace.transfers:
        start = next(event.start for event in trace.events if event.action == moved.needer)
        assert moved.end == pytest.approx(max(start - 0.05, moved.start), abs=1e-3)
    assert "without device times" not in trace.note
    assert all(lane.startswith("gpu") for lane in trace.lanes)


def test_a_gpus_profile_without_device_times_is_marked(tmp_path):
    def of_nccl(data):
        return data | {"distributedInfo": data["distributedInfo"] | {"backend": "nccl"}}

    data = data_of("interleaved-1f1b")
    assert profiles.load(written(tmp_path, *map(of_nccl, data)), 0).note.endswith(", without device times")
    one = profiles.load(written(tmp_path, data[0], of_nccl(data[1])), 0)
    assert one.note.endswith(", without device times on rank 1")
    assert "without device times" in str(one)


# Refusals


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_file_alone_is_refused(name, rank):
    with pytest.raises(FormatError, match="give the files of all ranks"):
        profiles.load(FOLDER / name / f"rank{rank}.json.gz")


def test_the_files_of_two_replicas_are_refused():
    files = [FOLDER / "zbv" / f"rank{rank}.json.gz" for rank in (0, 1)]
    with pytest.raises(FormatError, match=r"both hold .*: give the files of one pipeline"):
        profiles.load([*files, FOLDER / "interleaved-1f1b" / "rank0.json.gz"])


def test_a_schedule_that_labels_nothing_is_refused_with_what_to_do():
    with pytest.raises(FormatError, match=r"(?s)rank0\.json\.gz names no forward.*try: .*with_stack=True"):
        load("1f1b-without-stack")


def test_a_profile_of_another_job_gets_advice_that_fits_it_and_that_works(tmp_path):
    torch = pytest.importorskip("torch")
    for labels_of, words in (((), "record_function"), (("PP:0F0", "PP:0F1", "PP:0B0", "PP:0B1"), "")):
        with torch.profiler.profile() as profiler:
            for label in labels_of or ("forward",):
                with torch.profiler.record_function(label):
                    torch.ones(8, 8).sum()
        profiler.export_chrome_trace(str(tmp_path / "job.json"))
        if words:
            with pytest.raises(FormatError, match="no send and no receive") as told:
                profiles.load(tmp_path / "job.json")
            assert words in str(told.value)
            assert "with_stack" not in str(told.value)
        else:
            assert str(profiles.load(tmp_path / "job.json").plan) == "rank 0 | 0F0 0F1 0B0 0B1"


def test_ranks_with_different_numbers_of_steps_are_refused(tmp_path):
    first, second = data_of("zbv")
    (_, middle) = (event["ts"] for event in labels(second, "PP:1F0"))
    second["traceEvents"] = [event for event in second["traceEvents"] if event["ph"] != "X" or event["ts"] < middle]
    with pytest.raises(FormatError, match=r"rank0\.json holds 2 whole steps, .*rank1\.json only 1"):
        profiles.load(written(tmp_path, first, second))


def test_a_broken_event_is_named(tmp_path):
    first, second = data_of("zbv")
    event = labels(first, "PP:0F0")[0]
    event["ts"] = "soon"
    number = first["traceEvents"].index(event)
    with pytest.raises(FormatError, match=rf"rank0\.json: event {number}, 'PP:0F0': 'ts' is 'soon'"):
        profiles.load(written(tmp_path, first, second))


def test_a_missing_action_is_named(tmp_path):
    first, second = data_of("zbv")
    for each in (first, second):
        names = [f"PP:0{kind}3" for kind in "FBIW"]
        each["traceEvents"] = [event for event in each["traceEvents"] if event.get("name") not in names]
    with pytest.raises(FormatError, match="micro-batch 3 .*stage 0"):
        profiles.load(written(tmp_path, first, second))


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b"[" + b"[]," * (1 << 21) + b"[]]"))
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail(f"made objects of {len(text)} characters"))
    with pytest.raises(FormatError, match=rf"unpacked from {path.stat().st_size:,}"):
        profiles.load(path)


def test_a_trace_that_packs_as_well_as_any_is_read(tmp_path):
    trace = simulate(pipelab.GPipe(8, 2048), pipelab.Cost(forward=0, backward=0))
    text = trace.save(tmp_path / "trace.json").read_text()
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert len(text) > 1 << 20
    assert read_text(path) == text


def test_broken_and_foreign_files_are_refused(tmp_path):
    packed = (FOLDER / "zbv" / "rank0.json.gz").read_bytes()
    exported = simulate(pipelab.GPipe(2, 2)).save(tmp_path / "own.perfetto.json").read_bytes()
    for held, words in (
        (packed[:2000], "is a gzip file, and broken"),
        (packed[:-8] + bytes(8), "is a gzip file, and broken"),
        (gzip.decompress(packed)[:2000], "is not JSON"),
        (b"{}", "is not a trace saved by pipelab"),
        (b'{"traceEvents": []}', "names no forward"),
        (b'{"traceEvents": 3}', "'traceEvents' is 3"),
        (b'{"traceEvents": [], "baseTimeNanoseconds": "x"}', "'baseTimeNanoseconds' is 'x'"),
        (exported, "names no forward"),
    ):
        path = tmp_path / "rank0.json.gz"
        path.write_bytes(held)
        with pytest.raises(FormatError, match=words):
            profiles.load(path)
    with pytest.raises(FormatError, match="hub.profiles.load"):
        Trace.load(FOLDER / "zbv" / "rank0.json.gz")
    with pytest.raises(FormatError, match="is not a profile"):
        profiles.load([FOLDER / "zbv" / "rank0.json.gz", simulate(pipelab.GPipe(2, 2)).save(tmp_path / "a.json")])
    with pytest.raises(FileNotFoundError):
        profiles.load(tmp_path / "nothing*.json")
    with pytest.raises(UsageError, match="step"):
        profiles.load(tmp_path / "a.json", step=1)


def test_altered_profiles_are_refused_or_drawn():
    assert [fuzz_profile(seed) for seed in range(60)] == [None] * 60
