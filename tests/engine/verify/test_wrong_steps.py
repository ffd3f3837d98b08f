"""Wrong training steps besides those in `test_diagnose`: `diagnose` names the cause of all but two of them.

Each function makes one wrong step. Its docstring says what the step does wrong, as its author would find out later.
"""

from __future__ import annotations

import copy
import functools
from pipes import mse

import plain
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from pipelab import diagnose

MANY, ROWS = 5, 20
BEFORE = plain.batch(ROWS, seed=7)
"""The batch of the step before."""


class Tied(nn.Module):
    """A language model whose embedding is its head's weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embed(tokens)))).transpose(1, 2)


def words(valid=None):
    """Return tokens and targets; in the first 8 rows, so many targets are valid."""
    torch.manual_seed(1)
    x, y = torch.randint(11, (ROWS, 5)), torch.randint(11, (ROWS, 5))
    if valid:
        y[:8, valid:] = -100
    return x, y


def pieces(x, y):
    return list(zip(x.chunk(MANY), y.chunk(MANY), strict=True))


def right(model, x, y, loss=mse, runs=None):
    """Run the right loop: the mean of five micro-batches of alike many rows."""
    for rows, targets in pieces(x, y):
        (loss((runs or model)(rows), targets) / MANY).backward()


def found_in(step, model, x=None, y=None, loss=mse, microbatches=MANY, **more):
    """Diagnose a step on a batch of 20 rows of 6 numbers, or another."""
    batch = plain.batch(ROWS)
    x, y = batch[0] if x is None else x, batch[1] if y is None else y
    return diagnose(step, model, x, y, loss, microbatches=microbatches, **more)


def gradients(model, x, y):
    """Return a batch's gradients, and leave none."""
    right(model, x, y)
    return {name: each.clone() for name, each in plain.taken(model).items()}


def put(model, values):
    for name, parameter in model.named_parameters():
        parameter.grad = values[name].clone()


WRONG = []


FOUR, SIX = (functools.partial(plain.mlp, layers) for layers in (4, 6))


def wrong(code, fact, model=FOUR, beside=lambda model: (), **how):
    """List a wrong step: of which model, and with what beside it; the code, and a fact that the sentence says."""

    def listed(step):
        def find():
            made = model()
            more = beside(made)
            return found_in(lambda x, y: step(made, x, y, *more), made, **how)

        WRONG.append(pytest.param(find, code, fact, id=step.__name__))
        return step

    return listed


# ── Something is left from before ─────────────────────────────────────────────────────────────────────────────────────


@wrong("no-zero-grad", "2 is how often the step runs the batch")
def a_run_to_warm_up(model, x, y):
    """The step runs once to warm up and once to be measured, with no `zero_grad` between."""
    right(model, x, y)
    right(model, x, y)


@wrong("no-zero-grad", "adds to what it has left before", beside=lambda model: [gradients(model, *BEFORE)])
def gradients_kept_elsewhere(model, x, y, kept):
    """Gradients are added up in a flat buffer that each step copies to `.grad`, and `zero_grad` does not empty."""
    for name, each in gradients(model, x, y).items():
        kept[name] += each
    put(model, kept)


@wrong("other-batch", "yet another batch")
def another_batch_left(model, x, y):
    """The loop begins with the batch that was prefetched for the step before."""
    right(model, *BEFORE)
    right(model, x, y)


@wrong("other-batch", "does not learn from the batch that it gets")
def the_batch_of_the_closure(model, x, y):
    """The step ignores its arguments, and trains on a global batch of the same name."""
    right(model, *BEFORE)


@wrong("only-their-own", "wrong, no multiple: 2.weight, 2.bias", SIX, lambda model: [gradients(model, *BEFORE)])
def one_stale_layer(model, x, y, before):
    """The gradients of one layer are those of the step before: its copy to the master's came too early."""
    right(model, x, y)
    for name in ("2.weight", "2.bias"):
        model.get_parameter(name).grad = before[name].clone()


@wrong("stale-weights", "computes with a copy", beside=lambda _: [plain.mlp(4, seed=3)])
def stale_weights(model, x, y, stale):
    """The replica that computes has not got the weights of the last update."""
    put(model, gradients(stale, x, y))


@wrong("stale-weights", "computes with a copy", beside=lambda _: [plain.mlp(4, seed=3)])
def weights_one_step_behind(model, x, y, behind):
    """As in PipeDream, each step computes with the weights that the step before had."""
    values = gradients(behind, x, y)
    behind.load_state_dict(model.state_dict())
    put(model, values)


@wrong(
    "weights-change",
    "before a forward of their layers: 0, 2",
    beside=lambda model: [torch.optim.SGD(model.parameters(), lr=0.5)],
)
def an_update_for_each_microbatch(model, x, y, optimizer):
    """The optimizer steps inside the loop over micro-batches."""
    for rows, targets in pieces(x, y):
        (mse(model(rows), targets) / MANY).backward()
        optimizer.step()


