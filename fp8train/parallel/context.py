"""Context parallelism: the ranks of a group divide each sequence among them.

Only attention looks from one position at others. The rest of the model runs on a rank's own
positions, which are two of 2·c equal chunks, number i and number 2·c − 1 − i of c ranks: under a
causal mask all ranks then have the same number of (query, key) pairs.

K and V are all-gathered, and queries stay where they are. A ring moves the same bytes and hides
them behind compute, but it merges c partial softmaxes; here a row meets its keys in one kernel, as
in a single process, and rounds as there. What isn't hidden is small: with grouped queries K and V
are G/H of Q's size, and they grow with T where attention grows with T². The price is memory: a
layer keeps 2·B·G·T·K values for its backward where a ring keeps them divided by c. Backward has
three times as many gradients, for one layer at a time: its own, those it sends and those it gets.

Source: The Llama 3 Herd of Models (arXiv 2407.21783), 3.3.2, both of the chunks and the all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8train.models.llama import Llama, Rope
from fp8train.parallel.collectives import gather_parts
from fp8train.precision.backends.protocol import replace


def take(x: Tensor, dim: int, context: int, rank: int) -> Tensor:
    """A rank's positions [..., T/context, ...] of x [..., T, ...] along dim, in its dtype.

    T is a multiple of 2·context, or context is 1.
    """
    if context == 1:
        return x
    chunks = x.chunk(2 * context, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def whole(parts: Iterable[Tensor], dim: int) -> Tensor:
    """The inverse of `take`: x [..., T, ...] from the positions of more than one rank, in order."""
    first, last = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*first, *reversed(last)), dim)


def positions(length: int, context: int, rank: int, device: torch.device) -> Tensor:
    """A rank's positions of a sequence of `length`, int64 [length/context]."""
    return take(torch.arange(length, device=device), 0, context, rank)


class _Prefixes(torch.autograd.Function):
    """K and V of all ranks, up to the end of each of this rank's two chunks."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """kv [2, B, G, T/c, K] of this rank's positions → the same of [2, B, G, n, K], for n the
        end of its first chunk and of its last."""
        context, rank, chunk = group.size(), group.rank(), kv.shape[3] // 2
        everything = whole(gather_parts(kv, group), dim=3)
        ctx.group, ctx.length = group, everything.shape[3]
        first, last = (rank + 1) * chunk, (2 * context - rank) * chunk
        return everything[:, :, :, :first], everything[:, :, :, :last]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor, last: Tensor) -> tuple[Tensor, None]:
        """The sum over ranks of the gradients of this rank's K and V.

        In FP32 and in rank order, whatever the collective library, and rounded once. What a rank
        sends is a sum of two values at most, which their own dtype rounds once as well.
        """
        group: dist.ProcessGroup = ctx.group
        context = group.size()
        own = first.new_zeros(*first.shape[:3], ctx.length, first.shape[4])
        own[:, :, :, : last.shape[3]] = last
        own[:, :, :, : first.shape[3]] += first
        sent = torch.stack([take(own, 3, context, rank) for rank in range(context)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total = torch.zeros_like(received[0], dtype=torch.float32)
        for part in received:
            total.add_(part)
        return total.to(first.dtype), None


class ContextAttentionCore(nn.Module):
    """Attention of this rank's queries over the whole sequence.

    Args:
        core: attention whose queries are the last of its keys' positions, causal.
        group: ranks that share a sequence, in the order of their chunks.
    """

    def __init__(self, core: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core, self.group = core, group

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T/c, K], k and v [B, G, T/c, K] of this rank's positions → [B, H, T/c, K]."""
        prefixes = _Prefixes.apply(torch.stack((k, v)), self.group)
        chunks = zip(q.chunk(2, dim=2), prefixes, strict=True)
        return torch.cat([self.core(part, *kv.unbind()) for part, kv in chunks], dim=2)


class ContextRope(Rope):
    """The rotary embedding's tables of this rank's positions.

    From the length of a sequence and not from x, which may hold fewer positions: under sequence
    parallelism the residual stream is divided once more.
    """

    def __init__(self, rope: Rope, length: int, group: dist.ProcessGroup) -> None:
        super().__init__(rope.head_size, rope.theta, rope.scaling)
        self.length, self.context, self.rank = length, group.size(), group.rank()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [length/c, K/2], FP32, on x's device."""
        return self.tables(positions(self.length, self.context, self.rank, x.device))


def install(model: Llama, group: dist.ProcessGroup, length: int) -> None:
    """Have a model, or a stage of one, run on this rank's positions of sequences of `length`.

    Comes before anything that wraps blocks, and after precision has chosen their attention cores.

    Args:
        group: ranks that share a sequence; tokens are `take`n by rank in it.
        length: a multiple of 2·group.size().
    """
    for name, block in model.layers.items():
        core = block.get_submodule("self_attn.core")
        replace(model, f"layers.{name}.self_attn.core", ContextAttentionCore(core, group))
    model.rope = ContextRope(model.rope, length, group)
