"""Which gradients are present, without processes: what is sent, what arrives, and who is named if it cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import pipelab
from pipelab.engine.torchrun.messages import GradientPresence, ValueMeta, meta_of
from pipelab.engine.torchrun.stage import ProcessStage


class Mail:
    """A group of processes that are all this one: what is sent to a rank is received in turn."""

    def __init__(self):
        self.letters = {}
        self.waited = 0

    def send(self, tensors, rank, tag):
        self.letters.setdefault((rank, tag), []).append(tensors[0].clone())
        return self

    def recv(self, tensors, rank, tag):
        tensors[0].copy_(self.letters[rank, tag].pop(0))
        return self

    def wait(self):
        self.waited += 1


class Cut:
    """A group whose connections are lost."""

    def send(self, *_):
        raise RuntimeError("connection reset")

    recv = send


@pytest.mark.parametrize("there", [[True], [False], [True, False, True], []])
def test_marks_arrive_as_they_were_sent(there):
    mail = Mail()
    ours, theirs = GradientPresence(mail), GradientPresence(mail)
    ours.send(there, 1)
    theirs.receive(3, len(there), 1)
    assert [key[0] for key in mail.letters] == [1]
    assert theirs.under_way(3) == [mail]
    assert theirs.under_way(2) == []
    assert theirs.take(3) == there
    assert theirs.under_way(3) == []
    ours.finish()
    assert mail.waited == 1


NAN = torch.full((2, 3), torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "gradients", [[None, torch.ones(2, 3)], [torch.zeros(2, 3), None], [NAN, -NAN], [None, None]], ids=str
)
def test_between_processors_a_gradient_says_itself_that_it_is_absent(gradients, dtype):
    given = [None if each is None else each.to(dtype) for each in gradients]
    meta = meta_of([torch.ones(2, 3, dtype=dtype, requires_grad=True) for _ in given], "stage 0")
    arrived = meta.gradients(meta.gradient_messages(given, torch.device("cpu")))
    for ours, theirs in zip(given, arrived, strict=True):
        assert ours is theirs is None or torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(("shape", "there"), [((), True), ((1,), True), ((0, 3), False)])
def test_a_gradient_of_one_number_or_none_is_absent_too(shape, there):
    meta, cpu = meta_of(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True), "stage 0"), torch.device("cpu")
    assert meta.gradients(meta.gradient_messages(None, cpu)) is None
    ones = torch.ones(shape, dtype=torch.bfloat16)
    assert (meta.gradients(meta.gradient_messages(ones, cpu)) is not None) == there


def test_a_value_without_gradients_still_has_a_message_that_keeps_the_order():
    meta, cpu = meta_of(torch.ones(2), "stage 0"), torch.device("cpu")
    (sent,), (buffer,) = meta.gradient_messages(None, cpu), meta.gradient_buffers(cpu)
    assert sent.shape == buffer.shape == (1,)
    assert meta.gradients([buffer]) is None


@pytest.mark.parametrize("ask", ["get_bwd_send_ops", "get_bwd_recv_ops"])
def test_where_marks_cannot_go_it_is_known_to_whom(monkeypatch, ask):
    monkeypatch.setattr("torch.distributed.P2POp", lambda *_, **__: None)
    monkeypatch.setattr("pipelab.engine.torchrun.stage.batch_p2p", lambda _: [])
    runner = SimpleNamespace(index=1, is_first=False, is_last=False, module=torch.nn.Identity())
    connections = SimpleNamespace(transport_device=torch.device("meta"), values=None, everyone=Cut())  # not a CPU
    stage = ProcessStage(runner, 1, pipelab.GPipe(3, 2).plan(), 1, connections, None)
    stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 2}
    made = torch.ones(2, requires_grad=True)
    meta: ValueMeta = meta_of(made, "stage 0")
    stage.begin(
        SimpleNamespace(loss=object(), meta=lambda *_: meta, mine=SimpleNamespace(kept={}, actions=[]), peer=None)
    )
    stage.back[0] = torch.ones(2)
    with pytest.raises(RuntimeError, match="connection reset"):
        getattr(stage, ask)(0)
    assert stage.step.peer == {"get_bwd_send_ops": 0, "get_bwd_recv_ops": 2}[ask]