# ── A factor that is left, or comes twice ─────────────────────────────────────────────────────────────────────────────


@wrong("loss-scale", "65536 is 2^16")
def a_loss_scale_left(model, x, y):
    """The loss is scaled by a `GradScaler`, and `unscale_` never runs."""
    right(model, x, y, lambda output, target: 65536 * mse(output, target))


@wrong("clipped", "to a norm of 0.1")
def clipped_within_the_step(model, x, y):
    """The gradients are clipped to a norm of 0.1 before they are compared or added to others."""
    right(model, x, y)
    clip_grad_norm_(model.parameters(), 0.1)


@wrong("clipped", "each to a norm of 0.03", SIX)
def clipped_by_stage(model, x, y):
    """Each stage clips its own gradients, instead of all of them together."""
    right(model, x, y)
    for stage in (model[:2], model[2:4], model[4:]):
        clip_grad_norm_(stage.parameters(), 0.03)


@wrong("weight-decay", "0.1 times the weights")
def decayed_in_the_gradient(model, x, y):
    """The weight decay is added to the gradients, and AdamW decays again."""
    right(model, x, y)
    for parameter in model.parameters():
        parameter.grad += 0.1 * parameter.detach()


@wrong("scaled", "micro-batches times the number of replicas", replicas=2)
def divided_by_microbatches_and_replicas(model, x, y):
    """The loss counts all rows, and yet the schedule divides by the micro-batches, and DDP by the two replicas."""
    right(model, x, y, lambda output, target: mse(output, target) / MANY / 2)


UNEVEN = dict(zip("xy", words(2), strict=True))


@wrong(
    "weighed-by-replicas", "2 replicas alike", Tied, **UNEVEN, loss=nn.CrossEntropyLoss(), microbatches=4, replicas=2
)
def a_mean_of_the_replicas_means(model, x, y):
    """DDP averages the mean losses of two replicas, which have unlike numbers of valid tokens."""
    for tokens, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        valid = (targets != -100).sum()
        for some, their in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            share = (their != -100).sum() / valid
            (share * nn.CrossEntropyLoss()(model(some), their) / 2).backward()


# ── A stage is wrong ──────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("stage-twice", "more often than the others: 2, 3", SIX)
def a_stage_forward_twice(model, x, y):
    """A stage's forward runs on its own output: the wrapper calls it, and so does the schedule."""
    first, second, third = model[:2], model[2:4], model[4:]
    right(model, x, y, runs=lambda rows: third(second(second(first(rows)))))


@wrong("scaled", "wrong, 2 times: 0.weight, 0.bias", SIX)
def a_stage_backward_twice(model, x, y):
    """A stage's backward runs twice for each micro-batch, with `retain_graph=True`."""
    for rows, targets in pieces(x, y):
        middle = model[:2](rows)
        given = middle.detach().requires_grad_()
        (mse(model[2:](given), targets) / MANY).backward()
        middle.backward(given.grad, retain_graph=True)
        middle.backward(given.grad)


@wrong("passed-back", "what 4 passes back is wrong", SIX)
def the_gradient_of_another_microbatch(model, x, y):
    """A stage gets, in its backward, the gradient of the micro-batch before."""
    given_before = None
    for rows, targets in pieces(x, y):
        middle = model[:3](rows)
        given = middle.detach().requires_grad_()
        (mse(model[3:](given), targets) / MANY).backward()
        middle.backward(given.grad if given_before is None else given_before)
        given_before = given.grad


def skips(self, x, cut=lambda skip: skip):
    given = self.first(x)
    return self.third(self.second(given) + cut(given))


@wrong(
    "passed-back",
    "what second.0 passes back",
    lambda: plain.Made(skips, first=plain.mlp(2), second=plain.mlp(2, seed=2), third=plain.mlp(1, seed=3)),
)
def a_skip_connection_detached(model, x, y):
    """A skip connection around a stage is sent without its gradient."""
    right(model, x, y, runs=lambda rows: model(rows, torch.Tensor.detach))


