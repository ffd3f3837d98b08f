"""Plans: written, read, compared, bound to stages, and turned into a graph."""

from __future__ import annotations

import re
from itertools import pairwise

import networkx as nx
import oracle
import pytest
from hypothesis import given
from strategies import catalogue_plans, legal_cases

import pipelab
from pipelab import Action, B, F, I, Plan, R, W, check
from pipelab.errors import FormatError, UsageError

# Text and CSV


def text(plan):
    return [" ".join(map(str, row)) for row in plan.rows]


@given(legal_cases())
def test_a_plan_reads_back_from_its_own_text(case):
    plan = Plan(case.rows, case.stages, case.microbatches)
    parsed = Plan.parse(text(plan))
    assert Plan(parsed.written, case.stages, case.microbatches) == plan


@given(case=legal_cases())
@pytest.mark.filterwarnings("ignore:the last stage.s forwards run in the order")
def test_a_plan_reads_back_from_its_csv(tmp_path_factory, case):
    plan = Plan(case.rows, case.stages, case.microbatches)
    path = tmp_path_factory.mktemp("plan") / "plan.csv"
    assert plan.to_csv(path) == path
    read = Plan.from_csv(path)
    assert read.rows == plan.rows
    assert read.ranks == plan.ranks
    assert read.name == "plan.csv"


def test_the_csv_is_pytorchs_with_its_own_word_for_an_all_reduce(tmp_path):
    plan = Plan([[F(0), F(1) & B(0), I(1), W(1)], [F(0, 1), B(0, 1), F(1, 1), B(1, 1)]])
    written = plan.to_csv(tmp_path / "plan.csv").read_text()
    assert written.splitlines() == ["0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1", "1F0,1B0,1F1,1B1"]
    plan = pipelab.DualPipe(2, 4).plan()
    written = plan.to_csv(tmp_path / "plan.csv").read_text()
    assert [line.split(",")[-1] for line in written.splitlines()] == ["0REDUCE_GRAD", "0REDUCE_GRAD"]
    assert Plan.from_csv(tmp_path / "plan.csv") == read(tmp_path, written.replace("REDUCE_GRAD", "R")) == plan


def read(folder, content):
    """Return the plan of a file with this content, text or bytes."""
    path = folder / "plan.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Plan.from_csv(path)


