"""FP8 weights gathered as bytes, through FSDP2's all-gather extensions.

Once a step each rank rounds the rows that it owns of each FP8 linear's weight to BF16, one MAX
all-reduce shares the amaxes of all of them, and the rows are cast. FSDP2 gathers these bytes in the
place of BF16, and the layer takes the payload as it arrives (`precision.weight_bytes`). What stays
in 16 bits (norms, embeddings, the head) travels in the same collectives.

FSDP2 asks a shard itself for what to gather; since it looks for two attributes, the shard stays the
plain FP32 tensor that optimizer and checkpoints know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.quantize import share_amax
from fp8train.precision.quantizers import Delayed, Scaled
from fp8train.precision.weight_bytes import WeightBytes


@dataclass
class GatheredWeight:
    """One weight's part in FSDP2's all-gathers.

    Attributes:
        state: FSDP2's of this parameter.
        weight: what is gathered.
        padded_rows: of each rank's shard.
        stored: uint8 [padded rows, K], this rank's bytes.
    """

    state: Any  # torch's FSDPParam, which has no public name
    weight: WeightBytes
    padded_rows: int
    stored: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def shard(self) -> Tensor:
        """This rank's rows, FP32 [n, K]."""
        local: Tensor = self.state.sharded_param._local_tensor
        return local

    def attach(self) -> None:
        """Have FSDP2 ask for the bytes."""
        shard: Any = self.shard
        if not hasattr(shard, "fsdp_pre_all_gather"):
            shard.fsdp_pre_all_gather = self.before_gather
            shard.fsdp_post_all_gather = self.after_gather
            self.state._init_extensions()

    def cast(self, rows: Tensor) -> None:
        """Make this rank's bytes, of BF16 rows [n, K]."""
        stored = self.weight.cast(rows)
        self.stored = F.pad(stored, (0, 0, 0, self.padded_rows - len(stored)))

    def before_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor], None]:
        """FSDP2's `fsdp_pre_all_gather`: what this rank sends."""
        return (self.stored,), None

    def after_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's `fsdp_post_all_gather`: hand all ranks' bytes to the layer.

        The parameter that FSDP2 shows is a stand-in with shape, dtype and gradient. FSDP2 needs its
        memory while it makes it, and nobody does afterwards.
        """
        self.weight.arrived = all_gather_outputs[0][: self.weight.shape[0]]
        if out is not None:
            local = out._local_tensor if isinstance(out, DTensor) else out
            local.untyped_storage().resize_(0)
            return None
        device = all_gather_outputs[0].device
        return torch.empty(self.weight.shape, dtype=param_dtype, device=device), ()


@dataclass
class ParameterGather:
    """All weights of a rank that are gathered as bytes.

    Attributes:
        group: the ranks that own rows of them.
    """

    weights: list[GatheredWeight]
    group: dist.ProcessGroup

    @classmethod
    def of(cls, models: Sequence[nn.Module], mesh: DeviceMesh) -> ParameterGather:
        """Have sharded models gather what can be gathered as bytes."""
        weights = [weight for model in models for weight in _found(model, mesh)]
        return cls(weights, mesh.get_group())

    @torch.no_grad()
    def prepare(self) -> None:
        """Cast the masters as they are now; before the first gather that is to see them."""
        if not self.weights:  # a stage whose layers are all in BF16
            return
        rows = [weight.shard.bfloat16() for weight in self.weights]
        self._share_amaxes(rows)
        for weight, own in zip(self.weights, rows, strict=True):
            weight.attach()
            weight.cast(own)

    def _share_amaxes(self, rows: list[Tensor]) -> None:
        """One all-reduce over the owners of rows, and one over the tensor ranks for those weights
        whose one scale they share."""
        weights = [gathered.weight for gathered in self.weights]
        own = [weight.own_amaxes(part) for weight, part in zip(weights, rows, strict=True)]
        sharing: dict[dist.ProcessGroup, list[int]] = {self.group: list(range(len(own)))}
        for number, weight in enumerate(weights):
            if isinstance(weight.quantizer, Scaled):  # delayed scales are all ranks' already
                tensor_ranks = weight.quantizer.split.sharing(weight.granularity)
                if tensor_ranks is not None:
                    sharing.setdefault(tensor_ranks, []).append(number)
        for group, numbers in sharing.items():
            together = torch.cat([own[number].view(-1) for number in numbers])
            parts = share_amax(together, group).split([own[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                own[number] = part.view(own[number].shape)
        for weight, amaxes in zip(weights, own, strict=True):
            weight.amax = amaxes


def _found(model: nn.Module, mesh: DeviceMesh) -> Iterator[GatheredWeight]:
    root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    root._lazy_init()  # pads the shards, which makes new tensors of them
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                layer, name = parameter._module_info.module, parameter._module_info.param_name
                if name != "weight" or not isinstance(layer, QuantizedLinear) or layer.smooth:
                    continue
                quantizer = layer.numerics.quantizers["weight"]
                if (
                    isinstance(quantizer, Scaled | Delayed)
                    and quantizer.recipe.weight_travels_as_bytes
                ):
                    rows = parameter.padded_sharded_param_size[0]
                    shape = tuple(parameter._orig_size)
                    first = min(mesh.get_local_rank() * rows, shape[0])
                    layer.bytes = WeightBytes(quantizer, shape, first)
                    gathered = GatheredWeight(parameter, layer.bytes, rows)
                    gathered.attach()
                    yield gathered
