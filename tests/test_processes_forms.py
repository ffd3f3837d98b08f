"""The form of what travels between processes: what arrives lies in memory as it did where it was made."""

from __future__ import annotations

import pytest
import torch

from pipelab.engine.processes.forms import form_of

CPU = torch.device("cpu")


def arrives(value):
    """Return what a process makes of a value that has travelled, and the form."""
    form = form_of(value, "stage 0")
    room = form.room(CPU)
    for place, parcel in zip(room, form.parcels(value, CPU), strict=True):
        assert place.stride() == parcel.stride()
        place.as_strided((place.numel(),), (1,)).copy_(parcel.as_strided((parcel.numel(),), (1,)))
    return form.value(room), form


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t,
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:3],
        lambda t: t[:, :, ::2].transpose(0, 1),
        lambda t: t.chunk(3, dim=1)[1],
        lambda t: t[:, :1].expand(-1, 9, -1),
        lambda t: t.unsqueeze(1)[:, :, 0:5],
        lambda t: t[0, 0, 0],
        lambda t: t[:, :0],
    ],
)
def test_a_tensor_has_the_numbers_and_the_strides_that_it_had(cut):
    made = cut(torch.randn(4, 6, 8, requires_grad=True))
    there, form = arrives(made)
    assert torch.equal(there, made)
    assert there.stride() == made.stride()
    assert there.is_leaf
    assert there.requires_grad
    there.sum().backward()  # its gradient comes in the room that is made for it
    (parcel,) = form.parcels_of_gradients(there.grad, CPU)
    assert parcel.stride() == form.room_for_gradients(CPU)[0].stride() == there.grad.stride()


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t[:, 0, :1],  # four of 192
        lambda t: t.flatten().unfold(0, 6, 2),  # windows that overlap
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
    ],
)
def test_what_would_take_much_room_or_shares_memory_or_is_lazy_arrives_without_gaps(cut):
    made = cut(torch.randn(4, 6, 8))
    there, _ = arrives(made)
    assert torch.equal(there, made)
    assert there.is_contiguous()
    assert not there.is_conj()
    assert not there.is_neg()
