"""A batch says how it is cut: the sequence first, parts that are whole, pieces that are ready; gradients stay plain."""

from __future__ import annotations

import warnings
from pipes import mse, refused, stepped, verified

import plain
import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import pipelab
from pipelab import GPipe, OneFOneB, Pipeline, Seq1F1B, microbatches, rows, whole
from pipelab.engine.stage.batch import counts_of, join, join_outputs, split_batch, ways_of
from pipelab.engine.stage.inputs import unmarked
from pipelab.engine.stage.pytree import map_tensors, take_apart
from pipelab.errors import BatchError, LossError, UsageError, VerificationError

# --- the pieces are PyTorch's


X, Y, MASK = torch.arange(70.0).reshape(7, 10), torch.arange(140.0).reshape(2, 7, 10), torch.ones(3, 3)

AS_PYTORCH = {
    "rows": (X, TensorChunkSpec(0)),
    "rows along dimension 1": (rows(Y, 1), TensorChunkSpec(1)),
    "rows along the second last dimension": (rows(Y, -2), TensorChunkSpec(-2)),
    "whole": (whole(MASK), _Replicate()),
    "no tensor": ("causal", _Replicate()),
    "a tree of all of them": (
        {"x": X, "parts": [rows(Y, dim=1), whole(MASK)], "more": (3, None)},
        {"x": TensorChunkSpec(0), "parts": [TensorChunkSpec(1), _Replicate()], "more": (_Replicate(), _Replicate())},
    ),
    "a tree that is whole": (
        {"x": X, "masks": whole({"causal": MASK, "others": (MASK, 3)})},
        {"x": TensorChunkSpec(0), "masks": {"causal": _Replicate(), "others": (_Replicate(), _Replicate())}},
    ),
}


@pytest.mark.parametrize("case", AS_PYTORCH)
@pytest.mark.parametrize("many", [1, 2, 3, 7])
def test_pieces_are_those_of_pytorchs_chunk_specs(case, many):
    value, spec = AS_PYTORCH[case]
    theirs, _ = split_args_kwargs_into_chunks((unmarked(value), X), None, many, (spec, TensorChunkSpec(0)))
    ours = split_batch((value, X), counts_of((value, X), "x", many, 0))
    assert len(ours) == len(theirs) == many
    for own, other in zip(ours, theirs, strict=True):
        (leaves, structure), (known, expected) = take_apart(own), take_apart(other)
        assert structure == expected
        for leaf, as_known in zip(leaves, known, strict=True):
            assert torch.equal(leaf, as_known) if isinstance(leaf, torch.Tensor) else leaf == as_known


def below(own):
    """Return a block mask of as many rows as lengths, each row's tokens looking back so far."""
    lengths = torch.tensor(own)
    return create_block_mask(
        lambda b, _, q, k: (q >= k) & (q - k < lengths[b]), len(own), None, 256, 256, device="cpu", BLOCK_SIZE=64
    )


def test_the_block_mask_of_flex_attention_is_cut_as_pytorch_does():
    mask = below([64, 128, 192, 256, 100])
    ours = split_batch({"x": torch.zeros(5), "mask": mask}, counts_of({"x": torch.zeros(5), "mask": mask}, "x", 2, 0))
    theirs = [piece for (piece,) in split_args_kwargs_into_chunks((mask,), None, 2)[0]]
    for piece, other in zip((each["mask"] for each in ours), theirs, strict=True):
        assert isinstance(piece, BlockMask)
        assert torch.equal(piece.to_dense(), other.to_dense())
    for_all = below([64])
    assert split_batch((torch.zeros(5), for_all), [3, 2])[1][1].shape == for_all.shape
    with pytest.raises(BatchError, match=r'x\["mask"\] \[5, 1, 4\] has 5'):
        counts_of({"x": torch.zeros(4), "mask": mask}, "x", 2, 0)
    with pytest.raises(BatchError, match=r"cut evenly\n  try: pipelab\.microbatches"):
        split_batch(mask, [4, 1])


# --- gradients are those of plain training on the whole batch


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x)[0]


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(0)[:, :5]


