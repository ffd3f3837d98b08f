"""Tables of results: what readers see, and what files hold."""

from __future__ import annotations

import csv
import io

import pytest

import pipelab
from pipelab.draw import wording

ROWS = [
    {"schedule": "a_b", "m": 2, "step": 30.0, "bubble": 0.5, "peaks": (2, 1)},
    {"schedule": "a_b", "m": 4, "step": 25.5, "bubble": 0.25, "peaks": (4, 3)},
    {"schedule": "c|<d>", "m": 2, "step": None, "bubble": 0.125, "peaks": ()},
]
COLUMNS = [
    pipelab.Column("schedule"),
    pipelab.Column("m"),
    pipelab.Column("step", "step, ms", wording.number),
    pipelab.Column("bubble", show=wording.percent),
]
LONG = pipelab.Table(ROWS, COLUMNS, axes=("m", ["step", "bubble"]), notes=["50 % is much."])
WIDE = pipelab.Table(ROWS, COLUMNS, across="m", axes=("m", ["step"]))


def test_values_of_one_key_become_columns_and_missing_ones_dashes():
    lines = [line.split() for line in str(WIDE).splitlines()]
    assert " ".join(lines[0]) == "step, ms m = 2 m = 4"
    assert lines[1:3] == [["a_b", "30", "25.5"], ["c|<d>", "-", "-"]]
    assert lines[5:] == [["a_b", "50.0", "%", "25.0", "%"], ["c|<d>", "12.5", "%", "-"]]


def test_a_csv_file_holds_all_values_in_full(tmp_path):
    with LONG.save(tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows[1] == {"schedule": "a_b", "m": "4", "step": "25.5", "bubble": "0.25", "peaks": "4 3"}
    assert rows[2]["step"] == rows[2]["peaks"] == ""


def test_what_a_row_marks_ends_in_a_star_for_readers_and_is_named_in_a_csv_file(tmp_path):
    table = pipelab.Table([ROWS[0] | {"marked": ("step", "bubble")}, ROWS[1]], COLUMNS)
    assert [line.split()[2:] for line in str(table).splitlines()[1:]] == [["30*", "50.0", "%*"], ["25.5", "25.0", "%"]]
    first, _ = csv.DictReader(table.save(tmp_path / "t.csv").read_text().splitlines())
    assert (first["step"], first["marked"]) == ("30.0", "step bubble")


def test_letters_with_a_meaning_are_escaped(tmp_path):
    assert r"c\|\<d>" in LONG.save(tmp_path / "t.md").read_text()
    assert "c|&lt;d&gt;" in LONG._repr_html_()
    assert LONG._repr_html_() in LONG.save(tmp_path / "t.html").read_text()
    assert "\x1b" not in str(pipelab.Table([{"name": "\x1b[31m"}], [pipelab.Column("name")]))


def test_words_are_set_flush_left_where_a_column_says_so(tmp_path):
    rows = [{"n": 1, "why": "a", "t": 3.0}, {"n": 22, "why": "because", "t": 10.0}]
    table = pipelab.Table(rows, [pipelab.Column("n"), pipelab.Column("why", left=True), pipelab.Column("t")])
    assert str(table).splitlines() == ["n   why         t", "1   a         3.0", "22  because  10.0"]
    assert "| --- | --- | --: |" in table.save(tmp_path / "t.md").read_text()


def test_a_plot_has_one_line_for_each_name_and_leaves_gaps_out():
    step, bubble = LONG.plot().axes
    assert [list(line.get_xdata()) for line in bubble.lines] == [[2, 4], [2]]
    assert [list(line.get_ydata()) for line in step.lines] == [[30.0, 25.5], []]
    first = pipelab.Table([{"n": 1, "t": 3.0}, {"n": 2, "t": 2.0}], [pipelab.Column("n")], axes=("n", ["t"]))
    assert [list(line.get_ydata()) for line in first.plot().axes[0].lines] == [[3.0, 2.0]]


def test_a_name_without_values_in_one_plot_leaves_the_plots_their_room():
    rows = [{"name": name, "n": n, "t": 1.0, "u": None if name == "a" else 2.0} for name in "ab" for n in (1, 2)]
    drawn = pipelab.Table(rows, [pipelab.Column("name")], axes=("n", ["t", "u"])).plot()
    drawn.savefig(io.BytesIO())
    assert all(ax.get_position().width > 0.3 for ax in drawn.axes)


@pytest.mark.parametrize("table", [pipelab.Table(ROWS, COLUMNS), pipelab.Table([], COLUMNS, axes=("m", ["step"]))])
def test_nothing_to_plot_is_refused_with_the_formats_left(table, tmp_path):
    with pytest.raises(pipelab.UsageError, match=r"\.csv"):
        table.save(tmp_path / "t.png")
    assert not (tmp_path / "t.png").exists()
    assert str(pipelab.Table([], COLUMNS, across="m", notes=["all refused"])) == "all refused"
