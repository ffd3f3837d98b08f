"""The ring all-reduce in one process: the mean, the messages, and replicas that are equal bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pipelab
from pipelab_course import ring_all_reduce
from pipelab_course.ring.codecs import CODECS

every_codec = pytest.mark.parametrize("codec", sorted(CODECS))
pytestmark = pytest.mark.torch
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def replicas(ranks, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def same_bits(tensors):
    bits = [each.view(BITS[each.element_size()]) for each in tensors]
    return all(torch.equal(each, bits[0]) for each in bits)


@every_codec
def test_four_replicas_that_hold_1_2_3_4_all_end_at_two_and_a_half(codec):
    result = ring_all_reduce([torch.full((120,), float(value)) for value in (1, 2, 3, 4)], codec)
    for tensor in result.tensors:
        torch.testing.assert_close(tensor, torch.full((120,), 2.5), rtol=1e-6, atol=0)
    assert same_bits(result.tensors)


@given(
    st.integers(1, 9), st.integers(0, 40), st.sampled_from(sorted(CODECS)), st.sampled_from(TYPES), st.integers(0, 99)
)
def test_all_replicas_end_equal_bit_for_bit_and_near_the_mean(ranks, size, codec, dtype, seed):
    tensors = replicas(ranks, size, dtype, seed)
    before = [each.clone() for each in tensors]
    result = ring_all_reduce(tensors, codec)
    assert all(each.dtype == dtype and each.shape == (size,) for each in result.tensors)
    assert same_bits(result.tensors)
    assert all(map(torch.equal, tensors, before))
    mean = torch.stack([each.double() for each in tensors]).mean(0)
    step = {"none": 0.0, "fp16": 2**-10, "bf16": 2**-7}.get(codec, 1 / 127) + torch.finfo(dtype).eps
    largest = sum(float(each.double().abs().max()) for each in tensors) if size else 0.0
    # each of the D messages of a chunk rounds a number no larger than the sum of the largest
    assert float((result.tensors[0].double() - mean).abs().sum()) <= size * 2 * step * largest + 1e-12


@every_codec
def test_each_rank_sends_its_share_of_twice_the_payload(codec):
    tensors = replicas(4, 120)
    result = ring_all_reduce(tensors, codec)
    size = {"none": 4, "fp16": 2, "bf16": 2}.get(codec, 1)
    scales = 4 * codec.startswith("int8")
    assert result.payload_bytes == 4 * (2 * 3 * 120 // 4) * size
    assert result.scale_bytes == 4 * 6 * scales
    assert result.bytes_per_rank == (2 * 3 * (30 * size + scales),) * 4


def test_the_bytes_are_those_of_the_messages():
    sent = []

    class Counting(type(CODECS["int8"])):
        def encode(self, values):
            message = super().encode(values)
            if values.any():
                sent.append(sum(each.nbytes for each in message))
            return message

    result = ring_all_reduce(replicas(3, 10), Counting())
    assert len(sent) == 3 * 3  # two partial sums and a mean from each rank; in the all-gather, messages are passed on
    assert result.payload_bytes + result.scale_bytes == sum(sent[:6]) + 2 * sum(sent[6:])


def test_every_message_goes_to_the_next_rank_and_holds_what_the_receiver_lacks():
    steps = ring_all_reduce(replicas(5, 12)).steps
    held = [[{rank} for _ in range(5)] for rank in range(5)]
    for number, sends in enumerate(steps):
        assert [send.sender for send in sends] == [0, 1, 2, 3, 4]
        for send in sends:
            assert send.receiver == (send.sender + 1) % 5
            assert held[send.sender][send.chunk] >= set(send.holds)
        for send in sends:
            chunk = held[send.receiver][send.chunk]
            if send.phase == "reduce-scatter":
                assert chunk.isdisjoint(send.holds)  # no replica is added twice
            else:
                assert send.holds == tuple(sorted(send.holds, key=lambda rank: (rank - send.chunk) % 5))
            chunk |= set(send.holds)
        assert (number < 4) == (sends[0].phase == "reduce-scatter")
    assert all(chunk == {0, 1, 2, 3, 4} for rank in held for chunk in rank)
    assert len(steps) == 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [0, 1, 3, 5, 16])
def test_chunks_differ_by_at_most_one_number(ranks, size):
    result = ring_all_reduce(replicas(ranks, size))
    assert sum(result.chunks) == size
    assert max(result.chunks) - min(result.chunks) <= 1
    torch.testing.assert_close(result.tensors[-1], torch.stack(replicas(ranks, size)).mean(0))


@every_codec
def test_tensors_of_any_shape_keep_it_and_what_is_empty_or_alone_costs_nothing(codec):
    shaped = [each.view(2, 3, 4).transpose(0, 2) for each in replicas(3, 24)]
    assert all(each.shape == (4, 3, 2) for each in ring_all_reduce(shaped, codec).tensors)
    single = ring_all_reduce([torch.tensor(2.0, requires_grad=True), torch.tensor(4.0)], codec).tensors
    assert [(each.shape, each.requires_grad) for each in single] == [((), False), ((), False)]
    assert single[0].item() == pytest.approx(3.0)
    (tensor,) = replicas(1, 9)
    alone = ring_all_reduce([tensor], codec)
    assert torch.equal(alone.tensors[0], tensor)
    assert (alone.steps, alone.payload_bytes, alone.scale_bytes) == ((), 0, 0)
    zeros = ring_all_reduce([torch.zeros(2)] * 4, codec)
    assert all(torch.equal(each, torch.zeros(2)) for each in zeros.tensors)
    empty = ring_all_reduce([torch.zeros(0, 3)] * 4, codec)
    assert (empty.payload_bytes, empty.scale_bytes, empty.tensors[3].shape) == (0, 0, (0, 3))


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_reach_every_replica(codec, bad):
    tensors = replicas(3, 9)
    tensors[1][4] = bad
    result = ring_all_reduce(tensors, codec)
    assert same_bits(result.tensors)
    found = result.tensors[0]
    chunk = slice(3, 6) if codec.startswith("int8") else slice(4, 5)
    expected = torch.tensor(float("nan") if codec.startswith("int8") else bad)
    torch.testing.assert_close(found[chunk], expected.expand(found[chunk].shape), equal_nan=True)
    rest = torch.cat([found[: chunk.start], found[chunk.stop :]])
    assert rest.isfinite().all()


def test_a_sum_that_is_too_large_for_fp16_is_infinity_on_every_replica():
    tensors = [torch.full((2,), 40000.0)] * 2
    assert [each.tolist() for each in ring_all_reduce(tensors, "fp16").tensors] == [[40000.0] * 2] * 2  # sums stay
    three = ring_all_reduce([*tensors, tensors[0]], "fp16")  # here a sum of two travels
    assert [each.tolist() for each in three.tensors] == [[float("inf")] * 2] * 3
    assert ring_all_reduce([*tensors, tensors[0]], "bf16").tensors[0].isfinite().all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e38])
def test_int8_survives_the_smallest_and_largest_numbers(size):
    found = ring_all_reduce([torch.full((4,), size)] * 2, "int8").tensors[0]
    assert found.isfinite().all()
    if size > 1e-44:
        torch.testing.assert_close(found, torch.full((4,), size), rtol=0.02, atol=0)


def test_with_feedback_nothing_is_lost_for_good():
    """What was sent and what is still to be sent add up to what there was."""
    feedback, means, given = None, torch.zeros(11, dtype=torch.float64), torch.zeros(11, dtype=torch.float64)
    for seed in range(20):
        tensors = replicas(4, 11, torch.float64, seed)
        result = ring_all_reduce(tensors, "int8-ef", feedback=feedback)
        feedback, means = result.feedback, means + result.tensors[0]
        given += torch.stack(tensors).sum(0)
    torch.testing.assert_close(4 * means + torch.stack(feedback).sum(0), given, rtol=0, atol=1e-12)
    assert any(each.any() for each in feedback)


def test_the_first_round_with_feedback_is_plain_int8_and_nan_is_not_fed_back():
    tensors = replicas(3, 10)
    assert torch.equal(ring_all_reduce(tensors, "int8-ef").tensors[0], ring_all_reduce(tensors, "int8").tensors[0])
    assert ring_all_reduce(tensors, "int8").feedback is None
    tensors[0][0] = float("nan")
    feedback = ring_all_reduce(tensors, "int8-ef").feedback
    assert ring_all_reduce(replicas(3, 10), "int8-ef", feedback=feedback).tensors[0].isfinite().all()


def test_a_codec_of_ones_own_may_have_several_scales():
    class Halves:
        feedback = False

        def encode(self, values):
            return (values.half(), values[:1].clone(), values[:1].clone())

        def decode(self, message, dtype):
            return message[0].to(dtype)

    result = ring_all_reduce(replicas(2, 6), Halves())
    assert (result.payload_bytes, result.scale_bytes) == (2 * 6 * 2, 2 * 2 * 8)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ring_all_reduce([]), "empty"),
        (lambda: ring_all_reduce([torch.zeros(2), torch.zeros(3)]), r"tensors\[1\] is float32 \[3\]"),
        (lambda: ring_all_reduce([torch.zeros(2), torch.zeros(2).half()]), r"tensors\[1\] is float16"),
        (lambda: ring_all_reduce([torch.zeros(2, dtype=torch.int64)]), "int64"),
        (lambda: ring_all_reduce([torch.zeros(2).to(torch.float8_e5m2)] * 2), "float8_e5m2"),
        (lambda: ring_all_reduce([torch.eye(2).to_sparse()] * 2), "to_dense"),
        (lambda: ring_all_reduce([torch.zeros(2)], "int4"), "none fp16 bf16 int8 int8-ef"),
        (lambda: ring_all_reduce([torch.zeros(2)], "int8", feedback=[torch.zeros(2)]), "int8-ef"),
        (lambda: ring_all_reduce([torch.zeros(2)], "int8-ef", feedback=[torch.zeros(3)]), "float32 \\[3\\]"),
        (lambda: ring_all_reduce(torch.zeros(2)), "init_process_group"),
        (lambda: ring_all_reduce([torch.zeros(2)], group=object()), "group="),
    ],
)
def test_what_has_no_mean_is_refused(call, told):
    with pytest.raises(pipelab.UsageError, match=told):
        call()


def test_the_steps_are_printed_and_drawn():
    result = ring_all_reduce(replicas(3, 7))
    lines = str(result).splitlines()
    assert len(lines) == 1 + 1 + 4 + 1
    assert " ".join(lines[3].split()) == "2 reduce-scatter chunk 2: 2+0 chunk 0: 0+1 chunk 1: 1+2"
    drawn = result.plot().axes[0]
    frames = [patch for patch in drawn.patches if not patch.get_fill()]
    assert len(frames) == 5 * 3 * 3
    assert sum(frame.get_linewidth() > 1 for frame in frames) == 3 + 6 + 9
    assert "nothing is sent" in str(ring_all_reduce(replicas(1, 7)))
    many = ring_all_reduce(replicas(70, 7))
    assert max(map(len, str(many).splitlines())) < 120
    with pytest.raises(pipelab.UsageError, match="70 ranks"):
        many.plot()
