"""The command line: every capability has a command, and every mistake an answer."""

from __future__ import annotations

import csv
import os
import queue
import re
import shlex
import subprocess
import sys
import urllib.request
import webbrowser
from pathlib import Path
from threading import Thread

import pytest
from commands import RIGHT, one_line_each

import pipelab
from pipelab.cli.app import docs
from pipelab.draw import wording
from pipelab.errors import UsageError


def test_schedules_are_listed_with_their_sources(succeeds):
    output = succeeds("schedules")
    for name, kind in pipelab.schedules.items():
        assert name in output
        assert kind.source.split()[0] in output
    assert "bubble (P - 1) / (v * M + P - 1) if M >= P" in " ".join(output.split())
    assert "v stages per rank" in output


def test_a_students_file_is_checked_simulated_and_drawn(succeeds, folder):
    Path("mine.py").write_text(RIGHT)
    succeeds("check", "mine.py:MySchedule")
    assert "A step takes 9 units" in succeeds("simulate", "mine.py:MySchedule", "-r", "2", "-m", "2", "-o", "t.json")
    assert pipelab.Trace.load("t.json").makespan == 9
    output = succeeds("draw", "mine.py:MySchedule", "-o", "t.svg", "-o", "t.html", "-o", "t.txt")
    assert all(Path(f"t.{suffix}").stat().st_size > 500 for suffix in ("svg", "html", "txt"))
    assert output.count("wrote ") == 3


