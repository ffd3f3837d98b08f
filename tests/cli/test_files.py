"""What the command line saves, and what it refuses to."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from commands import RIGHT

import pipelab
from pipelab.cli import app, showing


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be simulated, measured or compared."""

    def work(*_: object) -> None:
        raise AssertionError("work before the file was refused")

    for name in ("simulate", "measure", "measure_sweep"):
        monkeypatch.setattr(app, name, work)
    for name in ("compare", "diff"):
        monkeypatch.setattr(pipelab, name, work)


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("simulate gpipe", ".html .svg .png .pdf .txt .json .events.csv .perfetto.json .csv"),
        ("draw gpipe", ".html .svg .png .pdf .txt .json .events.csv .perfetto.json .csv"),
        ("check gpipe", ".html .svg .png .pdf .txt"),
        ("draw gpipe --graph", ".dot .gv .svg .png .pdf"),
        ("compare gpipe 1f1b", ".html .svg .png .pdf .txt .csv .md"),
        ("compare gpipe 1f1b --diff", ".html .txt .csv .md"),
        ("compare gpipe -m 2,4", ".csv .txt .md .html .png .svg .pdf"),
        ("why gpipe", ".csv .txt .md .html"),
        ("megatron gpipe --decoders 4 --time t=1", ".csv .txt .md .html"),
        ("layout model.toml --gpus 2", ".csv .txt .md .html"),
        ("run gpipe", ".html .svg .png .pdf .txt .csv .md .json"),
        ("run gpipe 1f1b", ".html .svg .png .pdf .txt .csv .md"),
        ("run gpipe -m 2,4", ".csv .txt .md .html .png .svg .pdf"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_a_file_that_cannot_be_written_is_refused_before_any_work(refused, folder, command, known):
    Path("file").write_text("")
    suffix = known.split()[0]
    for name, told in (
        ("x.foo", f"cannot be written as .foo; use one of {known}\n"),
        (f"nowhere/x{suffix}", "there is no folder nowhere"),
        (f"file/x{suffix}", "file is a file, not a folder"),
    ):
        assert told in refused(*command.split(), "--save", name)


@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_the_demo_refuses_a_folder_that_it_cannot_make_before_it_trains(refused, folder, monkeypatch, name):
    monkeypatch.setattr(showing, "train_plainly", lambda *_: pytest.fail("work before the folder was refused"))
    Path("file").write_text("")
    assert name in refused("demo", "--folder", name)


@pytest.mark.parametrize(
    "words",
    ["check t.json", "simulate t.json", "compare t.json gpipe", "check \x1b[31m.csv", "check t.json --memory-cap 1"],
)
def test_names_from_files_reach_the_terminal_with_their_escape_codes_spelled_out(pipelab_command, folder, words):
    plan = pipelab.Plan(pipelab.GPipe(2, 2).plan().rows, name="\x1b[31mred\x9b")
    pipelab.simulate(plan).save("t.json")
    Path("\x1b[31m.csv").write_text("0F0 oops")
    _, output, error = pipelab_command(*words.split())
    assert not {"\x1b", "\x9b"} & set(output + error)
    assert "\\x1b[31m" in output + error or "compare" in words


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_a_timeline_can_be_read_in_any_encoding(encoding, monkeypatch):
    printed = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
        patch.setattr(sys, "argv", ["pipelab", "simulate", "1f1b"])
        with pytest.raises(SystemExit):
            app.main()
        sys.stdout.flush()
        timeline = printed.getvalue().decode(encoding)
    assert "?" not in timeline
    lines, drawn = timeline.splitlines(), str(pipelab.simulate(pipelab.OneFOneB(4, 8))).splitlines()
    assert list(map(len, lines)) == list(map(len, drawn))
    mark = "│" if encoding == "utf-8" else "|"
    assert [line[7] for line in lines if line.startswith("rank ")] == [mark] * 4


def test_a_plan_is_written_as_pytorch_loads_it(succeeds, folder):
    Path("mine.py").write_text(RIGHT)
    for command in ("draw", "simulate"):
        output = succeeds(command, "mine.py:MySchedule", "-r", "2", "-m", "2", "--save", "plan.csv")
        assert output.splitlines()[-1] == "wrote plan.csv"
        assert Path("plan.csv").read_text().splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]
        Path("plan.csv").rename(f"{command}.csv")
    assert "8 actions, no fault" in succeeds("check", "draw.csv")


def test_a_comparison_is_written_as_a_table_of_its_figures(succeeds, folder):
    succeeds("compare", "gpipe", "1f1b", "-o", "c.csv")
    first, second = csv.DictReader(Path("c.csv").read_text().splitlines())
    assert (first["name"], first["source"], first["makespan"]) == ("gpipe", "simulated", "33.0")
    assert second["peak_activations"] == "4 3 2 1"
    succeeds("compare", "gpipe", "1f1b", "-o", "c.md")
    assert "| 1f1b | 33 units | 27.3 % | 4 3 2 1 |" in Path("c.md").read_text()


@pytest.mark.parametrize("command", ["check", "draw"])
def test_faults_are_drawn_and_the_exit_code_stays(pipelab_command, folder, command):
    deadlock = "0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1"
    without = pipelab_command(command, deadlock)
    code, output, error = pipelab_command(command, deadlock, "-o", "x.html", "-o", "x.svg", "-o", "x.png")
    assert (code, error) == (1, without[2])
    assert without[0] == 1
    assert output.split() == ["wrote", "x.html", "wrote", "x.svg", "wrote", "x.png"]
    for name in ("x.html", "x.svg"):
        assert Path(name).read_text().count('id="arrow ') == 4


def test_a_plan_is_written_with_its_transfers_if_they_are_given_an_order(succeeds, folder):
    succeeds("draw", "1f1b", "--ranks", "2", "-o", "plan.csv")
    assert "SEND" not in Path("plan.csv").read_text()
    options = ("--order", "by-time", "--transport", "rank")
    succeeds("draw", "1f1b", "--ranks", "2", *options, "-o", "rows.csv")
    assert Path("rows.csv").read_text().count("SEND_F") >= 8


def test_a_hang_of_transfers_and_one_of_pairs_are_drawn(pipelab_command, refused, folder):
    refused("draw", "1f1b", "--order", "at-use", "--transport", "rank", "-o", "x.svg")
    assert "2RECV_B0 comes after 2SEND_F1" in Path("x.svg").read_text()
    Path("plan.csv").write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    code, _, error = pipelab_command("draw", "plan.csv", "--cost", "pair=3", "-o", "y.svg")
    assert (code, "deadlock" in error) == (1, True)
    assert Path("y.svg").read_text().count('id="arrow ') > 0


def test_what_cannot_show_faults_is_not_written(pipelab_command, refused, folder):
    code, output, _ = pipelab_command("draw", "0F0; 1F0 1B0", "-o", "x.json", "-o", "x.csv")
    assert (code, output) == (1, "")
    assert not list(folder.iterdir())
    Path("plan.csv").write_bytes(b"\xff\xfe0F0")
    assert "plan.csv is not text" in refused("check", "plan.csv")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check 1f1b -o x.txt -o x.svg", ">3B7<"),
        pytest.param("draw 1f1b -r 2 -m 2 --graph -o x.svg", "<svg", marks=pytest.mark.dot),
    ],
)
def test_what_is_right_is_drawn_as_rows_and_as_a_graph(succeeds, folder, command, words):
    succeeds(*command.split())
    assert words in Path("x.svg").read_text()
