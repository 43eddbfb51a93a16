"""Tensors → buffers that a transport sends whole."""

from __future__ import annotations

import torch

from tests.rows import each_row
from torchopt_dist.distributed.serialization.pickling import pack
from torchopt_dist.distributed.serialization.wire import from_wire, to_wire


@each_row("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_of_a_part_of_a_storage_no_more_than_that_is_sent_and_it_is_not_copied(dtype):
    whole = torch.ones(3, 1 << 17, dtype=dtype)
    row = whole[1].requires_grad_(dtype != torch.bool)
    (buffer,) = to_wire(pack([row], main_by_name=True)).buffers
    assert buffer.data_ptr() == row.data_ptr()
    assert buffer.untyped_storage().nbytes() == row.numel() * row.element_size()
    whole.detach().zero_()
    assert torch.equal(buffer, torch.zeros(1 << 17, dtype=dtype))


@each_row(
    "part",
    [
        lambda x: x[:, 1],
        lambda x: torch.nn.Parameter(x)[:, :3],
        lambda x: (x + 1j * x)[1].conj(),
    ],
)
def test_other_parts_are_copied(part):
    sent = part(torch.arange(3 * 32768.0).view(3, 32768).T)
    wire = to_wire(pack([sent], main_by_name=True))
    (buffer,) = wire.buffers
    assert buffer.untyped_storage().nbytes() == sent.numel() * sent.element_size()
    (received,) = from_wire(wire).tensors
    assert torch.equal(received, sent)


def test_a_part_outlives_the_tensor_that_it_was_taken_of():
    (buffer,) = to_wire(pack([torch.full((3, 1 << 17), 7.0)[1]], main_by_name=True)).buffers
    taken = [torch.empty(3, 1 << 17) for _ in range(4)]  # of the memory that would have been freed
    assert torch.equal(buffer, torch.full((1 << 17,), 7.0))
    del taken
