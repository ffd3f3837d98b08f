"""`verify` proves what it can, names what is wrong, says what it cannot prove, and leaves no trace."""

from __future__ import annotations

from pipes import mse, no_trace, refused, stepped, verified

import plain
import pytest
import torch
from strategies import in_order, near, with_stages
from torch import nn

from pipelab import ZBH1, B, DualPipe, F, GPipe, OneFOneB, Pipeline, Plan, replicate, schedules, split
from pipelab.engine.device import RankDevice
from pipelab.engine.verify.verify import Verification, tolerance
from pipelab.errors import BatchError, StageError, VerificationError


@pytest.mark.parametrize("name", schedules)
def test_a_right_pipeline_is_proved_right(name):
    plan = near(name, 3, 4)
    proof = verified(plain.mlp(2 * plan.stages), plan, 10)
    assert (proof.parameters, proof.microbatches, proof.unproven) == (2 * plan.stages, plan.microbatches, ())
    assert proof.largest_difference <= 1e-6
    assert proof.whole_batch_difference <= 1e-5
    assert str(proof).startswith(f"All {2 * plan.stages} gradients match plain training with the same")


def test_a_proof_bit_for_bit_says_so():
    proof = verified(plain.mlp(4), OneFOneB(2, 3), 7)
    assert (proof.exact, proof.largest_difference) == (True, 0)
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
    proof = verified(plain.mlp(4), LAST_IN_FIRST_OUT, 11)
    assert not proof.exact
    assert 0 < proof.largest_difference <= 1e-6
    assert "within" in str(proof)


def attends(self, x):
    """One head. The gradient of the key's bias is zero, but for rounding."""
    query, key, value = self.layers
    return x + nn.functional.scaled_dot_product_attention(query(x), key(x), value(x))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("plan", [OneFOneB(2, 5).plan(), LAST_IN_FIRST_OUT], ids=["1f1b", "last in, first out"])
def test_a_gradient_that_is_zero_but_for_rounding_is_no_mistake(seed, plan):
    torch.manual_seed(seed)
    one, other = (plain.Made(attends, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3))) for _ in range(2))
    model = nn.Sequential(one, nn.LayerNorm(8), other, nn.Linear(8, 8))
    verified(model, plan, (torch.randn(10, 7, 8), torch.randn(10, 7, 8)))


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
def test_nothing_is_left_behind(stepped):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6))
    loss, (x, y) = Weighs(), plain.batch(8)
    with Pipeline(model, OneFOneB(2, 2), loss) as pipe:
        if stepped:
            pipe.step(x, y)
        model[3].bias.grad = None
        with no_trace(model, loss):
            pipe.verify(x, y)


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
    assert "wrong gradients: 1 of 5" in told
    assert "micro-batch 0 is the first that differs, at 1.weight (stage 1)" in told
    assert "try: look for state" in told


def test_a_stage_that_keeps_state_is_right_where_nothing_comes_between():
    torch.manual_seed(0)
    assert verified([nn.Linear(6, 6), plain.Remembers()], OneFOneB(2, 4)).exact  # the last stage: F0 B0 F1 B1 ...


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
    told = r"(?s)^(?=.*micro-batch)(?=.*state that a stage stores)(?=.*an earlier stage)"
    refused(told, [first, second], plan, call="verify", error=VerificationError)


@pytest.mark.parametrize("name", schedules)
def test_hooks_on_a_stages_input_and_on_what_it_returns_run_as_in_plain_training(name):
    class Hooked(Reaches):
        def forward(self, x):
            made = super().forward(x)
            hooks(made)
            return made

    plan = with_stages(name, 4, 4)
    proof = verified([Hooked(hooks) for _ in range(plan.stages)], plan)
    assert proof.exact or not in_order(plan)
    assert proof.largest_difference < 1e-6