class Masked(nn.Module):
    """A layer of attention that hands its masks on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, given):
        made = self.layer(given["x"], src_mask=given["masks"][0], src_key_padding_mask=given["pad"])
        return given | {"x": made}


class Last(nn.Module):
    def forward(self, given):
        return given["x"]


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given):
        return given["mask"] @ self.linear(given["x"])


def first(*shape):
    """Return what a sequence-first layer takes: tokens, rows, width."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def encoder():
    return [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)]


CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
PAD = torch.zeros(6, 5).masked_fill(torch.arange(5) > torch.tensor([[4], [3], [2], [4], [3], [1]]), -torch.inf)
LABELS = torch.tensor([0, 3, 1, 4, 2, 2])

BATCHES = {  # `fuzz_inputs` draws many more
    "sequence first, as many tokens as rows": (encoder, first(6, 6, 8), first(6, 6, 8), mse, {"batch_dim": 1}),
    "a label for each row": (
        lambda: [Recurrent(), nn.Sequential(Recurrent(), Pooled())],
        first(4, 6, 8),
        rows(LABELS),
        nn.functional.cross_entropy,
        {"batch_dim": 1},
    ),
    "a mask with as many entries as rows": (
        lambda: [Mix(), nn.Linear(8, 8)],
        {"x": first(6, 6, 8), "mask": whole(torch.ones(6, 6).tril())},
        first(6, 6, 8),
        mse,
        {},
    ),
    "masks, deep down": (
        lambda: [Masked(), nn.Sequential(Masked(), Last())],
        {"x": first(6, 5, 8), "masks": [whole(CAUSAL), "causal"], "pad": PAD},
        first(6, 5, 8),
        mse,
        {},
    ),
    "pieces that are ready": (
        lambda: [Mix(), nn.Linear(8, 8)],
        microbatches([{"x": first(many, 5, 8), "mask": whole(torch.ones(5, 5).tril())} for many in (1, 3, 2)]),
        first(6, 5, 8),
        mse,
        {},
    ),
}


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("schedule", [OneFOneB, pipelab.ZBH1], ids=["1f1b", "zbh1"])
def test_gradients_and_outputs_are_those_of_the_whole_batch(case, schedule):
    make, x, y, loss, settings = BATCHES[case]
    torch.manual_seed(0)
    stages = make()
    model = nn.Sequential(*stages)
    dim = settings.get("batch_dim", 0)
    given, targets = (join(split_batch(each, counts_of(each, "", 3, dim), dim), ways_of(each, dim)) for each in (x, y))
    expected = loss(output := model(given), targets)
    expected.backward()
    gradients = plain.taken(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Pipeline(stages, schedule(2, 3), loss, **settings) as pipe:
            step = pipe.step(x, y)
            ours = plain.taken(model)
            proof = pipe.verify(x, y)
            forward = pipe.forward(x)
    assert plain.difference(ours, gradients) < 1e-5
    torch.testing.assert_close(step.loss, expected.detach())
    for made in (step.outputs, forward):
        torch.testing.assert_close(torch.cat(made) if "ready" in case else made, output.detach())
    assert proof.exact or schedule is pipelab.ZBH1
    assert (proof.whole_batch_difference or 0.0) < 1e-5
    assert (proof.whole_batch_difference is None) == ("ready" in case)


def test_micro_batches_of_unlike_lengths_are_those_of_plain_training():
    torch.manual_seed(0)
    stages = [nn.Embedding(20, 8), nn.Linear(8, 20)]
    pieces = [torch.randint(0, 20, (count, length)) for count, length in ((2, 5), (3, 7), (2, 6), (1, 5))]

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    model, tokens = nn.Sequential(*stages), sum(piece.numel() for piece in pieces)
    for piece in pieces:
        (loss(model(piece), piece) * (piece.numel() / tokens)).backward()
    expected = plain.taken(model)
    with Pipeline(stages, OneFOneB(2, 4), loss, reduction=torch.numel) as pipe:
        outputs = pipe.step(microbatches(pieces), microbatches(pieces)).outputs
        assert [each.shape for each in outputs] == [(*piece.shape, 20) for piece in pieces]
        assert plain.equal(plain.taken(model), expected)
        proof = pipe.verify(microbatches(pieces), microbatches(pieces))
    assert proof.exact
    assert proof.unproven == ("the micro-batches were cut before: there is no whole batch to compare with",)


def test_graphs_of_unlike_sizes_have_targets_of_their_own_count():
    pieces = [{"nodes": first(many, 8), "edges": torch.randint(0, many, (2, 9))} for many in (5, 3, 6)]

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, given):
            source, target = given["edges"]
            return self.linear(given["nodes"]).index_add(0, target, given["nodes"][source]).mean(0, keepdim=True)

    proof = verified(
        [Graph(), nn.Linear(8, 4)], OneFOneB(2, 3), (microbatches(pieces), microbatches([first(1, 4)] * 3))
    )
    assert proof.exact


