"""A parameter of several stages is one parameter: one gradient, one name, in every schedule and both engines."""

from __future__ import annotations

import plain
import processes
import pytest
import torch
from torch import nn

import pipelab
from pipelab import Pipeline
from pipelab.errors import EngineError

WORDS = 11


def sequence(blocks=6):
    """Return the same model as a sequence."""
    layers = [nn.Embedding(WORDS, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))]
    head = nn.Linear(8, WORDS, bias=False)
    head.weight = layers[0].weight
    return nn.Sequential(*layers, head)


def batch(rows=8):
    return torch.randint(0, WORDS, (rows, 5)), torch.randint(0, WORDS, (rows, 5))


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def plain_gradients(model, x, y):
    model.zero_grad()
    plain.at_once(model, loss, x, y)
    return plain.taken(model)


def require_equal(model, expected):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(pipelab.schedules))
def test_every_schedule_adds_up_a_tied_weight_once(name):
    model = sequence()
    x, y = batch()
    expected = plain_gradients(model, x, y)
    with Pipeline(model, pipelab.schedules[name](4, 8), loss) as pipe:
        pipe.step(x, y)
        require_equal(model, expected)
        verification = pipe.verify(x, y)
    assert verification.parameters == len(list(model.parameters()))
    assert model[0].weight is model[-1].weight


def test_training_clipping_and_saving_see_one_parameter():
    torch.manual_seed(0)
    model, other = sequence(), sequence()
    other.load_state_dict(model.state_dict())
    x, y = batch()
    with Pipeline(model, pipelab.replicate(pipelab.OneFOneB(2, 4), 2), loss) as pipe:
        both = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (pipe, other)]
        assert len(both[0].param_groups[0]["params"]) == len(list(other.parameters()))
        for _ in range(3):
            for optimizer in both:
                optimizer.zero_grad()
            pipe.step(x, y)
            loss(other(x), y).backward()
            norms = pipe.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
            for optimizer in both:
                optimizer.step()
        state = pipe.state_dict()
    assert state.keys() == other.state_dict().keys()
    torch.testing.assert_close(state, other.state_dict(), rtol=1e-3, atol=1e-4)


def test_the_same_step_gives_the_same_bits_every_time():
    model, batches, found = sequence(), batch(), []
    with Pipeline(model, pipelab.GPipe(4, 8), loss) as pipe:
        for _ in range(5):
            pipe.step(*batches)
            found.append(plain.taken(model)["0.weight"])
    assert all(torch.equal(found[0], each) for each in found)


def test_a_sparse_embedding_a_frozen_one_and_an_error_leave_the_tie_whole():
    model = sequence()
    model[0].sparse = True
    x, y = batch()
    with Pipeline(model, pipelab.GPipe(2, 2), loss) as pipe:
        pipe.step(x, y)
        dense = model[0].weight.grad.to_dense()
        torch.testing.assert_close(dense, plain_gradients(model, x, y)["0.weight"].to_dense())
        with pytest.raises(pipelab.StageError):
            pipe.step(x + WORDS, y)
        assert model[0].weight is model[-1].weight
        model[0].weight.requires_grad_(False)
        model.zero_grad()
        pipe.step(x, y)
        assert model[0].weight.grad is None


def test_hooks_run_and_those_that_need_the_whole_gradient_are_refused():
    model = sequence()
    x, y = batch()
    expected = 2 * plain_gradients(model, x, y)["0.weight"]
    handle = model[0].weight.register_hook(lambda gradient: 2 * gradient)
    with Pipeline(model, pipelab.GPipe(2, 2), loss) as pipe:
        pipe.step(x, y)
        torch.testing.assert_close(model[0].weight.grad, expected)
        handle.remove()
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(EngineError, match="stages 0, 1 use one parameter"):
            pipe.step(x, y)
        assert model[0].weight is model[-1].weight


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "hows"), [(2, ["interleaved-1f1b", "zbv", "traced"]), (4, ["1f1b", "replicated"])])
def test_processes_that_hold_a_tied_weight_add_it_up(ranks, hows):
    ended = processes.run_well(ranks, "tied.py", *hows)
    for how, facts in zip(hows, zip(*(each.facts for each in ended), strict=True), strict=True):
        for fact in facts:
            assert fact["how"] == how
            assert fact["gradients"] < 1e-5
            assert fact["weights"] < 1e-5
            assert fact["norms"] == pytest.approx([1, 1, 1], rel=1e-5)
            assert fact["parameters"] == 9
        assert len({fact["tied"] for fact in facts if fact["tied"] is not None}) == 1  # bit for bit