@pytest.mark.parametrize("line", ["pipelab.Pipeline", "main()"])
def test_without_pytorch_what_needs_it_says_so(line):
    code = f"import sys; sys.modules['torch'] = None; import pipelab; from pipelab.cli.app import main; {line}"
    done = subprocess.run([sys.executable, "-c", code, "run", "1f1b"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "torch>=2.12"' in done.stderr
    assert ("Traceback" in done.stderr) == (line != "main()")
    assert ("pipelab run 1f1b: " in done.stderr) == (line == "main()")


def test_the_documentation_is_served_to_this_machine_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(pipelab, "__file__", str(tmp_path / "pipelab" / "__init__.py"))
    with pytest.raises(UsageError, match="make site"):
        docs(0, browser=False)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("pipelab, explained")
    opened = queue.Queue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    Thread(target=docs, args=(0, True), daemon=True).start()
    address = opened.get(timeout=60)
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address, timeout=60) as page:  # noqa: S310 - this machine's own
        assert page.read() == b"pipelab, explained"


def test_a_memory_cap_is_a_fault_like_any_other(succeeds, refused):
    succeeds("check", "1f1b", "--memory-cap", "4")
    assert "memory-cap" in refused("check", "gpipe", "--memory-cap", "4")


def test_transfers_that_hang_are_a_fault_and_others_take_their_time(pipelab_command, succeeds, refused, tmp_path):
    error = refused("check", "1f1b", "--order", "at-use", "--transport", "rank")
    assert "transfer-deadlock" in error
    assert "3SEND_B0" in error
    succeeds("check", "1f1b", "--transport", "rank")
    low = pipelab.lower(pipelab.OneFOneB(2, 4), order="at-use").to_csv(tmp_path / "rows.csv")
    assert "its sends and receives hang: rank, pair" in succeeds("check", str(low))
    assert "0SEND_F1 (rank 0) has to meet 1RECV_F1" in refused("check", str(low), "--transport", "rank")
    sweep = ("compare", "interleaved-1f1b", "-r", "8", "-m", "16,32")
    assert succeeds(*sweep) != succeeds(*sweep, "--transport", "rank")
    assert "33.5 units" in succeeds("compare", "1f1b", "interleaved-1f1b", "--transport", "rank")
    output = succeeds("simulate", "interleaved-1f1b", "--transport", "rank")
    assert "Idle behind other transfers: 0 6 2.5 0" in output
    code, _, error = pipelab_command("simulate", "1f1b", "--order", "nccl")
    assert (code, "by-time" in error) == (2, True)


def test_the_best_order_is_shown_saved_and_said_to_be_proven(succeeds, refused, folder):
    output = succeeds("optimum", "1f1b", "--memory-cap", "3", "-o", "best.csv", "-o", "best.json")
    assert "A step takes 39 units" in output
    assert "proven" in output
    assert pipelab.check(pipelab.Plan.from_csv("best.csv"), memory_cap=3) == []
    assert pipelab.Trace.load("best.json").makespan == 39
    assert "2 or more" in refused("optimum", "zbv", "--memory-cap", "1")


def test_an_order_that_is_not_proven_comes_with_its_distance_from_the_bound(succeeds):
    sizes = ("-m", "12", "--latency", "0.7", "--memory-cap", "3", "--seconds", "0.001")
    output = succeeds("optimum", "zb-h1", *sizes)
    assert re.search(r"at least \S+ units, and this one at most \S+ % more", " ".join(output.split()))


def test_compare_shows_how_far_each_schedule_is_above_the_bound(pipelab_command, succeeds):
    assert "163.6 %" in succeeds("compare", "1f1b", "delayed", "--bound")
    assert pipelab_command("compare", "1f1b", "--bound", "-m", "2,4")[0] == 1


def test_compare_says_why_the_second_of_two_takes_longer(succeeds, folder):
    pipelab.simulate(pipelab.OneFOneB(4, 8)).save("one.json")
    output = succeeds("compare", "one.json", "1f1b", "-f", "1.5", "--diff", "-o", "x.csv", "-o", "x.html")
    assert "1f1b is 5.5 units longer than one.json (38.5 instead of 33 units): +5.5 durations" in " ".join(
        output.split()
    )
    assert len(Path("x.csv").read_text(encoding="utf-8").splitlines()) == 65
    assert '"view":"diff"' in Path("x.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command", ["1f1b", "1f1b gpipe naive", "1f1b gpipe -m 2,4", "1f1b gpipe --bound", "1f1b zb-h1"]
)
def test_what_has_no_two_traces_of_the_same_actions_has_no_difference(pipelab_command, command):
    code, output, error = pipelab_command("compare", *command.split(), "--diff")
    assert (code, output) == (1, "")
    assert "--diff needs two" in error or "other actions" in error


def test_compare_lays_schedules_side_by_side(succeeds, folder):
    output = succeeds("compare", "gpipe", "1f1b", "delayed", "-o", "c.html", "-o", "c.svg")
    assert "87 units" in output
    assert output.count("A step takes 33 units") == 2
    assert Path("c.html").exists()
    assert Path("c.svg").exists()


def test_one_of_each_is_no_plural(succeeds):
    assert "goes through its only stage once forward" in succeeds("check", "gpipe", "-r", "1", "-m", "1")
    assert "1 rank x 3 = 3" in succeeds("why", "gpipe", "-r", "1", "-m", "1")


def test_a_pipeline_is_replicated(succeeds, folder):
    output = succeeds("check", "1f1b", "-r", "2", "-m", "4", "--replicas", "3")
    assert "replicate(OneFOneB(ranks=2, microbatches=4), 3) is right: 54 actions" in output
    assert "all-reduced: 0, 1" in output
    output = succeeds("simulate", "1f1b", "--replicas", "2", "--cost", "all_reduce=4")
    assert "A step takes 37 units" in output
    succeeds("draw", "1f1b", "--replicas", "2", "-o", "t.svg")
    assert succeeds("compare", "1f1b", "gpipe", "--replicas", "2").count("rank 7") == 2
    pipelab.OneFOneB(2, 3).plan().to_csv("plan.csv")
    assert "rank 3" in succeeds("simulate", "plan.csv", "--replicas", "2")


def test_a_policy_is_set_by_name(succeeds, refused):
    settings = ("--set", "priority=forward-first", "--set", "memory_cap=[3, 2]", "--set", "split=True")
    first, _, _ = succeeds("simulate", "greedy", "-r", "2", "-m", "4", *settings).partition("\n")
    assert "priority='forward-first', memory_cap=(3, 2), split=True" in first
    assert "expected 'backward-first'" in refused("check", "greedy", "--set", "priority=fast")
    assert "memory_cap='many': expected a whole" in refused("check", "greedy", "--set", "memory_cap=many")


@pytest.mark.parametrize("command", ["check", "simulate", "compare", "draw -o timeline.svg", "run"])
def test_a_size_that_would_fill_the_memory_is_refused_at_once(refused, folder, command):
    error = refused(*command.split(), "gpipe", "-m", "10000000000")
    assert "microbatches=10000000000: expected a whole number, at most 4194304" in error


@pytest.mark.parametrize(
    ("options", "makespan"),
    [
        ("naive -r 2 -m 1 -f 50 -b 80 --unit ms", "260 ms"),
        ("naive -r 2 -m 1 --latency 10", "26 units"),
        ("naive -r 2 -m 1 --cost 'forward=[1, 3]' --cost per=stage --latency 1", "10 units"),
        ("naive -m 1 --cost \"links={'ranks_per_node': 2, 'inside': (0.5, None), 'between': (2, None)}\"", "18 units"),
        ("gpipe -r 2 -m 4 --latency 0.5 --cost sender=busy", "19 units"),
    ],
)
def test_costs_reach_the_simulation(succeeds, options, makespan):
    assert f"A step takes {makespan}" in succeeds("simulate", *shlex.split(options))


@pytest.mark.parametrize(
    ("cost", "words"),
    [("speed=3", "--cost speed: there is no such cost\n  --cost takes: forward"), ("forward=-3", "CostError")],
)
def test_what_is_no_cost_is_refused(refused, cost, words):
    assert words in refused("simulate", "naive", "--cost", cost)


@pytest.mark.parametrize("command", ["", "schedules", "check", "simulate", "draw", "compare", "run", "demo"])
def test_help_fits_eighty_columns_and_says_every_default(succeeds, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    output = succeeds(*command.split(), "--help")
    assert 60 < max(map(len, output.splitlines())) <= 80
    if "--ranks" in output:
        told = " ".join(output.replace("│", " ").split())
        assert "workers of the pipeline; by default 4 (run without --emulate: 2)" in told


ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "docs/command.md")]


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "docs/teach/slides.md"], ids=lambda path: path.name)
def test_what_the_documents_show_is_what_the_command_prints(pipelab_command, folder, document):
    (mine,) = re.findall(r"In `my_file.py`.*?```python\n(.*?)```", DOCUMENTS[0].read_text(encoding="utf-8"), re.DOTALL)
    Path("my_file.py").write_text(mine)
    shown = re.findall(r"```console\n\$ pipelab (.*)\n((?:.*\n)+?)```", document.read_text(encoding="utf-8"))
    assert shown
    for command, printed in shown:
        _, output, error = pipelab_command(*command.split())
        assert (output + error).strip() == printed.strip()


