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
    assert str(pair) == f"({forward};{backward})OVERLAP_F_B"
    assert parse_item(str(pair), "here") == pickle.loads(pickle.dumps(pair)) == pair  # noqa: S301 - made here
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
    assert Action.parse(text.replace("R", "REDUCE_GRAD")) == action
    assert action.word == word
    assert pickle.loads(pickle.dumps(action)) == action  # noqa: S301 - made here


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        *((text, "") for text in ("", "F", "0F", "F-1", "2R1", "X0", "0F0 0F1", "F1.0", "0.5F1", "-1F0", "0F\u0663")),
        *((text, "") for text in ("0F" + "9" * 5000, "0f" + "9" * 4000, "9" * 5000 + "R", "F" * 5000)),
        ("0f0", "\n  try: '0F0', in capital letters"),
        ("0SEND_B1", "\n  try: Plan.parse or Plan.from_csv, which read whole rows, with their sends and receives"),
        ("1RECV_F3", "\n  try: Plan.parse or Plan.from_csv, which read whole rows, with their sends and receives"),
        ("2BW3", "\n  try: 2B3, and I for each B: PyTorch before 2.6 wrote BW for B, and B for I"),
    ],
)
def test_anything_else_is_no_action(text, advice):
    with pytest.raises(FormatError, match=r"is not an action: expected \[stage\]kind\[micro-batch\], such") as told:
        Action.parse(text)
    assert advice in str(told.value)
    assert len(str(told.value)) < 250


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


def test_an_action_is_a_value_and_no_tuple():
    with pytest.raises(dataclasses.FrozenInstanceError):
        F(0).stage = 1
    assert len({F(0), F(0), F(0, 0), F(1), B(0)}) == 4
    assert F(0) != ("F", 0, None)


@pytest.mark.parametrize("kind", [F, B, I, W])
def test_whole_numbers_of_other_libraries_are_whole_numbers_and_slips_are_kept_for_check(kind):
    for number in (np.int64(2), np.arange(3)[2]):
        assert kind(number, number) == kind(2, 2)
        assert {type(each) for each in (kind(number, number).microbatch, R(number).stage)} == {int}
    kept = [kind(number).microbatch for number in (1.0, np.float64(2), True, "2")]
    assert [type(each).__name__ for each in kept] == ["float", "float64", "bool", "str"]


def test_whole_numbers_in_tensors_are_whole_numbers():
    torch = pytest.importorskip("torch")
    assert type(F(torch.tensor(2)).microbatch) is type(R(torch.tensor(2)).stage) is int
    assert type(F(torch.tensor(2.0)).microbatch) is torch.Tensor
