"""Tensor parallelism in Megatron's manner (Shoeybi et al. 2019; sequence parallelism: Korthikanti
et al. 2022).

Column-parallel linears (q, k, v, gate, up, LM head) hold some rows of their weight [N, K] and give
some columns of the output; row-parallel ones (o, down) hold some columns and give a partial sum.
The embedding holds some rows of its table. What goes into a pair of them is gathered once, before
attention and MLP, and what comes out is summed once, behind o_proj and down_proj.

A parameter is a DTensor on the tensor mesh, which FSDP, clipping and checkpoints see as the whole
matrix; forward sees this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from fp8train.models.llama import Llama
from fp8train.parallel.collectives import enter, leave
from fp8train.parallel.mesh import Mesh
from fp8train.parallel.quantized_gather import SIBLINGS, EnterQuantized
from fp8train.parallel.vocabulary import embed_part
from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.split import Split, Splits

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj")


class LocalWeight(nn.Module):
    """Mixed into a module's class: its forward sees this rank's part of a weight that is a DTensor.

    Attributes:
        gradient: how the weight's gradient of one rank stands to the whole one.
        in_forward: `weight` is this rank's part now, and the DTensor otherwise.
    """

    gradient: Placement
    in_forward = False

    @property
    def weight(self) -> Tensor:
        """The parameter; in forward this rank's part of it."""
        whole = self._parameters["weight"]
        assert isinstance(whole, DTensor)
        if not self.in_forward:
            return whole
        local: Tensor = whole.to_local(grad_placements=[self.gradient])
        return local

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The other class's."""
        self.in_forward = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.in_forward = False


def localize(module: nn.Module, gradient: Placement) -> None:
    """Give a module, whose weight is a DTensor, a class whose forward sees the local part."""
    name = f"Local{type(module).__name__}"
    module.__class__ = type(name, (LocalWeight, type(module)), {})
    assert isinstance(module, LocalWeight)
    module.gradient = gradient


def shard_weights(model: Llama, mesh: Mesh) -> None:
    """Make every parameter a DTensor on the tensor mesh: matrices divided, norms whole.

    Comes before linears are swapped for quantised ones, which keep the parameter.
    """
    embedding, head = model.embed_tokens, model.lm_head
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        kind = name.rpartition(".")[2]
        placement: Placement = Replicate()
        if kind in COLUMN_PARALLEL or isinstance(module, nn.Embedding):
            placement = Shard(0)
        elif kind in ROW_PARALLEL:
            placement = Shard(1)
        whole = distribute_tensor(weight.detach(), mesh.tensor, [placement], src_data_rank=None)
        module._parameters["weight"] = nn.Parameter(whole)
    if embedding is not None and head is not None and tied:
        head.weight = embedding.weight


def communicate(model: Llama, mesh: Mesh, quantized: set[str]) -> None:
    """Have modules read their local weights, and put the collectives between them.

    Comes after linears were swapped for quantised ones.

    Args:
        quantized: attentions and MLPs, by full name, whose input is gathered in eight bits.
    """
    sequence, group = mesh.layout.sequence, mesh.tensor.get_group()
    for name, module in list(model.named_modules()):
        whole = module._parameters.get("weight")
        if whole is None:
            continue
        assert isinstance(whole, DTensor)
        (placement,) = whole.placements
        # Under sequence parallelism a norm sees some of the tokens, its gradient is a part.
        partial = sequence and isinstance(placement, Replicate)
        if isinstance(module, nn.Embedding):
            VocabularyParallel.take_over(module, mesh)
            continue
        localize(module, Partial() if partial else placement)
        if name.rpartition(".")[2] in ROW_PARALLEL:
            module.register_forward_hook(Leave(group, sequence))
    for name in branches(model):
        branch = model.get_submodule(name)
        plain, in_bytes = Enter(group, sequence), EnterQuantized(linears(branch), group)
        branch.register_forward_pre_hook(in_bytes if name in quantized else plain)
    if model.lm_head is not None:
        model.lm_head.register_forward_pre_hook(Enter(group, sequence))


def branches(model: Llama) -> list[str]:
    """Full names of attentions and MLPs, which the residual stream enters."""
    return [f"layers.{number}.{part}" for number in model.layers for part in SIBLINGS]


def linears(branch: nn.Module) -> list[QuantizedLinear]:
    """The linears that take a branch's input."""
    return [m for name, m in branch.named_children() if name in COLUMN_PARALLEL]  # type: ignore[misc]


class VocabularyParallel(nn.Embedding):
    """Some rows of an embedding on each rank; the sum of what they give is the whole one's output.

    Attributes:
        mesh: who has the other rows.
    """

    mesh: Mesh

    @staticmethod
    def take_over(embedding: nn.Embedding, mesh: Mesh) -> None:
        """Make this of an embedding whose weight is a DTensor."""
        embedding.__class__ = VocabularyParallel
        assert isinstance(embedding, VocabularyParallel)
        embedding.mesh = mesh

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] → [B, T, D], under sequence parallelism [B, T/t, D]."""
        mesh = self.mesh
        assert isinstance(self.weight, DTensor)
        rows = self.weight.to_local()
        part = embed_part(tokens, rows, mesh.place.tensor * rows.shape[0])
        return leave(part, mesh.tensor.get_group(), mesh.layout.sequence)


class Enter:
    """Hook: a module's first input comes from the residual stream."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = inputs
        return enter(x, self.group, self.sequence), *rest


class Leave(Enter):
    """Hook: a module's output, a partial sum, goes to the residual stream."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return leave(output, self.group, self.sequence)


def splits(model: nn.Module, mesh: Mesh, amax_groups: str, quantized: set[str]) -> Splits:
    """For each linear of the blocks, how ranks divide its input, weight and output gradient.

    Args:
        amax_groups: "all", or "te": as TE does, amaxes are shared only where a tensor that was
            gathered is whole anyway.
        quantized: as of `communicate`.
    """
    layout, place = mesh.layout, mesh.place
    context = mesh.context if layout.context > 1 else None
    group = mesh.tensor.get_group() if layout.tensor > 1 else None
    both = mesh.rows if context is not None and group is not None else None
    found: dict[str, dict[str, Split]] = {}
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        kind = name.rpartition(".")[2]
        tokens = Split(rows=context)
        if kind in COLUMN_PARALLEL:
            first = place.tensor * linear.out_features // layout.tensor
            roles = {
                "input": tokens,
                "weight": Split(rows=group, row_offset=first),
                "grad_output": Split(context, group, both, column_offset=first),
            }
        else:
            first = place.tensor * linear.in_features // layout.tensor
            roles = {
                "input": Split(context, group, both, column_offset=first),
                "weight": Split(columns=group, column_offset=first),
                "grad_output": tokens,
            }
        if amax_groups == "te":
            roles = {role: split.without_groups() for role, split in roles.items()}
        if kind in COLUMN_PARALLEL and name.rpartition(".")[0] in quantized:
            ranks = group if amax_groups == "te" or context is None else mesh.rows
            roles["input"] = Split(rows=ranks, sequence_part=(place.tensor, layout.tensor))
        found[name] = roles
    return found
