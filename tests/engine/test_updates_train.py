"""Updates within a step train as plain training with stashed weights does; what they could not do right is refused."""

from __future__ import annotations

import copy
import json
import os
from functools import partial
from itertools import pairwise
from pipes import no_trace, stepped, verified

import plain
import pytest
import torch
from stashed import Stashed
from torch import nn

import pipelab

RATE = partial(torch.optim.SGD, lr=0.5)


def made(ranks):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(ranks)))


FLUSHED = pipelab.Plan([[*row, pipelab.U(3, stage)] for stage, row in enumerate(pipelab.GPipe(2, 4).plan().rows)])


@pytest.mark.parametrize(
    "plan", [*(kind(ranks, 7) for kind in (pipelab.TwoBW, pipelab.PipeDream) for ranks in (1, 3)), FLUSHED]
)
def test_updates_train_as_plain_training_with_stashed_weights_bit_for_bit(plan):
    plan = getattr(plan, "plan", lambda: plan)()
    model, oracle, (x, y) = made(plan.ranks), made(plan.ranks), plain.batch(2 * plan.microbatches, 4)
    stepped(model, plan, (x, y), optimizer=RATE)
    Stashed(oracle, plan, RATE).step(x.chunk(plan.microbatches), y.chunk(plan.microbatches), nn.functional.mse_loss)
    assert all(map(torch.equal, model.parameters(), oracle.parameters()))
    assert all(each.grad is None for each in model.parameters())


def test_pipedreams_last_stage_is_not_stale_and_its_first_is():
    model, seen = made(2), ([], [])
    for stage, weights in zip(model, seen, strict=True):
        stage.register_forward_pre_hook(lambda part, _, kept=weights: kept.append(part[0].weight.detach().clone()))
    stepped(model, pipelab.PipeDream(2, 6), plain.batch(12, 4), optimizer=RATE)
    first, last = seen
    assert all(not torch.equal(one, other) for one, other in pairwise(last))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


@pytest.mark.parametrize("optimizer", [None, RATE])
def test_without_an_optimizer_updates_change_nothing_and_verify_freezes_them(optimizer):
    model = made(2)
    before = [each.detach().clone() for each in model.parameters()]
    assert verified(model, pipelab.PipeDream(2, 4), plain.batch(8, 4), optimizer=optimizer).exact
    assert all(map(torch.equal, model.parameters(), before))


def test_processes_do_not_run_updates():
    with pytest.raises(pipelab.EngineError, match="update"):
        pipelab.Pipeline(made(2), pipelab.PipeDream(2, 4), nn.MSELoss(), engine="torch")


@pytest.mark.parametrize("text", ["0F0 0F1 0B0 0U0 0B1", "0F0 0F1 0B1 0B0 0U0"])
def test_gradients_that_no_update_takes_are_added_to_those_that_were_there(text):
    model, (x, y) = made(1), plain.batch(4, 4)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    oracle = copy.deepcopy(model)
    stepped(model, pipelab.Plan.parse(text), (x, y), optimizer=RATE)
    Stashed(oracle, pipelab.Plan.parse(text), RATE).step(x.chunk(2), y.chunk(2), nn.functional.mse_loss)
    for ours, theirs in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.allclose(ours.grad, 1 + theirs.grad)


OTHER = made(2)


def tied():
    model = made(2)
    model[1][0].weight = model[0][0].weight
    return model


def hooked():
    model = made(2)
    model[1][0].bias.register_post_accumulate_grad_hook(print)
    return model


@pytest.mark.parametrize(
    ("model", "plan", "optimizer", "scaler", "told"),
    [
        (tied(), pipelab.PipeDream(2, 4), RATE, None, r"stages 0, 1 use one parameter, 'weight', and .* \(0U0\)"),
        (made(2), pipelab.PipeDream(2, 4), lambda _: RATE(OTHER.parameters()), None, "4 parameters of other modules"),
        (made(2), pipelab.PipeDream(2, 4), lambda _: None, None, "made None for stage 0"),
        (made(2), pipelab.PipeDream(2, 4), torch.optim.SGD([torch.ones(1)]), None, "expected what makes one"),
        (made(2), pipelab.OneFOneB(2, 4), RATE, None, r"OneFOneB\(ranks=2, microbatches=4\) has none"),
        (made(2), pipelab.PipeDream(2, 4), RATE, torch.amp.GradScaler("cpu"), "multiplied by 65536"),
        (hooked(), pipelab.PipeDream(2, 4), RATE, None, r"stage 1 has updates \(U\), and its 1.0.bias has a post-"),
    ],
)
def test_what_updates_could_not_do_right_is_refused_before_anything_changed(model, plan, optimizer, scaler, told):
    with no_trace(model), pytest.raises((pipelab.PipelabError, TypeError), match=told):
        pipelab.Pipeline(model, plan, nn.MSELoss(), optimizer=optimizer).step(*plain.batch(8, 4), scaler=scaler)


def test_what_an_update_does_not_step_keeps_its_gradient():
    model = nn.Sequential(made(1), nn.ReLU())  # which has no parameters, and so no optimizer
    weight, bias = model.parameters()
    stepped(model, pipelab.PipeDream(2, 4), plain.batch(8, 4), optimizer=lambda both: RATE(both[:1]))
    assert weight.grad is None
    assert bias.grad is not None


def test_hooks_see_the_gradients_of_versions_and_layers_that_functions_make_learn():
    halved = made(2)
    for each in halved.parameters():
        each.register_hook(lambda gradient: gradient / 2)
    stepped(halved, pipelab.PipeDream(2, 6), plain.batch(12, 4), optimizer=RATE)
    model, (first, second) = made(2), made(2)
    with pipelab.Pipeline(
        [lambda: first, lambda: second], pipelab.PipeDream(2, 6), nn.MSELoss(), optimizer=partial(RATE, lr=0.25)
    ) as pipe:
        pipe.step(*plain.batch(12, 4))
        learnt = [*pipe.state_dict().values()]
    assert all(map(torch.equal, halved.parameters(), learnt))
    assert not any(map(torch.equal, model.parameters(), learnt))


def test_a_step_that_failed_says_that_its_updates_stay_and_nan_in_a_new_weight_names_its_update():
    plan, failing = pipelab.Plan.parse("0F0 0B0 0U0 0F1 0B1 0U1"), nn.Sequential(plain.root_of_weight())
    with pytest.raises(pipelab.StageError, match=r"0U0 .* infinity: the new weight of stage 0") as caught:
        stepped(failing, plan, plain.batch(2, 1), optimizer=RATE, watch_nan=True)
    assert "the updates (U) that it ran stay in the weights" in str(caught.value.__notes__ or caught.value)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_in_a_forked_process_a_pipeline_says_that_its_workers_stayed_behind():
    told, child = os.pipe()
    with pipelab.Pipeline(made(2), pipelab.OneFOneB(2, 4), nn.MSELoss(), timeout=5) as pipe:
        x, y = plain.batch(8, 4)
        if not (fork := os.fork()):
            errors = []
            for call in (partial(pipe.step, x, y), partial(pipe.forward, x), partial(pipe.verify, x, y)):
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 - it must never reach pytest in this process
                    errors.append(str(error))
            os.write(child, json.dumps(errors).encode())
            os._exit(0)
        os.waitpid(fork, 0)
    errors = json.loads(os.read(told, 1 << 16))
    assert len(errors) == 3
    assert all(f"workers are in process {os.getpid()}, not in its fork {fork}" in each for each in errors)
