"""Embedding and cross entropy where each rank holds some rows of the vocabulary.

Rank r of t holds rows `first` = r · V/t up to `first` + V/t of a vocabulary that is padded to V
rows. Padding takes no part in the loss. The scheme is Megatron's, for the loss that of
megatron/core/tensor_parallel/cross_entropy.py: ranks exchange a few numbers for each token, never
logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # the target of a position that predicts nothing, as in F.cross_entropy


def embed_part(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows of the embedding for the tokens that are this rank's, zeros for the others.

    The sum over ranks is the embedding exactly, as all but one of the terms are zero.

    Args:
        tokens: ids [B, T], int64.
        weight: this rank's rows [V/t, D], in any floating type.
        first: id of its first row.

    Returns:
        [B, T, D] in the weight's dtype.
    """
    index, own = _local(tokens, first, len(weight))
    return F.embedding(index, weight).masked_fill_(~own[..., None], 0.0)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> Tensor:
    """Cross entropy of each token, with logits divided over the ranks of a group by columns.

    Forward costs two all-reduces: the largest logits, then the sums of exponentials together with
    the targets' logits. Backward costs none. Between them one FP32 tensor of the logits' size is
    kept. A NaN or +Inf among a token's logits makes its loss NaN on every rank. Nothing waits for
    the device, so a target outside the vocabulary is not an error: its loss is NaN.

    Args:
        logits: this rank's columns [..., V/t], BF16 or FP32; those of ids from vocab_size on are
            padding: as if they were -Inf, with gradient 0.
        targets: ids [...], int64, the same on all ranks of the group; `IGNORE` for none.
        vocab_size: ids without the padding.
        group: ranks that share the vocabulary; None if this process has all of it.
        first: id of this rank's first column.

    Returns:
        FP32 [...], the same on all ranks of the group; 0 where the target is `IGNORE`.
    """
    losses: Tensor = _CrossEntropy.apply(logits, targets, vocab_size, group, first)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        first: int,
    ) -> Tensor:
        columns = min(max(vocab_size - first, 0), logits.shape[-1])  # without the padding
        # The one large tensor. A copy even of FP32 logits, which belong to the caller.
        exps = logits.to(torch.float32, copy=True)
        exps[..., columns:] = -torch.inf
        largest = exps.amax(-1)
        shared = group is not None and group.size() > 1
        if shared:
            # MAX may drop a NaN, but the rank that has it brings it into the sums below.
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exps -= largest[..., None]
        index, own = _local(targets, first, columns)
        at_target = exps.gather(-1, index[..., None])[..., 0].masked_fill_(~own, 0.0)
        sums = torch.stack((exps.exp_().sum(-1), at_target))
        if shared:
            dist.all_reduce(sums, group=group)
        total, at_target = sums
        ctx.save_for_backward(exps, total, targets)
        ctx.columns, ctx.first, ctx.dtype = columns, first, logits.dtype
        outside = (targets < 0) | (targets >= vocab_size)
        losses = (total.log() - at_target).masked_fill_(outside, torch.nan)
        return losses.masked_fill_(targets == IGNORE, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        # (softmax − one at the target) · upstream. What was saved stays as it is, since a
        # zero-bubble schedule may come here twice.
        exps, total, targets = ctx.saved_tensors
        index, own = _local(targets, ctx.first, ctx.columns)
        index = index[..., None]
        upstream = upstream.masked_fill(targets == IGNORE, 0.0)[..., None]
        scale = upstream / total[..., None]
        grad = torch.empty_like(exps, dtype=ctx.dtype)
        torch.mul(exps, scale, out=grad)
        # Computed anew where the target is, so that BF16 rounds the difference and not its terms.
        at_target = exps.gather(-1, index) * scale - upstream.masked_fill(~own[..., None], 0.0)
        grad.scatter_(-1, index, at_target.to(ctx.dtype))
        grad[..., ctx.columns :] = 0.0  # even in a row that is NaN
        return grad, None, None, None, None


def _local(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Where ids are among this rank's `count`, from `first` on: index, 0 for those that are not,
    and whether they are."""
    index = ids - first
    own = (index >= 0) & (index < count)
    return index.masked_fill_(~own, 0), own
