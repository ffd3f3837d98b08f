"""What a step does to the model, and what it gives back: training is plain training."""

from __future__ import annotations

import copy
import threading
import time
from contextvars import ContextVar

import plain
import pytest
import torch
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, errors, schedules

mse = nn.functional.mse_loss


def test_a_step_adds_to_the_gradients_and_never_zeroes_them():
    model = plain.mlp(4)
    x, y = plain.batch(6)
    with Pipeline(model, OneFOneB(2, 3), mse) as pipe:
        pipe.step(x, y)
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        holders = {name: parameter.grad for name, parameter in model.named_parameters()}
        pipe.step(x, y)
    for name, parameter in model.named_parameters():
        assert parameter.grad is holders[name]
        torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_the_loss_is_the_whole_batchs_a_number_without_history():
    model = plain.mlp(4)
    x, y = plain.batch(7)
    with Pipeline(model, OneFOneB(2, 3), mse) as pipe:
        step = pipe.step(x, y)
    torch.testing.assert_close(step.loss, mse(model(x), y).detach())
    assert step.loss.shape == ()
    assert not step.loss.requires_grad
    assert f"loss={float(step.loss):g}" in repr(step)


def test_a_loss_of_shape_one_counts_as_a_number():
    x, y = plain.batch(4)
    with Pipeline(plain.mlp(4), GPipe(2, 2), lambda output, target: mse(output, target).reshape(1, 1)) as pipe:
        assert pipe.step(x, y).loss.shape == ()


@pytest.mark.parametrize("name", schedules)
def test_outputs_have_the_batchs_order_and_no_history(name):
    schedule = schedules[name](2, 4)
    model = plain.mlp(2 * schedule.plan().stages)
    x, y = plain.batch(10)
    with Pipeline(model, schedule, mse) as pipe:
        outputs = pipe.step(x, y).outputs
        evaluated = pipe.forward(x)
    with torch.no_grad():
        expected = torch.cat([model(rows) for rows in x.tensor_split(4)])
    assert torch.equal(outputs, expected)
    assert torch.equal(evaluated, expected)
    assert not outputs.requires_grad
    assert not evaluated.requires_grad


def test_a_forward_touches_no_gradient():
    model = plain.mlp(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        pipe.forward(plain.batch(4)[0])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_needs_no_parameter_that_learns():
    model = plain.mlp(4).requires_grad_(False)
    x, _ = plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        torch.testing.assert_close(pipe.forward(x), model(x))


def test_evaluation_mode_is_the_models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6))
    x, y = plain.batch(8)
    with Pipeline(model, OneFOneB(2, 2), mse) as pipe:
        pipe.step(x, y)
        assert model[1].num_batches_tracked == 2
        model.eval()
        torch.testing.assert_close(pipe.forward(x), model(x).detach())
        torch.testing.assert_close(pipe.step(x, y).outputs, model(x).detach())
        assert model[1].num_batches_tracked == 2


def test_a_loss_that_sums_is_summed():
    def loss(output, target):
        return (output - target).pow(2).sum()

    model = plain.mlp(4)
    x, y = plain.batch(7)
    total = plain.at_once(model, loss, x, y)
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 3), loss, reduction="sum") as pipe:
        step = pipe.step(x, y)
    torch.testing.assert_close(step.loss, total)
    assert plain.difference(plain.taken(model), expected) <= 1e-6


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 0.5, 2.0])


def weighted_cross_entropy(output, target):
    return nn.functional.cross_entropy(output, target, weight=CLASS_WEIGHTS, ignore_index=-100)


def weight_of(target):
    kept = target[target != -100]
    return CLASS_WEIGHTS[kept].sum()


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param([0, 1, 2, -100, 4, 3, 2], id="one row ignored"),
        pytest.param([0, 1, 2, -100, -100, 3, 2], id="a whole micro-batch ignored"),
        pytest.param([-100, -100, -100, 1, 2, 3, 2], id="the first micro-batch ignored"),
    ],
)
def test_a_reduction_function_makes_class_weights_and_ignored_rows_exact(labels):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    x, y = plain.batch(7)[0], torch.tensor(labels)
    loss = plain.at_once(model, weighted_cross_entropy, x, y)
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 3), weighted_cross_entropy, reduction=weight_of) as pipe:
        step = pipe.step(x, y)
        torch.testing.assert_close(step.loss, loss)
        assert plain.difference(plain.taken(model), expected) <= 1e-6
        pipe.verify(x, y)


def test_a_micro_batch_that_weighs_nothing_adds_nothing_even_where_its_loss_is_nan():
    def masked(output, target):  # 0 / 0 where every row is masked
        mask = (target >= 0).float()
        return (output.pow(2).mean(1) * mask).sum() / mask.sum()

    model = plain.mlp(4)
    x, y = plain.batch(6)[0], torch.tensor([0, 1, 2, 3, -1, -1])
    loss = plain.at_once(model, masked, x, y)
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 3), masked, reduction=lambda target: (target >= 0).sum(), watch_nan=True) as pipe:
        step = pipe.step(x, y)
    torch.testing.assert_close(step.loss, loss)
    assert plain.difference(plain.taken(model), expected) <= 1e-6