def test_hooks_of_two_stages_on_one_tensor_are_found_where_their_order_matters():
    class Clips(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            made.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return made

    torch.manual_seed(0)
    told = r"0\.weight .*differs"
    refused(told, [Clips(6, 6), Reaches(hooks)], GPipe(2, 4), call="verify", error=VerificationError)


def warms(self, x):
    """Count the calls, and compute something else after many of them."""
    self.inner.calls += 1
    return self.linear(x) * (1 if self.inner.calls < 1000 else 2)


@pytest.mark.parametrize("plan", [DualPipe(2, 4), replicate(GPipe(2, 2), 2)], ids=["dualpipe", "replicas"])
def test_state_that_each_rank_of_a_replicated_stage_has_for_itself_is_not_verified(plan):
    stages = [nn.Linear(6, 6), plain.Made(warms, linear=nn.Linear(6, 6), inner=nn.Module())]
    stages[1].inner.calls = 0
    proof = verified(stages, plan)
    assert proof.whole_batch_difference < 1e-5
    assert "stage 1 is on ranks" in proof.unproven[0]
    assert "inner.calls" in proof.unproven[0]
    assert not verified(stages, GPipe(2, 4)).unproven


def sum_of_squares(output, target):
    return (output - target).pow(2).sum()


@pytest.mark.parametrize(
    ("loss", "reduction", "told"),
    [
        (sum_of_squares, "mean", "reduction is 'mean'(?s:.*)try: reduction='sum'$"),
        (mse, "sum", "reduction is 'sum'(?s:.*)try: reduction='mean'$"),
        (mse, lambda target: len(target) ** 2, "reduction is a function(?s:.*)try: reduction='mean'$"),
    ],
    ids=["a sum taken for a mean", "a mean taken for a sum", "wrong weights"],
)
def test_a_wrong_reduction_is_told(loss, reduction, told):
    how = {"call": "verify", "error": VerificationError}
    error = refused(told, plain.mlp(4), OneFOneB(2, 3), 7, loss, reduction=reduction, **how)
    assert "their sum is not the whole batch's" in str(error)
    assert "(stage " in str(error)
    if reduction == "mean":
        refused(told, [plain.mlp(2), plain.mlp(2)], OneFOneB(2, 3), 7, loss, **how)  # stages given as a list


def hard_triplets(output, target):
    """The furthest row of the same sign against the nearest of the other: a loss of several rows."""
    apart, same = torch.cdist(output, output), target[:, :1].sign() == target[:, 0].sign()
    return nn.functional.relu((apart * same).amax(1) - (apart + 1e9 * same).amin(1) + 1).mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: mse(output, target).sqrt(),
        lambda output, target: (output - target).square().amax(),
        lambda output, target: mse(output, target) * (2 if (output - target).abs().mean() > 0.9 else 1),
        hard_triplets,
    ],
    ids=["a root", "a maximum", "a branch", "hard triplets"],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_loss_of_several_rows_is_no_wrong_reduction(loss, seed):
    torch.manual_seed(seed)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(16, 8), torch.randn(16, 8))
    error = refused("their sum is not the whole", model, OneFOneB(2, 4), batch, loss, "verify", VerificationError)
    assert "reduction is" not in str(error)
    assert "losses are equal" not in str(error)


def test_a_branch_on_a_later_micro_batch_is_named():
    torch.manual_seed(0)
    branches = plain.Made(lambda self, x: x.relu() if x.mean() > 0.02 else x.tanh())
    model, batch = nn.Sequential(nn.Linear(8, 8), branches, nn.Linear(8, 8)), (torch.randn(16, 8), torch.randn(16, 8))
    told = "1 has other values for the same rows in the whole batch, .* it branches on values"
    refused(told, model, OneFOneB(2, 4), batch, call="verify", error=VerificationError)


def test_a_stage_that_depends_on_the_batch_is_told_from_a_wrong_reduction():
    cuts = plain.Made(lambda _, x: x if len(x) == 12 or x.sum() > 0 else x + 0.5 * (x.detach() - x))
    model = nn.Sequential(nn.Linear(6, 6), cuts, nn.Linear(6, 6), nn.Linear(6, 6))
    told = r"\n  outputs and losses are equal: but 0\.bias \(stage 0\) and the layers before it have other gradients"
    refused(told, model, OneFOneB(4, 3), 12, call="verify", error=VerificationError)


ONE_OUTPUT = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))


