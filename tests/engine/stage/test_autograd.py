"""What is expected of PyTorch's autograd engine, entered by its private door, and of the interpreter's switches."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn

from pipelab.engine.stage.autograd import run_backward, saving_hooks, will_run
from pipelab.engine.threads import quick_switches


def graph() -> tuple[nn.Sequential, torch.Tensor, tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    """Return a model, an input leaf, two outputs and their gradients, the same every time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    entry = torch.randn(2, 3, requires_grad=True)
    made = model(entry)
    return model, entry, (made, made.sum(dim=1)), [torch.randn(2, 4), torch.randn(2)]


def test_the_engine_adds_the_gradients_that_torch_autograd_backward_adds():
    found = []
    for backward in (run_backward, torch.autograd.backward):
        model, entry, outputs, gradients = graph()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        backward(outputs, gradients)
        found.append([entry.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


def test_the_engine_frees_the_graph():
    _, _, outputs, gradients = graph()
    run_backward(outputs, gradients)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(outputs, gradients)


def test_the_engine_runs_hooks_and_raises_what_they_raise():
    model, _, outputs, gradients = graph()
    seen = []
    model[0].weight.register_hook(seen.append)
    run_backward(outputs, gradients)
    assert torch.equal(seen[0], model[0].weight.grad)

    def refuse(gradient: torch.Tensor) -> None:
        raise ValueError("no")

    model, _, outputs, gradients = graph()
    model[0].weight.register_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        run_backward(outputs, gradients)


def test_a_backward_on_the_cpu_stays_on_the_thread_that_calls_it():
    model, _, outputs, gradients = graph()
    threads = []
    model[0].weight.register_hook(lambda gradient: threads.append(threading.get_ident()))
    worker = threading.Thread(target=run_backward, args=(outputs, gradients))
    worker.start()
    worker.join()
    assert threads == [worker.ident]


def test_the_hooks_that_hold_in_this_thread_can_be_asked_for():
    assert saving_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.neg):
        assert saving_hooks() == (torch.clone, torch.neg)


def test_a_node_can_ask_which_others_its_backward_will_come_to():
    model, entry, (made, _), _ = graph()
    entered = model[0](entry)
    asked = []
    made.grad_fn.register_prehook(lambda _: asked.extend(map(will_run, (made.grad_fn, entered.grad_fn))))
    made.sum().backward()
    assert asked == [True, False]


def test_switches_are_quick_inside_and_as_before_outside_also_after_an_error():
    before = sys.getswitchinterval()
    seen = []

    def fail() -> None:
        with quick_switches():
            seen.append(sys.getswitchinterval())
            with quick_switches():
                pass
            seen.append(sys.getswitchinterval())
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert all(interval < before / 100 for interval in seen)
    assert sys.getswitchinterval() == before