def adam(parameters):
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def momentum(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("make", [adam, momentum])
def test_five_steps_of_training_are_five_steps_of_plain_training(make, made):
    model = plain.mlp(8)
    twin = copy.deepcopy(model)
    if made == "before":
        optimizer, scheduler = make(model.parameters())
    twins_optimizer, twins_scheduler = make(twin.parameters())
    with Pipeline(model, OneFOneB(4, 5), mse) as pipe:
        if made == "after":
            optimizer, scheduler = make(pipe.parameters())
        for number in range(5):
            x, y = plain.batch(12, seed=number)
            optimizer.zero_grad()
            loss = pipe.step(x, y).loss
            optimizer.step()
            scheduler.step()
            twins_optimizer.zero_grad()
            expected = plain.one_after_another(twin, mse, x, y, 5)
            twins_optimizer.step()
            twins_scheduler.step()
            torch.testing.assert_close(loss, expected)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_parameters_and_state_are_the_models_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    x, y = plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)
        assert list(pipe.state_dict()) == keys
        assert {key: value.data_ptr() for key, value in pipe.state_dict().items()} == {
            key: value.data_ptr() for key, value in model.state_dict().items()
        }
        assert {id(parameter) for parameter in pipe.parameters()} == {id(parameter) for parameter in before.values()}
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        saved = copy.deepcopy(pipe.state_dict())
        with torch.no_grad():
            model[0].weight.zero_()
        model.load_state_dict(saved)
        torch.testing.assert_close(
            pipe.forward(x), torch.cat([model(rows) for rows in x.split(2)]).detach(), rtol=1, atol=1
        )
    assert list(model.state_dict()) == keys


def test_a_list_of_stages_has_a_state_with_the_stages_numbers():
    with Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], GPipe(2, 2), mse) as pipe:
        assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_clipping_is_by_the_norm_of_all_stages():
    model = plain.mlp(8)
    x, y = plain.batch(8)
    plain.one_after_another(model, mse, x, y, 4)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    clipped = plain.taken(model)
    with Pipeline(model, OneFOneB(4, 4), mse) as pipe:
        pipe.step(x, y)
        assert torch.equal(pipe.clip_grad_norm_(0.01), expected)
    assert plain.equal(plain.taken(model), clipped)


class SinglePrecision(nn.Module):
    """A layer that keeps out of the caller's autocast."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


def bfloat_mse(output, target):
    return mse(output.float(), target)


@pytest.mark.parametrize("loss", [bfloat_mse])
def test_the_callers_autocast_holds_in_the_workers_forward(loss):
    """As in plain training the forward and the loss run under autocast, and the backward does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), SinglePrecision(), nn.Tanh(), SinglePrecision(), nn.Linear(6, 6))
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    x, y = plain.batch(9)
    for rows, targets in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weighted = loss(model(rows), targets) * (len(rows) / len(x))
        weighted.backward()
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 4), loss) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.step(x, y)
        assert plain.equal(plain.taken(model), expected)
        assert set(seen) == {torch.bfloat16}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert pipe.forward(x).dtype == torch.bfloat16
            assert pipe.verify(x, y).exact
        seen.clear()
        assert pipe.step(x, y).outputs.dtype == torch.float32  # it holds while it holds, no longer
        assert set(seen) == {torch.float32}


def test_weights_cast_by_autocast_are_cast_anew_in_the_next_step():
    model = plain.mlp(4)
    x, y = plain.batch(4)
    with Pipeline(model, OneFOneB(2, 2), bfloat_mse) as pipe, torch.autocast("cpu", dtype=torch.bfloat16):
        before = pipe.step(x, y).outputs
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert before.abs().sum() > 0
        assert pipe.step(x, y).outputs.abs().sum() == 0


def test_the_callers_hooks_on_saved_tensors_hold_in_the_workers():
    """Every tensor that a stage saves is packed by the caller's hook, and gradients stay what they are."""
    model = plain.mlp(8)
    x, y = plain.batch(8)
    expected = plain.gradients(model, mse, x, y, 4)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(threading.get_ident())
        return tensor

    def unpack(tensor):
        unpacked.append(threading.get_ident())
        return tensor

    with Pipeline(model, OneFOneB(2, 4), mse) as pipe:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            pipe.step(x, y)
        assert plain.equal(plain.taken(model), expected)
        assert len(set(packed)) == 2
        assert len(packed) == len(unpacked)
        assert threading.get_ident() not in packed
        before = len(packed)
        pipe.step(x, y)  # they hold while they hold, no longer
        assert len(packed) == before


