"""Actions and pairs: PyTorch's notation, there and back."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Action, B, F, I, Pair, R, W
from pipelab.errors import FormatError
from pipelab.plan.actions import parse_item

numbers = st.integers(0, 10**6)
stages = st.none() | numbers
legal = st.builds(Action, st.sampled_from("FBIW"), numbers, stages) | st.builds(R, stages)


@given(legal)
def test_the_notation_reads_back_as_the_action(action):
    assert Action.parse(str(action)) == action
    assert repr(action) == str(action)


@given(st.builds(F, numbers, stages), st.builds(B, numbers, stages))
def test_the_notation_of_a_pair_reads_back_as_the_pair(forward, backward):
    pair = forward & backward
    assert parse_item(str(pair), "here") == pair
    assert (pair.forward, pair.backward) == (forward, backward)


@pytest.mark.parametrize(
    ("action", "text", "word"),
    [
        (F(0, stage=2), "2F0", "forward"),
        (B(1, stage=0), "0B1", "backward"),
        (I(12), "I12", "input gradient"),
        (W(3, 4), "4W3", "weight gradient"),
        (R(2), "2R", "all-reduce"),
        (R(), "R", "all-reduce"),
    ],
)
def test_an_action_is_written_as_pytorch_writes_it(action, text, word):
    assert str(action) == text
    assert Action.parse(f" {text} ") == action
    assert action.word == word


def test_a_pair_is_written_as_pytorch_writes_it():
    assert str(F(3, stage=0) & B(1, stage=3)) == "(0F3;3B1)OVERLAP_F_B"


@pytest.mark.parametrize(("text", "action"), [("2REDUCE_GRAD", R(2)), (" REDUCE_GRAD ", R())])
def test_pytorchs_whole_word_for_an_all_reduce_is_read_too(text, action):
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F-1", "2R1", "0f0", "X0", "0F0 0F1", "F1.0", "0.5F1", "-1F0", "0F\u0663"]
)
def test_anything_else_is_no_action(text):
    with pytest.raises(FormatError, match=r"is not an action: expected \[stage\]kind\[micro-batch\], such as 2F0"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("0f0", "try: '0F0', in capital letters"),
        ("0SEND_B1", "try: leave it out: it belongs to PyTorch's compute_comms format"),
        ("1RECV_F3", "try: leave it out: it belongs to PyTorch's compute_comms format"),
    ],
)
def test_what_is_nearly_an_action_is_told_what_to_write(text, advice):
    with pytest.raises(FormatError, match=rf"is not an action: .* or 2R\n  {advice}"):
        Action.parse(text)


@pytest.mark.parametrize("text", ["0F" + "9" * 5000, "0f" + "9" * 4000, "9" * 5000 + "R", "F" * 5000])
def test_a_number_that_python_does_not_read_is_told_in_few_words(text):
    with pytest.raises(FormatError, match="is not an action") as refusal:
        Action.parse(text)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "text",
    ["(0F0;0B0)", "(0F0)OVERLAP_F_B", "(0B0;0F0)OVERLAP_F_B", "(0F0;0F1)OVERLAP_F_B", "0F0;0B0", "()OVERLAP_F_B"],
)
def test_anything_else_is_no_pair(text):
    with pytest.raises(FormatError, match=r"^line 3: "):
        parse_item(text, "line 3")


@pytest.mark.parametrize("halves", [(B(0), F(0)), (F(0), F(1)), (F(0), I(0)), (F(0), None), ("F0", "B0"), (R(), B(0))])
def test_a_pair_is_a_forward_then_a_backward(halves):
    with pytest.raises(FormatError, match=r"an overlapped pair is a forward, then a backward: F\(3\) & B\(1\)"):
        Pair(*halves)


def test_an_action_joins_with_actions_only():
    with pytest.raises(TypeError):
        F(0) & 3
    with pytest.raises(TypeError):
        F(0) & B(0) & B(1)
    with pytest.raises(FormatError):
        B(0) & F(0)


def test_an_action_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        F(0).stage = 1


def test_an_action_is_no_tuple_and_equals_its_like_only():
    assert F(0) == F(0)
    assert len({F(0), F(0), F(0, 0), F(1), B(0)}) == 4
    assert F(0) != ("F", 0, None)


def test_a_slip_in_the_type_is_kept_for_check_to_explain():
    assert type(F(1).microbatch) is int
    assert type(F(1.0).microbatch) is float
    assert type(F(microbatch=True).microbatch) is bool


@pytest.mark.parametrize("kind", [F, B, I, W])
def test_whole_numbers_of_other_libraries_are_whole_numbers(kind):
    for number in (np.int64(2), np.arange(3)[2]):
        assert kind(number, number) == kind(2, 2)
        assert {type(each) for each in (kind(number, number).microbatch, R(number).stage)} == {int}
    kept = [kind(number).microbatch for number in (np.float64(2), True, "2")]
    assert [type(each).__name__ for each in kept] == ["float64", "bool", "str"]


def test_whole_numbers_in_tensors_are_whole_numbers():
    torch = pytest.importorskip("torch")
    assert type(F(torch.tensor(2)).microbatch) is type(R(torch.tensor(2)).stage) is int
    assert type(F(torch.tensor(2.0)).microbatch) is torch.Tensor


def test_actions_cross_processes():
    assert pickle.loads(pickle.dumps([F(0, 1), F(0) & B(0)])) == [F(0, 1), F(0) & B(0)]  # noqa: S301 - made here