def test_every_heading_of_a_table_is_explained():
    explained = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    name, *heads = wording.table(pipelab.compare(pipelab.ZBH2(4, 8)))[0]
    assert "step time" in heads
    for head in heads:
        assert f"\n| {head} |" in explained, f"{head}, beside {name}"


def test_the_command_is_installed_and_tells_its_version():
    found = subprocess.run([sys.executable, "-m", "pipelab", "--version"], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == pipelab.__version__
    assert found.returncode == 0


def test_schedules_that_do_other_work_than_others_are_not_compared_without_a_word(succeeds):
    uneven = ("--cost", "weight_grad=0.6", "--cost", "input_grad=1")
    told = " ".join(succeeds("compare", "1f1b", "zb-h1", *uneven).split())
    assert told.startswith("Not the same work: I and W take 0.8 times as long as B")
    for same in (("1f1b", "gpipe"), ("zb-h1", "zb-h2"), ("1f1b", "zb-h1", "-b", "1.6")):
        assert "Not the same work" not in succeeds("compare", *same, *uneven)


def test_a_warning_is_printed_without_the_line_of_code_that_gave_it():
    code = "import warnings; from pipelab.cli import app; app.app = lambda: warnings.warn('noisy'); app.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == "warning: noisy\n"


def test_every_command_is_one_line_of_the_help(succeeds, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert one_line_each(succeeds("--help")) > 15


OTHERS = """
import typer
def hello(name: str):
    typer.echo(f"hello {name}")
def check():
    typer.echo("not pipelab's check")
def odd(name: int | str): ...
number = 3
group = typer.Typer()
group.command("hello")(hello)
group.command("check")(check)
"""


def test_other_packages_add_commands_and_one_that_is_broken_is_left_out(tmp_path):
    (tmp_path / "others.py").write_text(OTHERS)
    (tmp_path / "others-1.dist-info").mkdir()
    (tmp_path / "others-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    values = ["hello", "check", "group", "number", "odd", "missing"]
    lines = ["[pipelab.commands]", *(f"{name} = others:{name}" for name in values), "lost = nowhere:lost"]
    (tmp_path / "others-1.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))

    def run(*words):
        command = [sys.executable, "-m", "pipelab", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": paths}
        )
        return done.stdout, done.stderr

    assert run("hello", "ada")[0] == run("group", "hello", "ada")[0] == "hello ada\n"
    output, error = run("check", "gpipe")
    assert "no fault" in output
    broken = re.findall(r"^the command (\w+) is left out: ", error, re.MULTILINE)
    assert sorted(broken) == ["lost", "missing", "number", "odd"]


@pytest.mark.parametrize("others", ["", "--graph -o x.svg", "-o x.csv", "-o x.html"])
def test_a_width_without_a_figure_is_refused(refused, folder, others):
    assert "only figures have one" in refused("draw", "1f1b", "--width", "3.25", *others.split())
    assert not list(Path().glob("x.*"))


@pytest.mark.parametrize("others", ["", "--diff -o x.pdf", "-m 2,4 -o x.csv", "-o x.html"])
def test_a_width_of_a_comparison_without_a_figure_is_refused(refused, folder, others):
    assert "only figures have one" in refused("compare", "gpipe", "1f1b", "--width", "column", *others.split())


def test_a_comparison_is_as_wide_as_a_papers_column(succeeds, folder):
    succeeds("compare", "gpipe", "1f1b", "--width", "column", "-o", "x.svg")
    assert 'width="234pt"' in Path("x.svg").read_text(encoding="utf-8")  # 3.25 inches


def test_megatron_prints_what_the_page_shows(succeeds):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "layouts.md").read_text(encoding="utf-8")
    command, table = re.search(r"\$ pipelab (megatron .*)\n((?:.+\n)+?)```", page).groups()
    output = succeeds(*shlex.split(command))
    assert [line.split() for line in output.split("\n") if line] == [line.split() for line in table.splitlines()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--time t=1", "give the layers"),
        ("--layout Et|tL --decoders 3 --time t=1", "give the layers"),
        ("--layout Et|tL --mtp 1 --time t=1", "give the layers"),
        ("--decoders 3 --time t", "such as --time t=1"),
        ("--decoders 3 --time L=abc", "time L='abc'"),
    ],
)
def test_megatron_refuses_layers_or_times_that_are_missing_or_double(refused, words, told):
    assert told in refused("megatron", "1f1b", "-r", "2", "-m", "4", *words.split())


def test_frontier_prints_blocks_beside_schedules_and_writes_the_picture(pipelab_command, succeeds, tmp_path):
    output = succeeds("frontier", "-r", "2", "-m", "4", "-o", str(tmp_path / "curve.svg"))
    assert "speeds 1 1 1 1" in output
    assert "zbv" in output
    assert "ZB-V" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert pipelab_command("frontier", "-o", "curve.pdf")[0] == 1


def test_layout_ranks_what_fits_and_says_where_the_quickest_ones_step_goes(succeeds, refused, tmp_path):
    model, table = tmp_path / "model.toml", tmp_path / "layouts.csv"
    model.write_text("layers = 8\nhidden = 1024\nheads = 8\nffn = 4096\nvocab = 32000\nsequence = 4096\n")
    given = ("layout", str(model), "--gpus", "2", "--batch", "4", "--top", "3", "--memory")
    output = succeeds(*given, "16", "-o", str(table))
    rows = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 3
    assert [float(row["seconds"]) for row in rows] == sorted(float(row["seconds"]) for row in rows)
    assert re.search(rf"the step +{float(rows[0]['seconds']):.3f} +100", output)
    assert list(rows[0])[:5] == ["tensor", "context", "expert", "replicas", "pipeline"]
    assert "of 2 h100" in output
    columns = next(line for line in output.splitlines() if line.startswith("TP"))
    text = " ".join(succeeds("layout", "--help").split())
    assert all(f"{word} (" in text or f"{word}," in text for word in columns.split()[:5])
    assert all(f"{word} (" in text for word in ("v", "M", "b"))
    assert all(f"{word}:" in text for word in ("Above bound", "MFU", "GB", "Sent", "Head", "Waiting", "One backward"))
    assert "0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too" in text
    assert "the smallest that was found needs" in refused(*given, "0.1")
