"""Gradient reduction: quantise once, move bytes, sum in FP32.

Summing in eight bits gets worse with every rank; here each rank encodes its gradients once, an
all-to-all moves the bytes, and the owner of a shard decodes and sums in FP32 in rank order. The
sum is divided by N outside, in FP32. FSDP2 calls this in place of its own reduce-scatter, so the
result lands in the FP32 shard that the optimizer reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.precision.wire import Codec


class AllToAllReduceScatter:
    """FSDP2's `ReduceScatter` interface over a codec; one object serves all modules of a model.

    Attributes:
        bytes_sent: bytes that left this rank since the last `take_bytes`.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.bytes_sent = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for FSDP2's copy-in and for the shard."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce input_tensor, FP32 [N·S] in rank order, into output_tensor, FP32 [S].

        Raises:
            ValueError: an op other than SUM and AVG.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gradient reduction by {op}: only SUM and AVG are defined")
        world_size, size = group.size(), output_tensor.numel()
        sent = self.codec.encode(input_tensor.view(world_size, size))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.bytes_sent += sent[0].numel() * (world_size - 1)
        total = output_tensor.view(-1).zero_()
        for message in received:
            total.add_(self.codec.decode(message, size))
        if op == dist.ReduceOp.AVG:
            total.div_(world_size)

    def take_bytes(self) -> int:
        """Bytes sent since the last call."""
        count, self.bytes_sent = self.bytes_sent, 0
        return count
