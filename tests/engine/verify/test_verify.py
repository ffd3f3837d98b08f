"""`verify` proves what it can, names what is wrong, says what it cannot prove, and leaves no trace."""

from __future__ import annotations

import plain
import pytest
import torch
from strategies import in_order, near, with_stages
from torch import nn

from pipelab import B, DualPipe, F, GPipe, OneFOneB, Pipeline, Plan, replicate, schedules, split
from pipelab.engine.device import RankDevice
from pipelab.engine.verify.verify import Verification, tolerance
from pipelab.errors import BatchError, StageError, VerificationError

mse = nn.functional.mse_loss


@pytest.mark.parametrize("name", schedules)
def test_a_right_pipeline_is_proved_right(name):
    plan = near(name, 3, 4)
    with Pipeline(plain.mlp(2 * plan.stages), plan, mse) as pipe:
        proof = pipe.verify(*plain.batch(10))
    assert proof.parameters == 2 * plan.stages
    assert proof.microbatches == plan.microbatches
    assert proof.largest_difference <= 1e-6
    assert proof.whole_batch_difference <= 1e-5
    assert proof.unproven == ()
    assert str(proof).startswith(f"All {2 * plan.stages} gradients match plain training with the same")


def test_a_proof_bit_for_bit_says_so():
    with Pipeline(plain.mlp(4), OneFOneB(2, 3), mse) as pipe:
        proof = pipe.verify(*plain.batch(7))
    assert proof.exact
    assert proof.largest_difference == 0
    assert "bit for bit. Against the whole batch at once" in str(proof)


@pytest.mark.parametrize(
    ("on_gpu", "kind", "cast", "allowed"),
    [
        (False, torch.float32, None, 1e-6),
        (False, torch.bfloat16, None, 2**-4),
        (True, torch.float32, None, 1e-5),
        (True, torch.float32, torch.bfloat16, 2**-4),  # there, other kernels may be chosen, and round otherwise
        (True, torch.float64, None, 1e-5),
    ],
)
def test_how_far_gradients_may_be_apart_depends_on_the_device_and_the_types(on_gpu, kind, cast, allowed):
    devices = [RankDevice(torch.device("cpu")), RankDevice(torch.device("cuda:0" if on_gpu else "cpu"))]
    assert tolerance(devices, {cast} - {None}, torch.zeros(1, dtype=kind)) == allowed


LAST_IN_FIRST_OUT = Plan([[F(m, s) for m in range(5)] + [B(m, s) for m in reversed(range(5))] for s in range(2)], 2, 5)


def test_another_order_of_backwards_is_right_within_rounding():
    with Pipeline(plain.mlp(4), LAST_IN_FIRST_OUT, mse) as pipe:
        proof = pipe.verify(*plain.batch(11))
    assert not proof.exact
    assert 0 < proof.largest_difference <= 1e-6
    assert "within" in str(proof)


class Attention(nn.Module):
    """One head. The gradient of the key's bias is zero, but for rounding."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("plan", [OneFOneB(2, 5).plan(), LAST_IN_FIRST_OUT], ids=["1f1b", "last in, first out"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_mistake(seed, plan):
    torch.manual_seed(seed)
    model = nn.Sequential(Attention(8), nn.LayerNorm(8), Attention(8), nn.Linear(8, 8))
    with Pipeline(model, plan, mse) as pipe:
        pipe.verify(torch.randn(10, 7, 8), torch.randn(10, 7, 8))


def test_nothing_is_left_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6))
    x, y = plain.batch(8)
    with Pipeline(model, OneFOneB(2, 2), mse) as pipe:
        pipe.step(x, y)
        model[3].bias.grad = None
        holders = [parameter.grad for parameter in model.parameters()]
        gradients = [None if grad is None else grad.clone() for grad in holders]
        state = {key: value.clone() for key, value in model.state_dict().items()}
        random_state = torch.get_rng_state()
        pipe.verify(x, y)
    assert all(parameter.grad is holder for parameter, holder in zip(model.parameters(), holders, strict=True))
    for holder, gradient in zip(holders, gradients, strict=True):
        assert holder is None or torch.equal(holder, gradient)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())


class Weighs(nn.Module):
    """A loss that learns, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return mse(output * self.weight, target)


@pytest.mark.parametrize("stepped", [True, False])
def test_nothing_is_left_behind_in_a_loss_that_learns(stepped):
    loss = Weighs()
    x, y = plain.batch(8)
    with Pipeline(plain.mlp(4), OneFOneB(2, 2), loss) as pipe:
        if stepped:
            pipe.step(x, y)
        gradient, calls = loss.weight.grad, loss.calls.clone()
        before = None if gradient is None else gradient.clone()
        pipe.verify(x, y)
    assert loss.weight.grad is gradient
    assert before is None or torch.equal(gradient, before)
    assert torch.equal(loss.calls, calls)