@wrong("passed-back", "or gradients before it are", SIX)
def activations_overwritten(model, x, y):
    """A buffer is used again: a stage's backward reads the input of the next micro-batch."""
    buffer = torch.empty(ROWS // MANY, 6)
    for (rows, targets), (following, _) in zip(pieces(x, y), pieces(x.roll(-4, 0), y), strict=True):
        buffer.data[:] = rows
        loss = mse(model(buffer), targets) / MANY
        buffer.data[:] = following
        loss.backward()


@wrong(
    "tied-weights",
    "embed.weight, head.weight share a weight",
    Tied,
    **dict(zip("xy", words(), strict=True)),
    loss=nn.CrossEntropyLoss(),
)
def tied_weights_lost(model, x, y):
    """The head has a copy of the embedding's weight, and its gradient is not added to the embedding's."""

    def apart(tokens):
        hidden = torch.tanh(model.hidden(model.embed(tokens)))
        return nn.functional.linear(hidden, model.head.weight.detach()).transpose(1, 2)

    right(model, x, y, nn.CrossEntropyLoss(), apart)


@wrong(
    "tied-weights",
    "the gradient of head.weight counts twice",
    Tied,
    **dict(zip("xy", words(), strict=True)),
    loss=nn.CrossEntropyLoss(),
)
def tied_weights_counted_twice(model, x, y):
    """The gradient of the head's weight is sent to the embedding, which is the same weight."""

    def twice(tokens):
        hidden, weight = torch.tanh(model.hidden(model.embed(tokens))), model.head.weight
        return nn.functional.linear(hidden, 2 * weight - weight.detach()).transpose(1, 2)

    right(model, x, y, nn.CrossEntropyLoss(), twice)


@wrong("swapped", "0.bias has 2.bias's", SIX)
def two_layers_swapped(model, x, y):
    """A flat buffer is cut in the order in which layers were registered, not in which they were packed."""
    right(model, x, y)
    for name in ("weight", "bias"):
        one, other = model.get_parameter(f"0.{name}"), model.get_parameter(f"2.{name}")
        one.grad, other.grad = other.grad, one.grad


@wrong("other-mode", "2 in evaluation", lambda: nn.Sequential(*plain.mlp(2), nn.BatchNorm1d(6), nn.Linear(6, 6)))
def batchnorm_in_the_wrong_mode(model, x, y):
    """`model.eval()` of the last validation is still in force in the step."""
    model.eval()
    right(model, x, y)


@wrong("other-mode", "2 in training", lambda: nn.Sequential(*plain.mlp(2), nn.Dropout(0.5), nn.Linear(6, 6)).eval())
def dropout_that_was_switched_off(model, x, y):
    """The stage is a copy, made before `model.eval()`: its dropout is on."""
    model[2].train()
    right(model, x, y)


# ── The loss is another ───────────────────────────────────────────────────────────────────────────────────────────────


@wrong("other-targets", "4 further on")
def targets_of_the_next_microbatch(model, x, y):
    """Outputs leave the pipeline one micro-batch late, and meet the targets of the next."""
    right(model, x, y.roll(-ROWS // MANY, 0))


@wrong("other-targets", "1 before, within its micro-batch")
def targets_rolled_within_their_microbatch(model, x, y):
    """Each micro-batch's targets are one row late; the last layer's bias is right, as it adds up all rows."""
    right(model, x, torch.cat([targets.roll(1, 0) for targets in y.chunk(MANY)]))


@wrong("other-targets", "in reverse order, within its micro-batch")
def targets_reversed_within_their_microbatch(model, x, y):
    """Each micro-batch's targets are in reverse order."""
    right(model, x, torch.cat([targets.flip(0) for targets in y.chunk(MANY)]))


@wrong("unexplained", "right: 4.bias", functools.partial(plain.mlp, 5))
def targets_in_an_order_that_is_not_tried(model, x, y):
    """Targets are shuffled: that a bias is right, which adds up all rows, is no hint at the other gradients."""
    right(model, x, torch.cat([targets[[2, 0, 3, 1]] for targets in y.chunk(MANY)]))


@wrong("unexplained", "comes from no micro-batch")
def another_loss(model, x, y):
    """The loss is the mean absolute error instead of the mean square."""
    right(model, x, y, nn.functional.l1_loss)


@pytest.mark.parametrize(("find", "code", "fact"), WRONG)
def test_the_cause_of_a_wrong_step_is_named(find, code, fact):
    found = find()
    assert found.code == code, found
    assert found.wrong
    assert fact in str(found)
    assert (found.residual > 0.02) == ("comes from no micro-batch" in str(found))


def test_a_step_runs_again_only_where_no_count_explains_it_and_not_if_it_must_not():
    model, stale, runs = plain.mlp(4), plain.mlp(4, seed=3), []

    def step(x, y, factor, computes):
        runs.append(None)
        put(model, {name: factor * each for name, each in gradients(computes, x, y).items()})

    weights = copy.deepcopy(model.state_dict())
    for factor, computes, repeat, code, many in (
        (1, model, True, "right", 1),
        (5, model, True, "times-microbatches", 1),
        (1, stale, False, "unexplained", 1),
        (1, stale, True, "stale-weights", 4),
    ):
        runs.clear()
        run = functools.partial(step, factor=factor, computes=computes)
        assert found_in(run, model, repeat=repeat).code == code
        assert len(runs) == many
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())


def test_a_batch_of_rows_that_are_all_alike_is_not_taken_for_another():
    model, (x, y) = plain.mlp(4), plain.batch(1)
    found = found_in(
        lambda x, y: right(model, x, y, nn.functional.l1_loss), model, x.repeat(ROWS, 1), y.repeat(ROWS, 1)
    )
    assert found.code == "unexplained"


def test_noise_is_no_other_batch():
    model = plain.mlp(4)

    def step(x, y):
        right(model, x, y)
        for parameter in model.parameters():
            parameter.grad += torch.randn_like(parameter)

    assert found_in(step, model).code == "random-numbers"
