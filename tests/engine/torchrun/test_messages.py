"""What travels between processes: what arrives has the numbers that left, however they lay."""

from __future__ import annotations

import pytest
import torch

from pipelab.engine.torchrun.messages import from_bytes, meta_of, to_bytes
from pipelab.errors import EngineError

CPU = torch.device("cpu")

CUTS = [
    lambda t: t,
    lambda t: t.transpose(0, 2),
    lambda t: t[:, 1:3],
    lambda t: t[:, :, ::2].transpose(0, 1),
    lambda t: t[:, :1].expand(-1, 9, -1),
    lambda t: t.flatten().unfold(0, 6, 2),  # windows that overlap
    lambda t: t[0, 0, 0],
    lambda t: t[:, :0],
    lambda t: torch.complex(t, t).conj(),
    lambda t: torch.complex(t, t).conj().imag,
    lambda t: t.to(torch.float8_e4m3fn),
    lambda t: (t.abs() * 10).to(torch.uint16),
    lambda t: t > 0,
]


def as_bytes(tensor):
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@pytest.mark.parametrize("cut", CUTS)
def test_a_tensor_arrives_with_its_numbers(cut):
    made = cut(torch.randn(4, 6, 8))
    meta = meta_of(made, "stage 0")
    (place,), (parcel,) = meta.empty_buffers(CPU), meta.messages(made, CPU)
    as_bytes(place).copy_(as_bytes(parcel))
    there = meta.value([place])
    assert torch.equal(there.float(), made.float()) if there.dtype.itemsize == 1 else torch.equal(there, made)
    assert (there.dtype, there.shape) == (made.dtype, made.shape)
    assert not there.is_conj()
    assert not there.is_neg()


@pytest.mark.parametrize("cut", CUTS)
def test_any_tensor_can_be_sent(cut):
    made = {"name": "x", "both": (cut(torch.randn(4, 6, 8)), None)}
    there = from_bytes(to_bytes(made))
    (ours, _), (theirs, _) = there["both"], made["both"]
    assert torch.equal(ours.to(torch.complex64), theirs.to(torch.complex64))
    assert (there["name"], ours.dtype) == ("x", theirs.dtype)


@pytest.mark.parametrize("there", [[True, False], [False, False], [True, True]])
def test_gradients_come_with_the_knowledge_which_of_them_there_are(there):
    made = [torch.randn(3, requires_grad=True), torch.ones(2, dtype=torch.int64), torch.randn(4, requires_grad=True)]
    meta = meta_of(made, "stage 0")
    gradients = [torch.ones(3) if there[0] else None, None, torch.ones(4) if there[1] else None]
    back = meta.gradients(meta.gradient_messages(gradients, CPU), meta.present(gradients))
    assert [each is not None for each in back] == [there[0], False, there[1]]
    alone = meta_of(made[0], "stage 0")
    back = alone.gradients(alone.gradient_messages(gradients[0], CPU), alone.present(gradients[0]))
    assert (back is not None) == there[0]


@pytest.mark.filterwarnings("ignore:.*quantized|.*sparse|.*nested|TypedStorage")
@pytest.mark.parametrize(
    "odd",
    [
        lambda t: t.to_sparse(),
        lambda t: torch.nested.nested_tensor([t[0]]),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    ],
)
def test_tensors_that_are_not_plain_are_refused(odd):
    with pytest.raises(EngineError, match="stage 0 returned a sparse, nested or quantized tensor"):
        meta_of(odd(torch.randn(4, 6)), "stage 0")
    assert str(from_bytes(to_bytes(odd(torch.zeros(4, 6))))) == str(
        odd(torch.zeros(4, 6))
    )  # the last stage may give them