def test_a_stage_that_keeps_state_is_found_with_parameter_and_micro_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), plain.Remembers(), nn.Linear(6, 6))
    x, y = plain.batch(8)
    with Pipeline(model, GPipe(3, 4), mse) as pipe:
        pipe.step(x, y)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        with pytest.raises(VerificationError) as wrong:
            pipe.verify(x, y)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)  # restored all the same
    told = str(wrong.value)
    assert told.startswith("the gradient of 1.weight (stage 1) differs from the plain model's by ")
    assert "1 parameter differs in all" in told
    assert "micro-batch 0 is the first that differs, at 1.weight (stage 1)" in told
    assert "try: look for state" in told


def test_a_stage_that_keeps_state_is_right_where_nothing_comes_between():
    torch.manual_seed(0)
    with Pipeline([nn.Linear(6, 6), plain.Remembers()], OneFOneB(2, 4), mse) as pipe:  # the last stage: F0 B0 F1 B1 ...
        assert pipe.verify(*plain.batch(8)).exact


class Puts(nn.Module):
    """Leaves what it computes where a later stage finds it: a way beside the values that stages return."""

    def __init__(self):
        super().__init__()
        self.linear, self.found = nn.Linear(6, 6), None

    def forward(self, x):
        self.found = self.linear(x)
        return self.found * 2


class Reaches(nn.Module):
    """Does something to an earlier stage's tensor, or to its own input."""

    def __init__(self, does, earlier=None):
        super().__init__()
        self.linear, self.does, self.earlier = nn.Linear(6, 6), does, [earlier]  # a list hides the module

    def forward(self, x):
        return self.linear(x) + self.does(x if self.earlier[0] is None else self.earlier[0].found)


def reads(earlier):
    return earlier.detach()


def hooks(earlier):
    if earlier.requires_grad:
        earlier.register_hook(lambda gradient: gradient * 3)
    return 0


def differentiates(earlier):
    if earlier.requires_grad:
        earlier.sum().backward(retain_graph=True)
    return 0


@pytest.mark.parametrize("does", [reads, hooks, differentiates])
def test_what_passes_to_a_later_stage_beside_the_values_is_found(does):
    torch.manual_seed(0)
    first = Puts()
    second = Reaches(does, None if does is differentiates else first)
    plan = Plan.parse(["0F0 0F1 1F0 1F1 1I0 0B0 1W0 1I1 0B1 1W1"])  # one rank, so that the order is the same every time
    with Pipeline([first, second], plan, mse) as pipe, pytest.raises(VerificationError) as wrong:
        pipe.verify(*plain.batch(8))
    assert "micro-batch" in str(wrong.value)
    assert "state that a stage stores" in str(wrong.value)
    assert "an earlier stage" in str(wrong.value)


@pytest.mark.parametrize("name", schedules)
def test_hooks_on_a_stages_input_and_on_what_it_returns_run_as_in_plain_training(name):
    class Hooked(Reaches):
        def forward(self, x):
            made = super().forward(x)
            hooks(made)
            return made

    plan = with_stages(name, 4, 4)
    with Pipeline([Hooked(hooks) for _ in range(plan.stages)], plan, mse) as pipe:
        verified = pipe.verify(*plain.batch(8))
    assert verified.exact or not in_order(plan)
    assert verified.largest_difference < 1e-6