def test_outputs_of_pieces_are_a_list_where_only_a_part_of_x_was_cut_already():
    pieces = [torch.randn(2, length, 8) for length in (3, 5)]
    x = {"x": microbatches(pieces), "mask": whole(torch.zeros(1))}
    stages = [plain.Made(lambda self, given: self.linear(given["x"]), linear=nn.Linear(8, 8)), nn.Tanh()]
    with Pipeline(stages, GPipe(2, 2), mse, reduction=torch.numel) as pipe:
        step, outputs = pipe.step(x, microbatches(pieces)), pipe.forward(x)
    expected = [torch.tanh(stages[0].linear(piece)) for piece in pieces]
    assert [*map(torch.equal, step.outputs, expected)] == [*map(torch.equal, outputs, expected)] == [True, True]


def test_other_targets_are_cut_as_the_pieces_that_are_ready():
    x, y = first(6, 8), first(6, 8)
    model = plain.mlp(2, width=8)
    expected = plain.at_once(model, mse, x, y)
    for given in ((microbatches([x[:1], x[1:4], x[4:]]), y), (x, microbatches([y[:1], y[1:4], y[4:]]))):
        torch.testing.assert_close(stepped(model, GPipe(2, 3), given).loss, expected)


def test_ragged_tensors_are_ready_pieces_or_refused():
    parts = [torch.arange(2, 2 + length) for length in (3, 5, 2, 4)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    stages = [nn.Embedding(20, 8), nn.Linear(8, 20)]

    def loss(output, target):
        return nn.functional.cross_entropy(output.values(), target.values())

    told = r"x is a nested tensor, .*\n  try: pipelab\.microbatches\(\[\.\.\.\]\) of nested tensors"
    refused(told, stages, OneFOneB(2, 2), (ragged, ragged), loss, error=BatchError)
    halves = (torch.nested.nested_tensor(half, layout=torch.jagged) for half in (parts[:2], parts[2:]))
    pieces = microbatches([*halves])
    expected = loss(nn.Sequential(*stages)(ragged), ragged)
    ours = stepped(
        stages, OneFOneB(2, 2), (pieces, pieces), loss, reduction=lambda target: target.values().numel()
    ).loss
    torch.testing.assert_close(ours, expected.detach())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda output, y: nn.functional.cross_entropy(output, y)])
def test_targets_of_unlike_lengths_are_counted_not_said_to_be_ignored(loss):
    class Flat(nn.Module):
        def forward(self, x):
            return x.transpose(1, 2)

    pieces = microbatches([torch.randint(0, 20, (2, length)) for length in (5, 7)])
    stages = [nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), Flat()]
    told = r"have 10, 14[^\n]*\n  try: Pipeline\(\.\.\., reduction=lambda target: target\.numel\(\)"
    kinds = {"error": LossError} if isinstance(loss, nn.Module) else {"error": UserWarning}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(told, stages, OneFOneB(2, 2), (pieces, pieces), loss, **kinds)
    assert stepped(stages, OneFOneB(2, 2), (pieces, pieces), loss, reduction=torch.numel).loss > 0


