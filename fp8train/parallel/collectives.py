"""The collectives of tensor parallelism, each with its transpose as gradient.

Tensors are [B, T, ...]; what is divided over ranks is T, in rank order. Partial sums travel in
their own dtype, BF16 or FP32: eight bits are for values that nobody adds up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Called all_gather_into_tensor before torch 2.13, where that name warns.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [...] of every rank → [ranks, ...], in rank order."""
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    gather_into(parts, x.contiguous(), group=group)
    return parts.view(group.size(), *x.shape)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x [B, T/t, ...] of every rank → [B, T, ...]."""
    size, (batch, length, *rest) = group.size(), x.shape
    return gather_parts(x, group).movedim(0, 1).reshape(batch, size * length, *rest)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of x [B, T, ...], of which each keeps its [B, T/t, ...]."""
    size, (batch, length, *rest) = group.size(), x.shape
    parts = x.view(batch, size, length // size, *rest).movedim(1, 0).contiguous()
    if x.device.type == "cpu":
        # gloo's reduce-scatter sends whole tensors; here each rank sends each part once, and sums
        # in rank order and FP32, whatever the number of ranks.
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        total = torch.zeros(received.shape[1:], dtype=torch.float32)
        for part in received:
            total.add_(part)
        return total.to(x.dtype)
    scattered = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(scattered, parts, group=group)
    return scattered


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of x, on each."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def enter(x: Tensor, group: dist.ProcessGroup, sequence: bool) -> Tensor:
    """From the residual stream into column-parallel linears.

    With sequence parallelism x [B, T/t, D] is gathered; without, x [B, T, D] is on every rank
    already, and only its gradient is a sum over them.
    """
    out: Tensor = (_Gather if sequence else _Copy).apply(x, group)
    return out


def leave(x: Tensor, group: dist.ProcessGroup, sequence: bool) -> Tensor:
    """From partial sums x [B, T, D] of row-parallel linears back into the residual stream."""
    out: Tensor = (_Scatter if sequence else _Sum).apply(x, group)
    return out