def test_hooks_of_two_stages_on_one_tensor_are_found_where_their_order_matters():
    class Clips(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            made.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return made

    torch.manual_seed(0)
    stages = [Clips(6, 6), Reaches(hooks)]
    with (
        Pipeline(stages, GPipe(2, 4), mse) as pipe,
        pytest.raises(VerificationError, match=r"0\.weight .*differs"),
    ):
        pipe.verify(*plain.batch(8))


class Warms(nn.Module):
    """Counts its calls, and computes something else after many of them."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(6, 6), nn.Module()
        self.inner.calls = 0

    def forward(self, x):
        self.inner.calls += 1
        return self.linear(x) * (1 if self.inner.calls < 1000 else 2)


@pytest.mark.parametrize("plan", [DualPipe(2, 4), replicate(GPipe(2, 2), 2)], ids=["dualpipe", "replicas"])
def test_state_that_each_rank_of_a_replicated_stage_has_for_itself_is_not_verified(plan):
    x, y = plain.batch(8)
    with Pipeline([nn.Linear(6, 6), Warms()], plan, mse) as pipe:
        verified = pipe.verify(x, y)
    assert verified.whole_batch_difference < 1e-5
    assert "stage 1 is on ranks" in verified.unproven[0]
    assert "inner.calls" in verified.unproven[0]
    with Pipeline([nn.Linear(6, 6), Warms()], GPipe(2, 4), mse) as pipe:
        assert not pipe.verify(x, y).unproven


def test_the_parameter_is_named_as_the_model_names_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.blocks = nn.Linear(6, 6), nn.ModuleList([plain.Remembers(), nn.Linear(6, 6)])

    model = Model()
    stages = [model.entry, *model.blocks]
    with (
        Pipeline(stages, GPipe(3, 4), mse) as pipe,
        pytest.raises(VerificationError, match=r"of 1\.weight \(stage 1\)"),
    ):
        pipe.verify(*plain.batch(8))


@pytest.mark.parametrize(
    ("loss", "reduction", "told"),
    [
        (lambda output, target: (output - target).pow(2).sum(), "mean", "reduction is 'mean'"),
        (mse, "sum", "reduction is 'sum'"),
        (mse, lambda target: len(target) ** 2, "reduction is a function"),
    ],
    ids=["a sum taken for a mean", "a mean taken for a sum", "wrong weights"],
)
def test_a_wrong_reduction_is_told(loss, reduction, told):
    pipe = Pipeline(plain.mlp(4), OneFOneB(2, 3), loss, reduction=reduction)
    with pipe, pytest.raises(VerificationError, match=told) as wrong:
        pipe.verify(*plain.batch(7))
    assert "their sum is not the whole batch's" in str(wrong.value)
    assert "(stage " in str(wrong.value)


def test_a_stage_that_depends_on_the_batch_is_told_from_a_wrong_reduction():
    class Cuts(nn.Module):
        def forward(self, x):
            return x if len(x) == 12 or x.sum() > 0 else x + 0.5 * (x.detach() - x)

    model = nn.Sequential(nn.Linear(6, 6), Cuts(), nn.Linear(6, 6), nn.Linear(6, 6))
    told = r"\n  2\.weight \(stage 2\) is right, so reduction='mean' is right: but 0\.bias \(stage 0\) and the"
    with Pipeline(model, OneFOneB(4, 3), mse) as pipe, pytest.raises(VerificationError, match=told):
        pipe.verify(*plain.batch(12))


@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch warns: one more reason to say it again
def test_a_target_that_is_broadcast_is_told_from_a_stage_that_mixes_rows():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    x, y = plain.batch(12)
    with Pipeline(model, OneFOneB(2, 3), mse) as pipe, pytest.raises(VerificationError) as wrong:
        pipe.verify(x, y[:, 0])
    assert str(wrong.value).splitlines()[1:] == [
        "  the output is [12, 1] and y is [12]: the loss broadcasts them, every row of one against every row of the "
        "other",
        "  try: y.view(12, 1)",
    ]


def test_what_dropout_and_batch_norm_do_not_let_it_prove_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.BatchNorm1d(6))
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        proof = pipe.verify(*plain.batch(8))
        assert [reason.split()[0] for reason in proof.unproven] == ["dropout", "BatchNorm"]
        assert str(proof).count("not verified:") == len(proof.unproven)
        assert proof.whole_batch_difference is None
        model.eval()
        proof = pipe.verify(*plain.batch(8))
        assert proof.unproven == ()
        assert proof.exact


@pytest.mark.parametrize("other", [nn.Identity(), nn.BatchNorm1d(6), nn.Dropout(0.0), nn.Dropout(0.5).eval()], ids=type)
def test_a_wrong_gradient_is_not_excused_by_layers_that_do_not_explain_it(other):
    model = nn.Sequential(nn.Linear(6, 6), other, nn.Linear(6, 6), plain.Counts())
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe, pytest.raises(VerificationError, match="differs from the plain"):
        pipe.verify(*plain.batch(8))


def test_batch_norm_alone_is_equal_to_the_micro_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        proof = pipe.verify(*plain.batch(8))
    assert proof.compared
    assert proof.exact
    assert len(proof.unproven) == 1


class Drops(nn.Module):
    """Dropout without a layer."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), Drops()], ids=["a layer", "a function"])
def test_gradients_that_dropout_makes_differ_are_not_called_equal(dropout):
    torch.manual_seed(0)
    other_order = Plan([[F(1, 0), F(0, 0), B(1, 0), B(0, 0)]], 1, 2)
    with Pipeline(nn.Sequential(nn.Linear(6, 6), dropout, nn.Linear(6, 6)), other_order, mse) as pipe:
        proof = pipe.verify(*plain.batch(8))
    assert not proof.compared
    assert proof.whole_batch_difference is None
    assert "could not be compared" in str(proof)
    assert "match" not in str(proof)


def test_a_proof_that_could_not_be_had_says_so():
    told = str(Verification(4, 2, exact=False, largest_difference=0.83, unproven=("dropout",), compared=False))
    assert told.splitlines() == [
        "4 gradients could not be compared: they differ by up to 8.3e-01 (2-norm, relative to what is "
        "added up), and random numbers are drawn in another order.",
        "not verified: dropout",
    ]


def test_dropout_that_drops_nothing_hides_nothing():
    with Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0)), GPipe(2, 2), mse) as pipe:
        assert pipe.verify(*plain.batch(4)).unproven == ()