def test_slices_cut_tokens_and_leave_what_is_whole_and_what_has_rows_only():
    seen = []

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, given):
            seen.append(map_tensors(lambda tensor: tuple(tensor.shape), given))
            return self.linear(given["x"])

    x = {"x": first(4, 6, 8), "mask": whole(torch.ones(6, 6)), "class": rows(torch.arange(4))}
    with Pipeline([Noted(), nn.Linear(8, 8)], Seq1F1B(2, 4), mse, sequence_dim=1) as pipe:
        step = pipe.step(x, first(4, 6, 8))
        assert step.outputs.shape == (4, 6, 8)
        assert seen == [{"x": (2, 3, 8), "mask": (6, 6), "class": (2,)}] * 4
        with pytest.raises(BatchError, match=r"along dimension 1, .* x\[\"class\"\] no tokens\n  try: pipelab\.rows"):
            pipe.step(x | {"class": torch.arange(4)}, first(4, 6, 8))
    with Pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], Seq1F1B(2, 4), mse, sequence_dim=0, batch_dim=1) as pipe:
        assert pipe.verify(first(6, 4, 8), first(6, 4, 8)).whole_batch_difference < 1e-5
        assert pipe.forward(first(6, 4, 8)).shape == (6, 4, 8)
    with pytest.raises(UsageError, match="sequence_dim=1 is the dimension of the rows too"):
        Pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], Seq1F1B(2, 4), mse, sequence_dim=1, batch_dim=1)


def test_outputs_are_joined_along_their_rows_or_are_a_list():
    counts = [2, 2]
    joined = {
        (2, 2): (4, 2),  # classes of each row, as many as rows
        (5, 2): (5, 4),
        (2, 5): (4, 5),
        (2, 2, 3): (2, 4, 3),
        (7, 2, 3): (7, 4, 3),
        (2, 7, 3): (4, 7, 3),
        (3,): (6,),
        (): (2,),
    }
    for shape, whole_shape in joined.items():
        assert join_outputs([torch.ones(shape)] * 2, counts, 1).shape == whole_shape
    assert join_outputs([torch.ones(7, 2, 3)] * 2, counts, 0).shape == (7, 4, 3)
    assert join_outputs([torch.ones(5, 2)] * 2, counts, 0).shape == (10, 2)
    assert join_outputs([torch.ones(7, 5, 2)] * 2, counts, 0).shape == (14, 5, 2)
    assert join_outputs([{"a": torch.ones(3, 2), "b": 1}] * 2, counts, 1)["a"].shape == (3, 4)
    unlike = [torch.ones(2, 5, 3), torch.ones(2, 4, 3)]
    assert join_outputs(unlike, counts, 0) == unlike


def test_outputs_without_tokens_have_one_for_each_slice():
    class Counts(nn.Module):
        def forward(self, x):
            return x, x.sum((1, 2)), x.sum()

    x = torch.randn(4, 6, 8)
    with Pipeline([nn.Linear(8, 8), Counts()], Seq1F1B(2, 4), lambda made, _: made[0].sum(), sequence_dim=1) as pipe:
        pipe.forward(x)
        made, of_rows, of_all = pipe.forward(x)
    assert made.shape == x.shape
    assert torch.allclose(of_rows, made.unflatten(1, (2, 3)).sum((2, 3)))
    assert torch.allclose(of_all, of_rows.unflatten(0, (2, 2)).sum(1))


class TakesAMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + mask @ layer(x)
        return x


@pytest.mark.parametrize("tokens", [6, 8])
def test_a_traced_model_takes_a_mask_that_is_whole(tokens):
    model, mask = TakesAMask(), torch.ones(tokens, tokens).tril() / tokens
    x, y = first(8, tokens, 8), first(8, tokens, 8)
    stages = pipelab.split(model, into=2, example={"x": x[:2], "mask": whole(mask)})
    with Pipeline(stages, OneFOneB(2, 4), mse) as pipe:
        step = pipe.step({"x": x, "mask": whole(mask)}, y)
        torch.testing.assert_close(step.loss, mse(model(x, mask), y).detach())
        proof = pipe.verify({"x": x, "mask": whole(mask)}, y)
        with pytest.raises((BatchError, pipelab.SplitError), match=r"pipelab\.whole\("):
            pipe.step({"x": x, "mask": mask}, y)
    assert proof.exact
    assert proof.whole_batch_difference < 1e-5


