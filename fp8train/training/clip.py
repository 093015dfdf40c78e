"""The norm of the whole gradient, and clipping by it, whatever the layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8train.parallel.mesh import Mesh
from fp8train.parallel.parallelize import ParallelModel

TIED = {"embed_tokens.weight", "lm_head.weight"}


@torch.no_grad()
def clip_gradients(parallel: ParallelModel, limit: float) -> float:
    """Scale the gradients down to a norm of `limit`, in place; return their norm before.

    A parameter that two pipeline stages have a copy of counts once.
    """
    named = list(parallel.model.named_parameters())
    last = parallel.mesh.place.pipeline == parallel.mesh.layout.pipeline - 1
    copied = parallel.tied_across_stages and last
    counted = [
        parameter.grad
        for name, parameter in named
        if parameter.grad is not None and not (copied and name in TIED)
    ]
    norm = torch.nn.utils.get_total_norm(counted)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if parallel.mesh.layout.pipeline > 1:
        square = norm.double().square()  # FP32 would overflow, or flush, a norm that it can hold
        dist.all_reduce(square, group=parallel.mesh.pipeline)
        norm = square.sqrt().to(norm.dtype)
    torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in named], limit, norm)
    return float(norm)


@torch.no_grad()
def share_tied_gradient(parallel: ParallelModel) -> None:
    """Give both copies of the embedding, in the first and the last stage, the sum of their
    gradients."""
    mesh: Mesh = parallel.mesh
    ends = (0, mesh.layout.pipeline - 1)
    if mesh.place.pipeline not in ends:
        return
    parameters = dict(parallel.model.named_parameters())
    (name,) = TIED & parameters.keys()
    gradient = parameters[name].grad
    assert isinstance(gradient, DTensor)
    ours: Tensor = gradient.to_local()
    theirs = torch.empty_like(ours)
    peer = ends[0] if mesh.place.pipeline else ends[1]
    exchange = [
        dist.P2POp(dist.isend, ours.clone(), group=mesh.pipeline, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=mesh.pipeline, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    ours.add_(theirs)
