"""One's own layouts, which schedules are searched, and what is said if there is no layout."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

import pipelab
from pipelab.errors import UsageError
from pipelab.layouts.devices import device
from pipelab.layouts.estimate import Estimate, Layout, _holdings
from pipelab.layouts.transformer import Transformer

SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000, "sequence": 4096}
MODEL = Transformer(**SMALL)
TOML = "\n".join(f"{name} = {value}" for name, value in SMALL.items())


def test_one_layout_is_evaluated_if_all_its_values_are_given():
    own = {"tensor": 2, "replicas": 2, "zero": 2, "pipeline": 2, "schedule": "interleaved-1f1b", "stages_per_rank": 5}
    own |= {"microbatches": 3, "microbatch": 3, "recompute": "full", "overlap": False, "context": 1, "expert": 1}
    found = pipelab.layout(MODEL, gpus=8, batch=18, **own)
    assert (found.tried, asdict(found.best.layout)) == (1, own)
    assert found.best.seconds == Estimate(MODEL, Layout(**own), device("h100")).seconds


def test_short_names_are_the_tables_and_what_is_not_fixed_is_searched():
    given = {"gpus": 4, "batch": 16, "top": 10**6}
    every = pipelab.layout(MODEL, **given)
    assert (
        pipelab.layout(MODEL, **given, tp=2, PP=2, m=4).rows
        == pipelab.layout(MODEL, **given, tensor=2, pipeline=2, microbatches=4).rows
    )
    some = pipelab.layout(MODEL, **given, pp=2, recompute="full")
    assert some.rows == [row for row in every.rows if (row["pipeline"], row["recompute"]) == (2, "full")]
    heads = [column.title for column in some.table.columns[:11]]
    one = pipelab.layout(MODEL, **given, **dict(zip(heads, list(some.rows[0].values())[:11], strict=True)))
    assert one.rows == some.rows[:1]


def test_only_these_schedules_are_searched():
    given = {"gpus": 4, "batch": 16, "top": 10**6, "pp": 4}
    for names in ("1f1b,zbv", "1f1b zbv", ["1f1b", "zbv"]):
        rows = pipelab.layout(MODEL, **given, schedules=names).rows
        assert {row["schedule"] for row in rows} == {"1f1b", "zbv"}
    assert {row["schedule"] for row in pipelab.layout(MODEL, **given, schedule="hanayo").rows} == {"hanayo"}
    for name in ("chimera", "bitpipe", "slimpipe"):
        with pytest.raises(UsageError, match=f"{name}: estimates are for whole sequences, and each stage on one rank"):
            pipelab.layout(MODEL, **given, schedule=name)


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ({"pipelin": 4}, "pipelin: a layout has tp, cp, ep, dp, pp, zero, schedule, v, m, b, recompute, tensor, "),
        ({"recompute": "slective"}, "recompute='slective': expected none, selective, full"),
        ({"tensor": 0}, "tensor=0: expected a whole number, at least 1"),
        ({"b": "two"}, "microbatch='two': expected a whole number, at least 1"),
        ({"zero": 4}, "zero=4: expected 0, 1, 2, 3"),
        ({"overlap": "no"}, "overlap='no': expected True, False"),
        ({"schedule": "1f2b"}, "schedule='1f2b': expected naive, gpipe, 1f1b, "),
        ({"zero": True}, "zero=True: expected 0, 1, 2, 3"),
        ({"overlap": 0}, "overlap=0: expected True, False"),
        ({"pp": 4, "zero": 1, "pipeline": 2}, "pp=4 zero=1 pipeline=2: one of them is given twice"),
        ({"margin": 2}, "margin=2: expected a number, at least 0 and below 1"),
        ({"margin": float("nan")}, "margin=nan: expected a number, at least 0 and below 1"),
        ({"margin": "a"}, "margin='a': expected a number, at least 0 and below 1"),
        ({"memory": -5}, "memory=-5: expected a number, at least 0 and below inf"),
        ({"memory": float("nan")}, "memory=nan: expected a number, at least 0 and below inf"),
        ({"memory": float("inf")}, "memory=inf: expected a number, at least 0 and below inf"),
        ({"tp": 16}, "no such layout: tensor=16 does not divide 8 heads"),
        ({"cp": 3, "pp": 40}, "no such layout: context=3 does not divide 4096 tokens"),
        ({"ep": 2, "pp": 40}, "no such layout: 0 experts on 2 devices"),
    ],
)
def test_names_and_values_that_no_layout_has_are_refused_with_those_there_are(fixed, told):
    with pytest.raises(UsageError) as error:
        pipelab.layout(MODEL, gpus=16, batch=16, **fixed)
    assert str(error.value).startswith(told)


def test_a_layout_of_wrong_sizes_or_words_is_refused():
    for name, value in {"recompute": "slective", "tensor": 0, "microbatches": 1.5, "zero": -1, "schedule": "x"}.items():
        with pytest.raises(UsageError, match=f"{name}="):
            Layout(**{name: value})
    with pytest.raises(UsageError, match="stages_per_rank=5: OneFOneB has exactly 1"):
        _ = Estimate(MODEL, Layout(pipeline=2, stages_per_rank=5, microbatches=4), device("h100")).seconds
    with pytest.raises(UsageError, match="schedule='xx'"):
        pipelab.layout(MODEL, gpus=1, schedules=["xx"])


@pytest.mark.parametrize(
    ("gpus", "batch", "fixed", "moves"),
    [
        (10**6, 64, {}, "a batch of 15625"),
        (37, 8, {}, "a batch of 37"),
        (64, 64, {"pp": 4, "v": 5}, "pipeline=2; or stages_per_rank=1, 2"),
        (64, 64, {"pp": 4, "v": 2, "schedule": "1f1b"}, "stages_per_rank=1; or schedule=interleaved-1f1b, v-half, zbv"),
        (64, 64, {"M": 7}, "microbatches=1, 2, 4, 8, 16, 32; or a batch of 63"),
        (64, 64, {"dp": 3, "pp": 3}, "fewer values"),
    ],
)
def test_if_there_is_no_layout_the_message_has_the_rules_and_moves_that_work(gpus, batch, fixed, moves):
    with pytest.raises(UsageError) as error:
        pipelab.layout(MODEL, gpus=gpus, batch=batch, **fixed)
    said = str(error.value)
    assert f"must be {gpus:,}, replicas x microbatches x microbatch {batch:,}; tensor divides 8 heads" in said
    assert re.search(rf"try: {moves}", said)
    if larger := re.search(r"a batch of (\d+)", said):
        assert pipelab.layout(MODEL, gpus=gpus, batch=int(larger[1]), **fixed, memory=1000, top=1).tried


def test_a_model_in_python_takes_the_sequence_that_is_asked_for():
    assert pipelab.layout(MODEL, gpus=1, batch=1, sequence=2048, top=1).rows[0]["sequence"] == 2048


def test_an_odd_sequence_is_not_cut():
    found = pipelab.layout(Transformer(**SMALL | {"sequence": 8191}), gpus=2, batch=2, top=10**6)
    assert {row["context"] for row in found.rows} == {1}


def test_if_nothing_fits_the_smallest_layout_is_named_and_it_fits_into_what_is_said():
    given = {"gpus": 2, "batch": 2, "margin": 0}
    with pytest.raises(UsageError, match=r"none of \d+ layouts .* fits into 0\.1 GB \(0 % .*: each needs") as error:
        pipelab.layout(MODEL, **given, memory=0.1)
    size = float(re.search(r"found needs ([\d.]+) GB", str(error.value))[1])
    own = dict(re.findall(r"(\w+)=(\S+)", str(error.value)))
    own = {name: int(value) if value.isdecimal() else value for name, value in own.items()}
    assert max(pipelab.layout(MODEL, **given, memory=size, **own).best.bytes) <= size * 1e9
    every = pipelab.layout(MODEL, **given, memory=1000, top=10**6)
    assert min(row["bytes"] for row in every.rows) > (size - 0.1) * 1e9


def test_if_nothing_fits_the_bytes_of_few_layouts_are_computed(monkeypatch):
    computed = set()
    monkeypatch.setattr("pipelab.layouts.estimate._holdings", lambda *sizes: computed.add(sizes) or _holdings(*sizes))
    with pytest.raises(UsageError, match=r"none of \d{3,} layouts"):
        pipelab.layout(MODEL, gpus=8, batch=32, memory=0.1)
    with pytest.raises(UsageError, match="try: other values than yours; or more devices"):
        pipelab.layout(MODEL, gpus=8, batch=32, memory=2, zero=0, tp=1, pp=1)
    assert len(computed) <= 10


def test_levels_of_zero_that_take_the_same_time_are_one_row_with_the_lowest_that_fits():
    def key(estimate):
        return replace(estimate.layout, zero=0), f"{estimate.seconds:.9e}"

    given = {"gpus": 4, "batch": 8, "top": 10**6, "memory": 8}
    lowest, found = {}, pipelab.layout(MODEL, **given).estimates
    for zero in range(3, -1, -1):
        lowest |= {
            key(each): zero for each in pipelab.layout(MODEL, **given, zero=zero).estimates if each.layout.replicas > 1
        }
    assert len(lowest) > 50
    assert {key(each): each.layout.zero for each in found if each.layout.replicas > 1} == lowest
    assert len({key(each) for each in found}) == len(found)


def test_what_each_rank_holds_adds_up_to_the_most_that_it_holds():
    found = pipelab.layout(MODEL, gpus=8, batch=8, pp=4, tp=2)
    rows = found.held.rows
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert sum(row["layers"] for row in rows) == 8
    assert [row["all"] for row in rows] == list(found.best.bytes)
    parts = ("weights", "gradients", "optimizer", "activations", "one backward")
    for row in rows:
        assert sum(row[part] for part in parts) == pytest.approx(row["all"])


@pytest.mark.parametrize(("schedule", "rank"), [("1f1b", 3), ("zbv", 0)])  # where each has the head
def test_the_terms_say_whose_they_are_and_how_long_all_ranks_wait(schedule, rank):
    found = pipelab.layout(MODEL, gpus=4, batch=8, pp=4, schedule=schedule, recompute="none", b=1)
    best = found.best
    waits = [1 - sum(terms.values()) / best.seconds for terms in best.by_rank]
    assert waits.index(min(waits)) == rank
    assert {row["term"]: row["seconds"] for row in found.terms.rows}["waiting"] / best.seconds == pytest.approx(
        waits[rank]
    )
    title = found.terms.title
    assert f"on rank {rank}, which works longest" in title
    assert f"All ranks wait {100 * sum(waits) / 4:.1f} % of the step on average" in title
    assert "fewer layers beside the head" in found.held.notes[0]
    assert sum(best.by_rank[0].values()) < best.seconds
    alone = pipelab.layout(MODEL, gpus=1, batch=8, top=1)
    assert (alone.terms.title, alone.held.notes) == ("The step of the quickest", [])


def test_the_command_evaluates_my_layout_and_says_what_each_rank_holds(succeeds, refused, tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(TOML)
    given = ("layout", str(path), "--gpus", "16", "--batch", "16")
    output = succeeds(*given, "--set", "tp=2 pp=4 v=1 recompute=full", "--set", "b=2,zero=1", "--schedules", "zb-h1")
    assert re.search(r"\n2 +1 +1 +2 +4 +1 +zb-h1 +1 +4 +2 +full ", output)
    assert "1 layout of 16 h100" in output
    assert re.search(r"rank +layers +all +weights.*\n(\d .*\n){4}", output)
    assert "recompute='slective': expected none, selective, full" in refused(*given, "--set", "recompute=slective")
    for own in ("gpus=4", "margin=0", "top=1", "model=x", "schedules=zbv"):
        assert f"{own.partition('=')[0]}: a layout has tp, cp, " in refused(*given, "--set", own).lower()
    assert "--set tp=4: tp is 2 already" in refused(*given, "--set", "tp=2 tp=4")
    assert "one of them is given twice" in refused(*given, "--set", "pp=4", "--set", "pipeline=2")
    assert "such as --set tp=8" in refused(*given, "--set", "tp")
    assert "schedule='zbw': expected" in refused(*given, "--schedules", "1f1b,zbw")
    assert "try: pipeline=2; or stages_per_rank=1, 2" in refused(*given, "--set", "pp=4 v=5")