def test_memory_is_measured_with_all_kinds_of_inputs():
    x = {"x": first(6, 5, 8), "mask": whole(torch.ones(5, 5).tril())}
    pieces = microbatches([{"x": first(2, 5, 8), "mask": torch.ones(5, 5)} for _ in range(3)])
    plain_x = {"x": first(6, 5, 8), "mask": torch.ones(6, 5, 5)}
    with Pipeline([Mix(), nn.Linear(8, 8)], OneFOneB(2, 3), mse) as pipe:
        known, *others = (pipe.memory(given, first(6, 5, 8)) for given in (plain_x, x, pieces))
        assert pipe.memory_use(x, first(6, 5, 8)).peaks == pipe.memory_use(plain_x, first(6, 5, 8)).peaks
    assert all(each.weights == known.weights and each.outputs == known.outputs for each in others)
    with Pipeline(encoder(), OneFOneB(2, 3), mse, batch_dim=1) as pipe:
        assert pipe.memory(first(5, 6, 8), first(5, 6, 8)).outputs == 4 * 5 * 2 * 8


# --- keywords


class Scaled(nn.Module):
    """A stage that takes a mask of its rows by name, and a table for all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask=None, *, table=None):
        made = self.linear(x)
        made = made if mask is None else made * mask[..., None]
        return made if table is None else made + table


class Plainly(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).tanh()


class TakesAll(Plainly):
    def forward(self, x, **more):
        return super().forward(x) * more["mask"][..., None]


def with_keywords(stages, x, mask, table):
    one, two, three = stages
    return three(two(one(x, mask=mask, table=table)), mask=mask)


SCHEDULES = [
    OneFOneB(3, 2),
    pipelab.ZBH1(3, 2),
    pipelab.with_recompute(OneFOneB(3, 2)),
    pipelab.replicate(GPipe(3, 2), 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "zbh1", "recomputed", "replicas"])
def test_each_stage_gets_the_keywords_that_its_forward_names(schedule):
    torch.manual_seed(0)
    stages, x, y = [Scaled(), Plainly(), TakesAll()], first(6, 5, 8), first(6, 5, 8)
    mask, table = torch.rand(6, 5), torch.randn(5, 8)
    loss = mse(output := with_keywords(stages, x, mask, table), y)
    loss.backward()
    expected = plain.taken(nn.ModuleList(stages))
    named = {"mask": mask, "table": whole(table)}
    with Pipeline(stages, schedule, mse) as pipe:
        step = pipe.step(x, y, keywords=named)
        ours = plain.taken(nn.ModuleList(stages))
        forward, proof = pipe.forward(x, keywords=named), pipe.verify(x, y, keywords=named)
        assert all(runner.keywords == [] for runner in pipe.engine.runners.of.values())
    torch.testing.assert_close(step.loss, loss.detach())
    torch.testing.assert_close(forward, output.detach())
    assert plain.difference(ours, expected) < 1e-5
    assert proof.whole_batch_difference < 1e-5


def test_keywords_are_cut_as_inputs_are():
    stages, x, y = [Scaled(), Plainly()], first(6, 5, 8), first(6, 5, 8)
    with Pipeline(stages, OneFOneB(2, 2), mse) as pipe:
        for mask in (
            torch.rand(6, 5),
            whole(torch.rand(5)),
            rows(torch.rand(6, 5)),
            microbatches([torch.rand(3, 5)] * 2),
        ):
            assert pipe.verify(x, y, keywords={"mask": mask}).exact
        assert pipe.verify(x, y, keywords={"table": microbatches([whole(torch.rand(5, 8))] * 2)}).exact
        assert pipe.memory(x, y, keywords={"mask": torch.rand(6, 5)}) == pipe.memory(x, y)  # the batch does not count
        assert pipe.memory_use(x, y, keywords={"mask": torch.rand(6, 5)}).peaks
        with pytest.raises(BatchError, match=r"x has 6 rows and keywords has 4: every row of x needs its keywords"):
            pipe.step(x, y, keywords={"mask": torch.rand(4, 5)})
        with pytest.raises(BatchError, match=r'^keywords\["mask"\] has the shape \[\], .*\n  try: pipelab\.whole'):
            pipe.step(x, y, keywords={"mask": torch.tensor(1.0)})
    with Pipeline(stages, OneFOneB(2, 2), mse, batch_dim=1) as pipe:
        assert pipe.verify(first(5, 6, 8), first(5, 6, 8), keywords={"mask": torch.rand(5, 6)}).exact


def test_slices_get_all_of_keywords_whose_pieces_are_whole():
    x = torch.randn(4, 6, 8)
    tables = microbatches([whole(torch.full((8,), float(sequence))) for sequence in range(2)])
    stages = [Scaled(), nn.Tanh()]
    with Pipeline(stages, Seq1F1B(2, 4), mse, sequence_dim=1) as pipe:
        outputs = pipe.step(x, x, keywords={"table": tables}).outputs
    expected = torch.tanh(stages[0].linear(x) + torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None, None])
    assert torch.allclose(outputs, expected)


def test_slices_get_their_part_of_keywords_with_tokens():
    stages, x, mask = [Scaled(), Plainly()], first(4, 6, 8), torch.rand(4, 6)
    expected = mse(stages[1](stages[0](x, mask=mask)), x)
    with Pipeline(stages, Seq1F1B(2, 4), mse, sequence_dim=1) as pipe:
        step = pipe.step(x, x, keywords={"mask": mask})
        assert pipe.verify(x, x, keywords={"mask": mask}).whole_batch_difference < 1e-5
    torch.testing.assert_close(step.loss, expected.detach())


@pytest.mark.parametrize(
    ("model", "takes"),
    [
        (lambda: [Plainly(), Scaled()], r"stage 0 \(Plainly\) takes none; stage 1 \(Scaled\) takes mask, table"),
        (
            lambda: plain.mlp(2, width=8),
            r"stage 0 \(Sequential\) takes none; .*\n  try: def forward\(self, x, pad=None\)",
        ),
    ],
)
def test_a_keyword_that_no_stage_takes_is_refused_with_what_they_take(model, takes):
    x = first(4, 5, 8)
    with Pipeline(model(), OneFOneB(2, 2), mse) as pipe:
        with pytest.raises(UsageError, match=rf"^no stage takes the keyword 'pad': {takes}"):
            pipe.step(x, x, keywords={"pad": torch.rand(4, 5)})
        pipe.step(x, x)


# --- what cannot be cut


WRONG = [
    *((value, r"^x holds no tensor, .*\n  try: a tensor") for value in ("text", (), {"a": 3}, 7)),
    (whole(torch.zeros(4)), r"^x is whole: nothing of it has rows"),
    ((torch.zeros(4, 1), torch.tensor(1.0)), r"^x\[1\] has the shape \[\], .*\n  try: pipelab\.whole\(x\[1\]\), if"),
    (
        {"ids": torch.zeros(4, 5), "offsets": torch.zeros(5)},
        r'^x\["offsets"\] \[5\] has 5 rows and x\["ids"\] \[4, 5\] has 4, .*\n  try: pipelab\.whole\(x\["offsets"\]\)',
    ),
    (
        {"mask": torch.zeros(5, 5), "x": torch.zeros(4, 5, 8)},
        r'^x\["mask"\] \[5, 5\] has 5 rows and .*\n.*pipelab\.microbatches',
    ),
    ({"a": torch.zeros(4, 2), "b": torch.zeros(2, 4)}, r'pipelab\.rows\(x\["b"\], dim=1\), if its rows are there'),
    ({"x": torch.zeros(4, 5, 8), "m": torch.zeros(8, 5, 5)}, r'x\["m"\]\.unflatten\(0, \(4, 2\)\), .* each row has 2'),
    ([torch.zeros(4), torch.zeros(3)], r"pad_sequence\(x, batch_first=True\), if each tensor is a sequence"),
    ([torch.zeros(1, 3), torch.zeros(1, 2)], r"^x holds 2 tensors of 1 row, .*\n  try: pipelab\.microbatches\(x\)"),
    (microbatches([torch.zeros(2, 3)] * 3), r"^x holds 3 ready micro-batches, and the plan has 2\n  try: a sch"),
    ({"a": microbatches([torch.zeros(2)] * 2), "b": torch.zeros(5)}, r"^x has 5 rows, and .* have 2 \+ 2"),
    (torch.zeros(3, 6), "^x has 3 rows and y has 4: every row of x needs a target"),
]


@pytest.mark.parametrize(("x", "told"), WRONG)
def test_what_cannot_be_cut_is_named_with_its_shape_and_the_choices(x, told):
    refused(told, plain.mlp(2), OneFOneB(2, 2), (x, torch.zeros(4, 6)), error=BatchError)


def test_labels_without_the_dimension_of_the_rows_are_to_be_marked():
    told = r"^y has the shape \[6\], without a dimension 1 .*\n  try: pipelab\.rows\(y\), if its rows are along"
    refused(told, encoder(), OneFOneB(2, 2), (first(5, 6, 8), LABELS), error=BatchError, batch_dim=1)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "rows"])
def test_a_batch_dim_is_a_dimension(wrong):
    with pytest.raises(UsageError, match="batch_dim=.*: expected a dimension, 0 or more"):
        Pipeline(plain.mlp(2), OneFOneB(2, 2), mse, batch_dim=wrong)


@pytest.mark.parametrize("wrong", [1.5, True, "a"])
def test_rows_are_along_a_dimension(wrong):
    with pytest.raises(UsageError, match="rows.*: expected the number of a dimension"):
        rows(torch.zeros(2, 2), wrong)


def test_keywords_have_names():
    with Pipeline(plain.mlp(2), OneFOneB(2, 2), mse) as pipe, pytest.raises(UsageError, match="keywords=.*a dict"):
        pipe.step(*plain.batch(4), keywords=[1])


@pytest.mark.parametrize("wrong", [[], torch.zeros(2, 2), "ab"])
def test_ready_pieces_are_a_list(wrong):
    with pytest.raises(UsageError, match=r"pipelab\.microbatches\(pieces\): expected a list"):
        microbatches(wrong)


# --- modules that have the sequence first


FIRST = {
    "0 (TransformerEncoderLayer)": encoder,
    "0.lstm (LSTM)": lambda: [Recurrent(), nn.Linear(8, 8)],
    "1 (MultiheadAttention)": lambda: [nn.Linear(8, 8), nn.MultiheadAttention(8, 2)],
    "1 (GRU)": lambda: nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8)),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_layer_with_the_sequence_first_is_named_unless_the_user_says_where_rows_are(name):
    with pytest.warns(UserWarning, match="batch_first=False") as said, Pipeline(FIRST[name](), OneFOneB(2, 2), mse):
        pass
    (warning,) = said
    assert str(warning.message).startswith(f"{name} has batch_first=False")
    assert "try: Pipeline(..., batch_dim=1)" in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dim in (0, 1):
            Pipeline(FIRST[name](), OneFOneB(2, 2), mse, batch_dim=dim).close()
        Pipeline([nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)], OneFOneB(2, 2), mse).close()


def test_a_keyword_that_is_the_batchs_is_named_by_verify():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, weights):
            return self.linear(x) * weights.sum()

    with Pipeline([Plainly(), Summed()], OneFOneB(2, 2), mse) as pipe:
        named = {"weights": torch.arange(1, 7)}
        with pytest.raises(VerificationError, match=r"keywords\[\"weights\"\] \(\[6\] int64\)"):
            pipe.verify(first(6, 5, 8), first(6, 5, 8), keywords=named)
        assert pipe.verify(first(6, 5, 8), first(6, 5, 8), keywords={"weights": whole(named["weights"])}).exact