@pytest.mark.parametrize(
    ("content", "plan"),
    [
        ("0F0,, 0B0 ,\n,1F0,1B0\n", "0F0 0B0; 1F0 1B0"),
        *((f"0F0,0B0\n{idle}\n", "0F0 0B0; rank 1 |") for idle in ('""', ",", ",,,")),
        *((f"0F0,0B0\n1F0,1B0{end}", "0F0 0B0; 1F0 1B0") for end in ("", "\n", "\n\n", "\r\n\r\n \r\n", "\n\t\n")),
        (b"\xef\xbb\xbf0F0,0B0\r\n", "0F0 0B0"),  # the mark that spreadsheets begin a file with
        ("0F0 0F1 0B0 0B1\n1F0 1B0  1F1,1B1\n", "0F0 0F1 0B0 0B1; 1F0 1B0 1F1 1B1"),
        ("rank 0 | 0F0 0B0\nrank 1 | 1F0 1B0\n", "0F0 0B0; 1F0 1B0"),
        ("(0F1;0B0)OVERLAP_F_B\n", "(0F1;0B0)OVERLAP_F_B"),
        ("0F0,0F1 , 0B0\t0B1", "0F0 0F1 0B0 0B1"),
    ],
)
def test_a_file_is_read_as_spreadsheets_and_print_write_it(tmp_path, content, plan):
    assert read(tmp_path, content) == Plan.parse(plan)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("0F0,0B0\n\n1F0,1B0\n", r'line 2 is empty.*\n.*"" for a rank without actions'),
        ("0F0,0B0\n \n\n1F0,1B0\n", r'line 2 is empty.*\n.*"" for a rank without actions'),
        ("0F0,é0B0\n".encode("latin-1"), "is not text in UTF-8"),
        ("0F0,0B0\n".encode("utf-16"), "is not text in UTF-8"),
        ("0F0,0B0\n" + "9" * 200_000, "line 2: field larger than field limit"),
        ("0F0,0B0\n1F0,,oops\n", "line 2, column 3: 'oops' is not an action"),
        ("0F0 0B0\n1F0, 1B0 1F1 oops\n", "line 2, column 2, word 3: 'oops' is not an action"),
        ("rank 0 | 0F0 0B0\nrank 0 | 1F0 1B0\n", "line 2 says rank 0, but it is the row of rank 1"),
        *(
            (content, r"line 1: its cells are separated by semicolons\n  try: save it with")
            for content in ("0F0;0B0\n1F0;1B0\n", "0F0;;0B0\n", "0f0;0b0\n", "(0F0;0B1)OVERLAP_F_B;0W0\n")
        ),
    ],
)
def test_what_is_no_plan_in_a_file_is_told_with_its_place(tmp_path, content, told):
    with pytest.raises(FormatError, match=rf"plan\.csv,? {told}"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["0F0 0B0", "1F0, 1B0 1X0"], r"^rank 1, position 2: '1X0' is not an action: expected"),
        ("0F0 0B0; 1F0 oops", r"^rank 1, position 1: 'oops' is not an action"),
        ("rank 1 | 1F0 1B0; rank 0 | 0F0 0B0", r"^row 0 says rank 1"),
    ],
)
def test_what_is_no_plan_in_a_text_is_told_with_its_place(rows, told):
    with pytest.raises(FormatError, match=told):
        Plan.parse(rows)


@pytest.mark.parametrize("idle", [{0}, {1}, {2}, {1, 2}, {0, 1, 2}])
def test_a_rank_without_actions_reads_back_wherever_it_is(tmp_path, idle):
    plan = Plan([[] if rank in idle else [F(0, rank), B(0, rank)] for rank in range(3)], 3, 1)
    assert Plan.from_csv(plan.to_csv(tmp_path / "plan.csv")).rows == plan.rows


@pytest.mark.parametrize("item", [F("1", 0), F(1, "0"), "F0"])
def test_a_plan_that_holds_anything_is_written(tmp_path, item):
    assert Plan([[F(0, 0), item]]).to_csv(tmp_path / "plan.csv").read_text().startswith("0F0,")


@given(catalogue_plans())
def test_a_plan_reads_back_from_what_print_shows_if_that_is_all_of_it(plan):
    if "…" not in str(plan):
        for shown in (str(plan), str(plan).replace("\n", "; ")):
            assert Plan(Plan.parse(shown).written, after=plan.after) == plan  # a text has no slices
    else:
        with pytest.raises(FormatError, match=r"'…' is not an action[^\n]*\n  try: Plan\.to_csv"):
            Plan.parse(str(plan))


def test_one_text_has_a_rank_on_each_line_or_between_semicolons():
    plan = Plan([[F(0, 0), F(1, 0) & B(0, 0), B(1, 0)], [F(0, 1), B(0, 1), F(1, 1), B(1, 1)], []], 2, 2)
    for text in (
        "0F0 (0F1;0B0)OVERLAP_F_B 0B1; 1F0 1B0 1F1 1B1; rank 2 |",
        '\n 0F0, (0F1 ; 0B0)OVERLAP_F_B 0B1\n\n1F0 1B0 1F1 1B1 ;\n""\n',
        "rank 0 | 0F0 (0F1;0B0)OVERLAP_F_B 0B1\nrank 1 | 1F0 1B0 1F1 1B1\nrank 2 |\n",
    ):
        assert Plan.parse(text) == plan, text


def test_a_plan_prints_one_line_per_rank_and_leaves_out_the_middle_of_long_ones():
    assert str(Plan.parse(["0F0 0B0", "1F0 1B0"])) == "rank 0 | 0F0 0B0\nrank 1 | 1F0 1B0"
    (line,) = str(pipelab.GPipe(1, 100).plan()).splitlines()
    assert "… 176 more …" in line
    assert line.endswith("0B98 0B99")
    assert len(line) < 150


