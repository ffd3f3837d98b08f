"""What a step does to the model, and what it gives back: training is plain training."""

from __future__ import annotations

import copy
import threading
import time
from contextvars import ContextVar
from pipes import mse, stepped, verified

import plain
import pytest
import torch
from torch import nn

from pipelab import GPipe, OneFOneB, Pipeline, errors, schedules


def test_a_step_adds_to_the_gradients_and_never_zeroes_them():
    model, (x, y) = plain.mlp(4), plain.batch(6)
    with Pipeline(model, OneFOneB(2, 3), mse) as pipe:
        pipe.step(x, y)
        holders = [parameter.grad for parameter in model.parameters()]
        once = copy.deepcopy(holders)
        pipe.step(x, y)
    for parameter, holder, gradient in zip(model.parameters(), holders, once, strict=True):
        assert parameter.grad is holder
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_the_loss_is_the_whole_batchs_a_number_without_history():
    model, (x, y) = plain.mlp(4), plain.batch(7)
    step = stepped(model, OneFOneB(2, 3), (x, y))
    torch.testing.assert_close(step.loss, mse(model(x), y).detach())
    assert step.loss.shape == ()
    assert not step.loss.requires_grad
    assert f"loss={float(step.loss):g}" in repr(step)
    kept = copy.deepcopy(step)
    assert (kept.loss, kept.trace.makespan) == (step.loss, step.trace.makespan)


def test_a_loss_of_shape_one_counts_as_a_number():
    step = stepped(plain.mlp(4), GPipe(2, 2), 4, lambda output, target: mse(output, target).reshape(1, 1))
    assert step.loss.shape == ()


@pytest.mark.parametrize("name", schedules)
def test_outputs_have_the_batchs_order_and_no_history(name):
    schedule = schedules[name](2, 4)
    model, (x, y) = plain.mlp(2 * schedule.plan().stages), plain.batch(10)
    with Pipeline(model, schedule, mse) as pipe:
        found = [pipe.step(x, y).outputs, pipe.forward(x)]
    expected = torch.cat([model(rows) for rows in x.tensor_split(4)])
    for outputs in found:
        assert torch.equal(outputs, expected)
        assert not outputs.requires_grad


@pytest.mark.parametrize("learns", [True, False])
def test_a_forward_touches_no_gradient_and_needs_no_parameter_that_learns(learns):
    model, (x, _) = plain.mlp(4).requires_grad_(learns), plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        torch.testing.assert_close(pipe.forward(x), model(x))
    assert all(parameter.grad is None for parameter in model.parameters())


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


def summed(output, target):
    return (output - target).pow(2).sum()


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 0.5, 2.0, 1.0])


def weighted_cross_entropy(output, target):
    return nn.functional.cross_entropy(output, target, weight=CLASS_WEIGHTS, ignore_index=-100)


def weight_of(target):
    return CLASS_WEIGHTS[target[target != -100]].sum()