def test_activations_can_wait_on_the_cpu():
    """`save_on_cpu` is such a hook."""
    model = plain.mlp(4)
    x, y = plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe, torch.autograd.graph.save_on_cpu():
        pipe.step(x, y)
        assert pipe.verify(x, y).exact


FACTOR = ContextVar("FACTOR", default=1)


class Reads(nn.Module):
    """Multiplies by a context variable."""

    def forward(self, x):
        return x * FACTOR.get()


def test_the_callers_context_variables_hold_in_the_workers():
    model = nn.Sequential(nn.Linear(6, 6), Reads(), nn.Linear(6, 6), Reads())
    x, y = plain.batch(8)
    with Pipeline(model, GPipe(2, 4), mse) as pipe:
        token = FACTOR.set(3)
        expected = model(x).detach()
        assert not torch.equal(expected, model[2](model[0](x)))
        torch.testing.assert_close(pipe.step(x, y).outputs, expected)
        torch.testing.assert_close(pipe.forward(x), expected)
        assert pipe.verify(x, y).exact
        FACTOR.reset(token)
        torch.testing.assert_close(pipe.forward(x), model(x).detach())  # as they are at each call


def test_a_step_without_gradients_switched_on_still_learns():
    model = plain.mlp(4)
    x, y = plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)
        expected = plain.taken(model)
        pipe.forward(x)
        pipe.step(x, y)
    assert plain.equal(plain.taken(model), expected)


def test_making_and_using_a_pipeline_leaves_the_callers_processor_threads_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Pipeline(plain.mlp(4), GPipe(2, 2), mse, intra_op_threads=1) as pipe:
            pipe.step(*plain.batch(4))
            seen = [torch.get_num_threads()]
            another = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            another.start()
            another.join()
            assert seen == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_intra_op_threads_hold_in_every_worker():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x

    model = [nn.Sequential(nn.Linear(6, 6), Look()) for _ in range(3)]
    with Pipeline(model, GPipe(3, 1), mse, intra_op_threads=3) as pipe:
        pipe.step(*plain.batch(4))
    assert seen == [3, 3, 3]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *(({"reduction": each}, "expected 'mean', 'sum', or a function") for each in ("max", None, 3)),
        *(({"intra_op_threads": each}, "intra_op_threads") for each in (0, -1, 1.5)),
        *(({"timeout": each}, "timeout") for each in (0, -1.0)),
        ({"replicated_buffers": "mean"}, "replicated_buffers='mean': expected 'refuse' or 'lowest'"),
        ({"all_reduce_runs": "beside"}, "all_reduce_runs='beside': expected 'in-row'"),
        ({"engine": "mpi"}, "engine='mpi': expected 'threads'"),
    ],
)
def test_an_argument_that_a_pipeline_does_not_know_is_refused(arguments, told):
    with pytest.raises(errors.UsageError, match=told):
        Pipeline(plain.mlp(4), GPipe(2, 2), mse, **arguments)


def test_a_pipeline_tells_its_plan_its_stages_and_devices():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with Pipeline(model, GPipe(2, 2), mse, devices=["cpu", "cpu"]) as pipe:
        assert repr(pipe) == (
            "Pipeline(GPipe(ranks=2, microbatches=2), Stages(2, 1 layers; 20, 10 parameters), on cpu, cpu)"
        )


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [
        (None, "loss_fn=None: expected a function"),
        (nn.MSELoss, r"loss_fn is the class MSELoss: make one, MSELoss\(\)"),
        (nn.MSELoss(reduction="sum"), r"has reduction='sum' .* pass Pipeline\(..., reduction='sum'\)"),
        (nn.MSELoss(reduction="none"), "reduction='none'"),
    ],
)
def test_a_loss_function_that_cannot_be_right_is_refused_at_once(loss_fn, told):
    with pytest.raises(errors.LossError, match=told):
        Pipeline(plain.mlp(2), GPipe(2, 2), loss_fn)


def test_a_loss_that_sums_is_taken_when_the_pipeline_knows():
    with Pipeline(plain.mlp(2), GPipe(2, 2), nn.MSELoss(reduction="sum"), reduction="sum") as pipe:
        assert pipe.verify(*plain.batch(4)).whole_batch_difference < 1e-5


def test_emulated_layers_of_one_stage_add_up_beside_real_work():
    from pipelab.engine.emulation import EmulatedStage

    class Work(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end:
                pass
            return x

    model = nn.Sequential(EmulatedStage(10, 1), EmulatedStage(10, 1), Work(), EmulatedStage(10, 1))
    with Pipeline(model, GPipe(1, 1), nn.MSELoss()) as pipe:
        forward, backward = pipe.step(torch.ones(1, 1), torch.ones(1, 1)).trace.events
    assert forward.duration >= 50  # ms: three sleeps and the work
    assert backward.duration >= 3