# What a plan is


def test_rows_are_bound_to_stages_and_cannot_be_changed():
    row = [F(0), B(0)]
    plan = Plan([row], 1, 1)
    row.append(F(0))
    assert plan.rows == ((F(0, 0), B(0, 0)),)
    assert plan.written == ((F(0), B(0)),)
    assert isinstance(plan.rows, tuple)
    assert isinstance(plan.rows[0], tuple)
    with pytest.raises(AttributeError):
        plan.stages = 3


def test_a_row_may_be_any_iterable():
    rows = ((each for each in [F(0), B(0)]), iter((F(0), B(0))))
    assert Plan(rows) == Plan([[F(0), B(0)], [F(0), B(0)]])


def test_plans_are_equal_if_sizes_and_bound_rows_are():
    plan = Plan([[F(0), B(0)]])
    assert plan == Plan.parse(["0F0 0B0"], name="another name")
    assert hash(plan) == hash(Plan.parse(["0F0 0B0"]))
    assert plan != Plan([[F(0), B(0)]], stages=2)
    assert plan != Plan([[F(0), B(0)]], microbatches=2)
    assert plan != Plan([[B(0), F(0)]])
    assert plan != Plan([[F(0), B(0)], []], 1, 1)
    assert Plan([[F(0)], [B(0)]], 1, 1) != Plan([[F(0)], [B(0)]], 1, 1, place=lambda microbatch, stage: 1)
    assert plan != plan.rows


def test_a_plan_shows_its_sizes_which_are_those_given():
    plan = Plan([[F(0), B(0)]])
    assert repr(plan) == plan.name == "Plan(ranks=1, stages=1, microbatches=1)"
    assert Plan([[F(0)]], name="mine").name == "mine"
    given = Plan([[F(7, 7)]], stages=2, microbatches=3)
    assert (given.stages, given.microbatches) == (2, 3)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([[F(0), B(0)], [F(0), B(0)]], (2, 1)),
        ([[F(0, 0), F(2, 3)]], (4, 3)),
        ([[F(1)], [], []], (3, 2)),
        ([[F(0, 1)], [F(0)], [F(0)]], (3, 1)),
        ([[F(4, 5) & B(6, 1)]], (6, 7)),
        ([[R(2)]], (3, 1)),
        ([[], []], (2, 1)),
        ([], (1, 1)),
        ([["junk"]], (1, 1)),
        ([[Action("F", -1, -1), Action("F", "x", "y")]], (1, 1)),
    ],
)
def test_sizes_are_those_that_the_rows_name(rows, sizes):
    plan = Plan(rows)
    assert (plan.stages, plan.microbatches) == sizes


@pytest.mark.parametrize("size", [0, -2, 1.5, "2", True])
@pytest.mark.parametrize("which", ["stages", "microbatches"])
def test_a_size_that_is_no_positive_whole_number_is_refused(which, size):
    with pytest.raises(UsageError, match=f"{which}={size!r}"):
        Plan([[F(0)]], **{which: size})


@pytest.mark.parametrize("slip", [F(10**9), F(10**9, 0), F(0, 10**9), R(10**9), F(10**30), F(10**9) & B(10**9)])
def test_a_giant_slip_is_told_and_takes_no_memory(slip):
    plan = Plan([[F(0), F(1), B(0), B(1), slip], [F(0), F(1), B(0), B(1)]])
    assert (plan.stages, plan.microbatches) == (2, 2)
    assert {fault.code for fault in check(plan)} == {"out-of-range"}


def test_a_faulty_plan_shows_what_cannot_be_bound_as_it_was_written():
    plan = Plan([["junk", F(0), F(9), F(0) & B(0), B(0)]], 1, 1)
    assert plan.rows == (("junk", F(0, 0), F(9), F(0) & B(0), B(0)),)
    assert Plan([[F(0), F(1) & B(0), B(1)]]).rows == ((F(0, 0), F(1, 0) & B(0, 0), B(1, 0)),)