def masked(output, target):  # 0 / 0 where every row is masked
    mask = (target >= 0).float()
    return (output.pow(2).mean(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "reduction", "y"),
    [
        pytest.param(summed, "sum", plain.batch(7)[1], id="a sum"),
        pytest.param(weighted_cross_entropy, weight_of, [0, 1, 2, -100, 4, 3, 2], id="one row ignored"),
        pytest.param(weighted_cross_entropy, weight_of, [0, 1, 2, -100, -100, 3, 2], id="a micro-batch ignored"),
        pytest.param(weighted_cross_entropy, weight_of, [-100, -100, -100, 1, 2, 3, 2], id="the first one ignored"),
        pytest.param(masked, lambda target: (target >= 0).sum(), [0, 1, 2, 3, 4, -1, -1], id="a loss that is NaN"),
    ],
)
def test_a_reduction_makes_losses_that_weigh_rows_exact(loss, reduction, y):
    model, x, y = plain.mlp(4), plain.batch(7)[0], torch.as_tensor(y)
    total = plain.at_once(model, loss, x, y)
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 3), loss, reduction=reduction, watch_nan=loss is masked) as pipe:
        torch.testing.assert_close(pipe.step(x, y).loss, total)
        assert plain.difference(plain.taken(model), expected) <= 1e-6
        assert loss is masked or pipe.verify(x, y)


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
    ours, theirs = (make(each.parameters()) for each in (model, twin))
    with Pipeline(model, OneFOneB(4, 5), mse) as pipe:
        if made == "after":
            ours = make(pipe.parameters())
        for number in range(5):
            x, y = plain.batch(12, seed=number)
            for optimizer, _ in (ours, theirs):
                optimizer.zero_grad()
            torch.testing.assert_close(pipe.step(x, y).loss, plain.one_after_another(twin, mse, x, y, 5))
            for optimizer, scheduler in (ours, theirs):
                optimizer.step()
                scheduler.step()
    for (name, mine), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_parameters_and_state_are_the_models_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    x, y = plain.batch(4)
    with Pipeline(model, GPipe(2, 2), mse) as pipe:
        pipe.step(x, y)
        ours, theirs = ({key: value.data_ptr() for key, value in each.state_dict().items()} for each in (pipe, model))
        assert ours == theirs
        assert list(ours) == keys
        assert {id(parameter) for parameter in pipe.parameters()} == {id(parameter) for parameter in before.values()}
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        saved, evaluated = copy.deepcopy(pipe.state_dict()), pipe.eval().forward(x)
        with torch.no_grad():
            model[0].weight.zero_()
        model.load_state_dict(saved)
        torch.testing.assert_close(pipe.forward(x), evaluated)
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


def in_single_precision(self, x):
    """Keep out of the caller's autocast."""
    with torch.autocast("cpu", enabled=False):
        return self.linear(x.float())


def bfloat_mse(output, target):
    return mse(output.float(), target)


def test_the_callers_autocast_holds_in_the_workers_forward():
    """As in plain training the forward and the loss run under autocast, and the backward does not."""
    torch.manual_seed(0)
    one, other = (plain.Made(in_single_precision, linear=nn.Linear(6, 6)) for _ in range(2))
    model = nn.Sequential(nn.Linear(6, 6), one, nn.Tanh(), other, nn.Linear(6, 6))
    seen = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    x, y = plain.batch(9)
    for rows, targets in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            weighted = bfloat_mse(model(rows), targets) * (len(rows) / len(x))
        weighted.backward()
    expected = plain.taken(model)
    with Pipeline(model, OneFOneB(2, 4), bfloat_mse) as pipe:
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
    model, (x, y) = plain.mlp(4), plain.batch(4)
    with Pipeline(model, OneFOneB(2, 2), bfloat_mse) as pipe, torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe.step(x, y).outputs.abs().sum() > 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
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
    with torch.autograd.graph.save_on_cpu():
        assert verified(plain.mlp(4), GPipe(2, 2), 4).exact


FACTOR = ContextVar("FACTOR", default=1)


def test_the_callers_context_variables_hold_in_the_workers():
    reads = plain.Made(lambda _, x: x * FACTOR.get())
    model = nn.Sequential(nn.Linear(6, 6), reads, nn.Linear(6, 6), reads)
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
    looks = plain.Made(lambda _, x: seen.append(torch.get_num_threads()) or x)
    stepped([nn.Sequential(nn.Linear(6, 6), looks) for _ in range(3)], GPipe(3, 1), 4, intra_op_threads=3)
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
        for fact in (GPipe(2, 2), "2, 1 layers", "20, 10 parameters", "on cpu, cpu"):
            assert str(fact) in repr(pipe)


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
    proof = verified(plain.mlp(2), GPipe(2, 2), 4, nn.MSELoss(reduction="sum"), reduction="sum")
    assert proof.whole_batch_difference < 1e-5


def test_emulated_layers_of_one_stage_add_up_beside_real_work():
    from pipelab.engine.emulation import EmulatedStage

    def works(_, x):
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            pass
        return x

    model = nn.Sequential(EmulatedStage(10, 1), EmulatedStage(10, 1), plain.Made(works), EmulatedStage(10, 1))
    forward, backward = stepped(model, GPipe(1, 1), (torch.ones(1, 1), torch.ones(1, 1))).trace.events
    assert forward.duration >= 50  # ms: three sleeps and the work
    assert backward.duration >= 3