def test_stages_given_as_a_list_are_held_against_the_whole_batch_too():
    with Pipeline([plain.mlp(2), plain.mlp(2)], GPipe(2, 2), mse) as pipe:
        proof = pipe.verify(*plain.batch(4))
    assert proof.exact
    assert proof.whole_batch_difference < 1e-5
    sums = Pipeline([plain.mlp(2), plain.mlp(2)], GPipe(2, 2), lambda output, target: (output - target).pow(2).sum())
    with sums as pipe, pytest.raises(VerificationError, match="reduction is 'mean'"):
        pipe.verify(*plain.batch(4))


def test_stages_for_a_micro_batchs_rows_are_verified_without_the_whole_batch():
    class Views(nn.Module):
        def forward(self, x):
            return x.view(4, 2, 3).view(4, 6)

    with Pipeline([nn.Linear(6, 6), Views()], GPipe(2, 2), mse) as pipe:
        proof = pipe.verify(*plain.batch(8))
    assert proof.exact
    assert proof.whole_batch_difference is None
    (reason,) = proof.unproven
    assert reason.startswith("the stages, given as a list, do not take the whole batch (RuntimeError: shape")


def test_a_loss_that_puts_the_shapes_right_itself_is_not_said_to_spread():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    x, y = plain.batch(12)

    def sums(output, target):
        return (output.squeeze(1) - target).pow(2).sum()

    with Pipeline(model, OneFOneB(2, 3), sums) as pipe, pytest.raises(VerificationError, match="reduction is 'mean'"):
        pipe.verify(x, y[:, 0])
    with Pipeline(model, OneFOneB(2, 3), sums, reduction="sum") as pipe:
        assert pipe.verify(x, y[:, 0]).exact


def test_an_expanded_batch_and_one_that_is_its_own_target_are_verified():
    model = nn.Sequential(nn.ReLU(inplace=True), *plain.mlp(2))
    x, y = plain.batch(8)
    with torch.inference_mode():
        unwritable = x * 2
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        assert pipe.verify(x[:1].expand(8, 6), y).exact
        assert pipe.verify(x, x).exact
        assert pipe.verify(unwritable, y).exact


def test_parameters_without_a_gradient_are_named():
    class Detaches(nn.Module):
        def forward(self, x):
            return x.detach()

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Detaches(), nn.Linear(6, 6))
    with Pipeline(model, OneFOneB(2, 2), mse) as pipe:
        proof = pipe.verify(*plain.batch(4))
    assert proof.idle == ("0.weight (stage 0)", "0.bias (stage 0)")
    assert (
        str(proof).splitlines()[1]
        == "2 parameters got no gradient, in plain training either: 0.weight (stage 0), 0.bias (stage 0)"
    )


@pytest.mark.parametrize(("number", "kind"), [(float("nan"), "NaN"), (3e38, "infinite")])
def test_what_is_no_number_in_the_plain_model_either_is_no_fault_of_the_pipelines(number, kind):
    x, y = plain.batch(8)
    x[5, 2] = number
    given = ", and its rows of x are not finite" if kind == "NaN" else ""
    told = (
        rf"^the gradient of 0\.weight \(stage 0\) is {kind}, in the plain model too: there is nothing to compare\n"
        rf"  micro-batch 2 is the first that makes one{given}\n"
        r"  try: Pipeline\(\.\.\., watch_nan=True\)"
    )
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe, pytest.raises(VerificationError, match=told):
        pipe.verify(x, y)


def test_a_layer_that_makes_what_is_no_number_is_told_without_blaming_x():
    class Roots(nn.Module):
        def forward(self, x):
            return x.sqrt()

    model = nn.Sequential(nn.Linear(6, 6), Roots(), nn.Linear(6, 6))
    told = r"\n  micro-batch 0 is the first that makes one\n"
    with Pipeline(model, OneFOneB(2, 4), mse) as pipe, pytest.raises(VerificationError, match=told):
        pipe.verify(*plain.batch(8))


