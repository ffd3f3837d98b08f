"""The main job: real text, one model, and schedules that learn exactly what plain training learns."""

from __future__ import annotations

import io
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from strategies import in_order

from pipelab import schedules
from pipelab.cli import demo, showing
from pipelab.cli.believing import BUSY, LEGEND
from pipelab.cli.demo import batches, language_model, next_byte_loss, standard_library

SMALL = demo.Setting(ranks=2, microbatches=4, steps=3, rows=10, blocks=2, width=16, length=16)


def test_the_text_is_the_standard_librarys_own_source():
    text = bytes(standard_library(limit=200_000).tolist())
    first = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[0].read_bytes()
    assert text.startswith(first)
    assert len(text) == 200_000


def test_the_same_seed_gives_the_same_batches_and_targets_are_the_following_bytes():
    text = standard_library(limit=100_000)
    first, again = (next(batches(text, rows=3, length=5, seed=1)) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0], next(batches(text, rows=3, length=5, seed=2))[0])


def test_the_model_sees_only_what_came_before():
    torch.manual_seed(0)
    model = language_model(blocks=2, width=16, heads=2, length=8)
    text = torch.randint(256, (2, 8))
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    difference = (model(text) - model(changed)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:5] == 0)
    assert torch.all(difference[5:] > 0)


def test_an_untrained_model_is_as_surprised_as_by_chance():
    torch.manual_seed(0)
    model = language_model(blocks=1, width=16, heads=2, length=8)
    text = torch.randint(256, (4, 9))
    assert float(next_byte_loss(model(text[:, :-1]), text[:, 1:]).detach()) == pytest.approx(5.55, abs=0.5)


@pytest.fixture(scope="module")
def plain():
    return demo.train_plainly(SMALL)


@pytest.mark.parametrize("name", schedules)
def test_every_schedule_learns_exactly_what_plain_training_learns(name, plain):
    trained = demo.train_with(name, SMALL, plain)
    assert trained.losses == pytest.approx(plain.losses, rel=1e-5)
    if in_order(schedules[name](SMALL.ranks, SMALL.microbatches).plan()):  # sums of floats depend on the order
        assert trained.losses == plain.losses
        assert trained.same
        assert "bit for bit" in trained.proof
    assert plain.losses[-1] < plain.losses[0]


@pytest.mark.parametrize(("step_ms", "others", "marked"), [(50, 0.0, False), (80, 0.0, True), (50, 0.3, True)])
def test_a_measured_time_off_its_prediction_or_of_a_busy_machine_is_marked(plain, step_ms, others, marked):
    trained = demo.train_with("naive", SMALL, plain)
    usual = replace(plain, step_ms=50, others=0.0)
    _, *rows = showing._training_table(SMALL, usual, [replace(trained, step_ms=step_ms, others=others)])
    assert [row[1] for row in rows] == ["50", f"{step_ms}{'*' * marked}"]


def test_training_on_other_data_is_not_called_the_same(plain):
    other = demo.Setting(**{**{name: getattr(SMALL, name) for name in SMALL.__slots__}, "seed": 1})
    assert not demo.train_with("gpipe", other, plain).same


@pytest.mark.parametrize("busy", [False, True])
def test_the_demo_prints_its_tables_and_leaves_pictures(tmp_path, monkeypatch, capsys, busy):
    output = io.StringIO()
    monkeypatch.setattr(demo.Watch, "others", lambda *_: busy / 2)
    monkeypatch.setattr(showing, "Setting", lambda steps: SMALL)
    monkeypatch.setattr(showing, "Console", lambda: Console(file=output, width=80))
    monkeypatch.setattr(
        showing, "emulate", lambda name: demo.emulate(name, ranks=2, microbatches=2, forward_ms=1, backward_ms=2)
    )
    showing.show_demo(tmp_path / "out", steps=3)
    text = output.getvalue()
    assert text.count("exactly") >= 4
    assert "…" not in text  # no heading and no cell is cut
    assert "NO" not in text
    said = " ".join(text.split())
    assert said.count(LEGEND) + said.count(BUSY) == ("*" in said)  # once, below both tables
    assert said.count("Other programs use") == busy
    assert (re.search(r"batch at once takes [\d.,]+\* ms", said) is not None) >= busy
    real, four = "Real training on this machine", "Four emulated devices,"
    assert (said.index(four) < said.index(real)) == (BUSY in said) >= busy  # what can be trusted comes first
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["four-devices.html", "four-devices.svg", "training.html", "training.svg"]
    for name, head, other in (("training", real, four), ("four-devices", four, real)):
        part = said.partition(head)[2].partition(other)[0]
        doubted = re.search(r"(naive|gpipe|1f1b|delayed) [\d.,]+\* ", part) is not None
        assert (LEGEND in (tmp_path / "out" / f"{name}.html").read_text()) == doubted
    told = capsys.readouterr().out
    assert all(f"wrote {tmp_path / 'out' / name}" in told for name in written)