@pytest.mark.filterwarnings("ignore:Using a target size")  # PyTorch warns: one more reason to say it again
def test_a_target_that_is_broadcast_is_told_from_a_stage_that_mixes_rows():
    x, y = plain.batch(12)
    told = r"\n  the output is \[12, 1\] and y is \[12\]: the loss broadcasts them, .*\n  try: y\.view\(12, 1\)$"
    refused(told, ONE_OUTPUT, OneFOneB(2, 3), (x, y[:, 0]), call="verify", error=VerificationError)


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
    refused("differs from the plain", model, OneFOneB(2, 4), call="verify", error=VerificationError)


def test_batch_norm_alone_is_equal_to_the_micro_batches():
    torch.manual_seed(0)
    proof = verified(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)), OneFOneB(2, 4))
    assert (proof.compared, proof.exact, len(proof.unproven)) == (True, True, 1)


DROPS = plain.Made(lambda self, x: nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), DROPS], ids=["a layer", "a function"])
@pytest.mark.parametrize("schedule", [Plan([[F(1, 0), F(0, 0), B(1, 0), B(0, 0)]], 1, 2), ZBH1(3, 4)], ids=["one", "3"])
def test_a_model_with_dropout_is_compared_bit_for_bit(dropout, schedule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(dropout, nn.Linear(6, 6)), nn.Linear(6, 6), nn.ReLU(), dropout)
    with Pipeline(model, schedule, mse) as pipe:
        for _ in range(2):
            proof = pipe.verify(*plain.batch(8))
            assert (proof.compared, proof.exact, proof.whole_batch_difference) == (True, True, None)
            assert "draws anew for each micro-batch" in str(proof)
            pipe.step(*plain.batch(8))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_wrong_gradient_of_a_model_with_dropout_is_told(mode):
    model = nn.Sequential(nn.Linear(6, 6), DROPS, nn.Linear(6, 6), plain.Counts())
    getattr(model, mode)()
    refused("differs from the plain", model, OneFOneB(2, 4), call="verify", error=VerificationError)


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_that_is_on_in_evaluation_is_compared_too(ranks):
    always = plain.Made(lambda self, x: nn.functional.dropout(x, 0.5))
    proof = verified(nn.Sequential(nn.Linear(6, 6), always, nn.Linear(6, 6)).eval(), GPipe(ranks, 4))
    assert proof.exact


def test_noise_on_gradients_is_said():
    def noisy(_, x):
        x = x * 1
        x.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return x

    proof = verified(nn.Sequential(nn.Linear(6, 6), plain.Made(noisy), nn.Linear(6, 6)), GPipe(3, 2))
    assert not proof.compared
    assert "draws other random numbers" in str(proof)


def test_a_proof_that_could_not_be_had_says_so():
    told = str(Verification(4, 2, exact=False, largest_difference=0.83, unproven=("dropout",), compared=False))
    first, second = told.splitlines()
    assert first.startswith("4 gradients could not be compared: ")
    assert "The largest difference is 8.3e-01 " in first
    assert second == "not verified: dropout"


def test_dropout_that_drops_nothing_hides_nothing():
    assert verified(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0)), GPipe(2, 2), 4).unproven == ()


def test_stages_given_as_a_list_are_held_against_the_whole_batch_too():
    proof = verified([plain.mlp(2), plain.mlp(2)], GPipe(2, 2), 4)
    assert proof.exact
    assert proof.whole_batch_difference < 1e-5


def test_stages_for_a_micro_batchs_rows_are_verified_without_the_whole_batch():
    views = plain.Made(lambda _, x: x.view(4, 2, 3).view(4, 6))
    proof = verified([nn.Linear(6, 6), views], GPipe(2, 2))
    assert (proof.exact, proof.whole_batch_difference) == (True, None)
    (reason,) = proof.unproven
    assert reason.startswith("the stages, given as a list, do not take the whole batch (RuntimeError: shape")


def test_a_loss_that_puts_the_shapes_right_itself_is_not_said_to_spread():
    x, y = plain.batch(12)
    how = (ONE_OUTPUT, OneFOneB(2, 3), (x, y[:, 0]), lambda output, target: sum_of_squares(output.squeeze(1), target))
    refused("reduction is 'mean'", *how, call="verify", error=VerificationError)
    assert verified(*how, reduction="sum").exact


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
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), plain.Made(lambda _, x: x.detach()), nn.Linear(6, 6))
    proof = verified(model, OneFOneB(2, 2), 4)
    assert proof.idle == ("0.weight (stage 0)", "0.bias (stage 0)")
    told = str(proof).splitlines()[1]
    assert told.startswith("2 parameters got no gradient")
    assert told.endswith(": 0.weight (stage 0), 0.bias (stage 0)")


