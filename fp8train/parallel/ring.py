"""A ring reduce-scatter that sums in the wire format: what a collective library's own sum in eight
bits does. It is here to be compared with: its error grows with every rank (docs/
gradient-communication.md).

A part travels from rank to rank, and each adds its own values and rounds again. Two things keep an
eight-bit ring from overflow and loss: one scale for all ranks, from the maximum of their amaxes,
and head-room of a factor N for the sum.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.precision.formats import E4M3, E5M2
from fp8train.precision.scaling import scale_from_amax
from fp8train.precision.wire import Codec

LARGEST = {"e5m2": E5M2.max, "e4m3": E4M3.max}


def ring_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, codec: Codec, *, scaled: bool
) -> tuple[Tensor, int]:
    """The sum over the ranks of a group, each rank's own part of it.

    Args:
        x: FP32 [N, S]: this rank's values of the N parts.
        codec: without scales of its own.
        scaled: one scale for all ranks, see `common_scale`.
    Returns:
        FP32 [S], and the bytes of gradients that this rank sent for it.
    """
    ranks, rank = group.size(), group.rank()
    scale = common_scale(x, group, codec.name) if scaled else torch.full((), 1.0 / ranks)
    scale = scale.to(x.device)
    own = codec.encode(x * scale)
    message = own[(rank - 1) % ranks]
    for step in range(2, ranks + 1):
        received = torch.empty_like(message)
        exchange = [
            dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        message = added(codec, received, own[(rank - step) % ranks], x.shape[1])
    total = codec.decode(message, x.shape[1]) / scale
    return total, (ranks - 1) * codec.width(x.shape[1])


def common_scale(x: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    """A power of two that brings the largest magnitude of all ranks to 1/N of the format's largest;
    NaN where any value is not finite; 1/N in the formats of 16 bits or more."""
    if name not in LARGEST:
        return torch.full((), 1.0 / group.size())
    amax = x.abs().amax()
    amax = torch.where(amax.isfinite(), amax, torch.inf)  # a maximum with NaN has no sure result
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    scale = scale_from_amax(amax * group.size(), LARGEST[name], power_of_two=True)
    return torch.where(amax.isfinite(), scale, torch.nan)


def added(codec: Codec, message: Tensor, own: Tensor, size: int) -> Tensor:
    """The message of a sum of two messages, rounded to the wire format again."""
    return codec.encode((codec.decode(message, size) + codec.decode(own, size))[None])[0]