def test_an_action_without_a_stage_gets_the_stage_that_its_rank_names_elsewhere():
    plan = Plan([[F(0, 1), B(0), R()], [F(0, 0) & B(1, 0), F(1), B(0)]], 2, 2)
    assert [str(item) for item in plan.rows[0]] == ["1F0", "1B0", "1R"]
    assert [str(item) for item in plan.rows[1]] == ["(0F0;0B1)OVERLAP_F_B", "0F1", "0B0"]
    (fault,) = [fault for fault in check(Plan([[F(0, 0), F(0, 1), B(0)]])) if fault.code == "ambiguous-stage"]
    assert fault.message == "B0 on rank 0 could mean stage 0 or 1"


# Replicas


def test_a_stage_on_several_ranks_is_replicated_and_one_that_nobody_runs_is_on_no_rank():
    plan = Plan.parse(["0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"])
    assert plan.replicas == {0: (0, 1), 1: (0, 1)}
    assert pipelab.GPipe(3, 2).plan().replicas == {0: (0,), 1: (1,), 2: (2,)}
    assert Plan([[F(0, 0)]], stages=2).replicas == {0: (0,), 1: ()}


# The graph


@given(legal_cases())
def test_the_graph_has_a_data_edge_for_every_need_and_an_order_edge_for_every_step(case):
    plan = Plan(case.rows, case.stages, case.microbatches)
    graph = plan.graph()
    flat = [[half for item in row for half in oracle.halves(item)] for row in plan.rows]
    assert set(graph) == {action for row in flat for action in row}
    giver_of = {value: action for row in flat for action in row for value in oracle.gives(action)}
    data = {
        (giver_of[value], action): "{}({}, {})".format(*value)
        for row in flat
        for action in row
        for value in oracle.needs(action, plan.stages, plan.microbatches)
    }
    order = {(before, after) for row in flat for before, after in pairwise(row)}
    assert set(graph.edges) == data.keys() | order
    for giver, needer, edge in graph.edges(data=True):
        assert edge.get("value") == data.get((giver, needer))
        assert edge["kind"] == ("data" if (giver, needer) in data else "order")
        if edge["kind"] == "data":
            assert edge.get("order", False) == ((giver, needer) in order)


@given(legal_cases())
def test_the_graph_of_a_legal_plan_has_no_cycle_and_that_of_a_deadlock_has_one(case):
    assert nx.is_directed_acyclic_graph(case.plan.graph())
    assert not nx.is_directed_acyclic_graph(Plan.parse("0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1").graph())


def test_opposite_orders_of_two_all_reduces_are_a_cycle_of_the_graph():
    graph = Plan.parse(["0F0 1F0 1B0 0B0 0R 1R", "0F1 1F1 1B1 0B1 1R 0R"]).graph()
    assert {R(0), R(1)} <= {node for cycle in nx.simple_cycles(graph) for node in cycle}


def test_the_graphs_nodes_know_their_ranks_and_an_all_reduce_is_one_node():
    graph = Plan.parse(["0F0 0B0 0R", "0F1 0B1 0R"]).graph()
    assert graph.nodes[F(1, 0)] == {"rank": 1}
    assert graph.nodes[R(0)] == {"ranks": (0, 1)}
    assert set(graph.predecessors(R(0))) == {B(0, 0), B(1, 0)}
    assert graph.edges[B(1, 0), R(0)] == {"kind": "data", "value": "gw(1, 0)", "order": True}


@pytest.mark.parametrize("rows", [["0F0 0B0", "1F0 1B0"], "0F0 0B0"])
def test_texts_where_actions_belong_are_told_to_parse(rows):
    with pytest.raises(FormatError, match=re.escape(f"Plan.parse({rows!r}) reads it")):
        Plan(rows)