@pytest.mark.parametrize(
    ("number", "middle", "told"),
    [
        (float("nan"), nn.Identity(), r"is NaN, .*\n  micro-batch 2 is the first that makes one, and its rows of x "),
        (3e38, nn.Identity(), r"is infinite, .*\n  micro-batch 2 is the first that makes one\n"),
        (0.0, plain.Made(lambda _, x: x.sqrt()), r"\n  micro-batch 0 is the first that makes one\n"),
    ],
)
def test_what_is_no_number_in_the_plain_model_either_is_no_fault_of_the_pipelines(number, middle, told):
    x, y = plain.batch(8)
    x[5, 2] = number
    model = nn.Sequential(nn.Linear(6, 6), middle, nn.Linear(6, 6))
    error = refused(told, model, OneFOneB(2, 4), (x, y), call="verify", error=VerificationError)
    assert "in the plain model too: there is nothing to compare" in str(error)
    assert "\n  try: Pipeline(..., watch_nan=True)" in str(error)


def test_a_model_that_writes_into_the_batch_is_proved_and_the_batch_is_as_before():
    x, y = plain.batch(8)
    x[0, 0] = 3
    before = x.clone()
    for first in (plain.Made(lambda _, x: x.add_(1)), nn.ReLU(inplace=True)):
        assert verified(nn.Sequential(first, *plain.mlp(4)), OneFOneB(2, 4), (x, y)).exact
        assert torch.equal(x, before)


def test_an_error_of_the_plain_model_says_that_it_is_not_the_pipelines():
    """The sigmoid's output is overwritten, which its backward needs; in the pipeline, it is the next stage's copy."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.ReLU(inplace=True), nn.Linear(6, 6))
    stepped(model, OneFOneB(4, 2), 4)
    told = "modified by an inplace operation"
    error = refused(told, model, OneFOneB(4, 2), 4, call="verify", error=RuntimeError)
    assert error.__notes__ == ["raised where verify ran the plain model, without the pipeline"]


def test_random_numbers_that_no_dropout_draws_are_not_called_dropout():
    noise = plain.Made(lambda _, x: x + torch.randn_like(x))
    (reason,) = verified(nn.Sequential(nn.Linear(6, 6), noise, nn.Linear(6, 6)), OneFOneB(2, 2), 4).unproven
    assert reason.startswith("the model draws anew for each micro-batch")


def test_a_frozen_model_part_is_not_compared():
    model = plain.mlp(4)
    model[0].requires_grad_(False)
    assert verified(model, GPipe(2, 2), 4).parameters == 2


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


def test_verify_puts_back_a_buffer_that_was_replaced():
    def counts(self, x):
        self.count = self.count + 1  # another tensor, in place of writing into it
        return x

    model = nn.Sequential(*plain.mlp(2), plain.Made(counts))
    model[-1].register_buffer("count", torch.zeros(()))
    verified(model, OneFOneB(2, 3), 6)
    assert model[-1].count == 0


def test_a_slightly_wrong_reduction_is_told_too():
    torch.manual_seed(0)
    target = torch.randint(3, (3000,))
    target[:5] = -100
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(3000, 4)
    how = (model, OneFOneB(2, 3), (x, target), nn.functional.cross_entropy)
    refused("reduction is a function", *how, reduction=len, call="verify", error=VerificationError)
    assert verified(*how, reduction=lambda each: (each >= 0).sum()).whole_batch_difference < 1e-5


def test_expanded_buffers_and_sparse_gradients_are_verified():
    looks = plain.Made(lambda self, rows: self.table(rows) * self.mask[0], table=nn.Embedding(4, 6, sparse=True))
    looks.register_buffer("mask", torch.ones(1, 6).expand(3, 6))
    assert verified([looks, nn.Linear(6, 6)], OneFOneB(2, 4), (torch.arange(8) % 3, plain.batch(8)[1])).exact


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