def test_a_model_that_writes_into_the_batch_is_proved_and_the_batch_is_as_before():
    class Shifts(nn.Module):
        def forward(self, x):
            x += 1
            return x

    x, y = plain.batch(8)
    x[0, 0] = 3
    before = x.clone()
    for first in (Shifts(), nn.ReLU(inplace=True)):
        with Pipeline(nn.Sequential(first, *plain.mlp(4)), OneFOneB(2, 4), mse) as pipe:
            assert pipe.verify(x, y).exact
        assert torch.equal(x, before)


def test_an_error_of_the_plain_model_says_that_it_is_not_the_pipelines():
    """The sigmoid's output is overwritten, which its backward needs; in the pipeline, it is the next stage's copy."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(6, 6))
    with Pipeline(model, OneFOneB(4, 2), mse) as pipe:
        pipe.step(*plain.batch(4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            pipe.verify(*plain.batch(4))
    assert raised.value.__notes__ == ["raised where verify ran the plain model, without the pipeline"]


def test_random_numbers_that_no_dropout_draws_are_not_called_dropout():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    with Pipeline(nn.Sequential(nn.Linear(6, 6), Noise(), nn.Linear(6, 6)), OneFOneB(2, 2), mse) as pipe:
        (reason,) = pipe.verify(*plain.batch(4)).unproven
    assert reason.startswith("the model draws from one random stream")


def test_a_frozen_model_part_is_not_compared():
    model = plain.mlp(4)
    model[0].requires_grad_(False)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        assert pipe.verify(*plain.batch(4)).parameters == 2


def test_a_model_that_fails_fails_the_verification_and_gradients_come_back():
    model = plain.mlp(4)
    x, y = plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)
        before = [parameter.grad for parameter in model.parameters()]
        with pytest.raises(StageError):
            pipe.verify(x[:, :3], y)
        with pytest.raises(BatchError):
            pipe.verify(x, y[:3])
        assert all(parameter.grad is holder for parameter, holder in zip(model.parameters(), before, strict=True))


def test_a_model_of_many_batch_shapes_is_verified():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9))

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    with Pipeline(model, OneFOneB(3, 4), loss) as pipe:
        assert pipe.verify(torch.randint(9, (7, 5)), torch.randint(9, (7, 5))).exact


class Replacing(nn.Module):
    """Puts another tensor in its buffer's place, instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x


def test_verify_puts_back_a_buffer_that_was_replaced():
    model = nn.Sequential(*plain.mlp(2), Replacing())
    with Pipeline(model, OneFOneB(2, 3), mse) as pipe:
        pipe.verify(*plain.batch(6))
    assert model[-1].count == 0


def test_a_slightly_wrong_reduction_is_told_too():
    torch.manual_seed(0)
    target = torch.randint(3, (3000,))
    target[:5] = -100
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    x = torch.randn(3000, 4)

    def loss(output, target):
        return nn.functional.cross_entropy(output, target)

    wrong = r"reduction is a function"
    with Pipeline(model, OneFOneB(2, 3), loss, reduction=len) as pipe, pytest.raises(VerificationError, match=wrong):
        pipe.verify(x, target)
    with Pipeline(model, OneFOneB(2, 3), loss, reduction=lambda each: (each >= 0).sum()) as pipe:
        assert pipe.verify(x, target).whole_batch_difference < 1e-5


def test_expanded_buffers_and_sparse_gradients_are_verified():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 6, sparse=True)
            self.register_buffer("mask", torch.ones(1, 6).expand(3, 6))

        def forward(self, rows):
            return self.table(rows) * self.mask[0]

    rows, y = torch.arange(8) % 3, plain.batch(8)[1]
    with Pipeline([Looks(), nn.Linear(6, 6)], OneFOneB(2, 4), mse) as pipe:
        assert pipe.verify(rows, y).exact


class Grows(nn.Module):
    """No sequence, so it is traced; what it computes depends on its class, at which pipelab does not look again."""

    factor = 1

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(self.factor * self.first(x))


def test_traced_stages_are_compared_with_the_users_own_model(monkeypatch):
    model = Grows()
    x, y = plain.batch(8)
    with Pipeline(split(model, 2, example=x[:2]), OneFOneB(2, 4), mse) as pipe:
        assert pipe.verify(x, y).exact
        monkeypatch.setattr(Grows, "factor", 2)  # the traced stages keep 1
        told = r"(?s)differs from the plain model's.*global.*class.*split the model again"
        with pytest.raises(VerificationError, match=told):
            pipe.verify(x, y)
