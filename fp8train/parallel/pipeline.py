"""Pipeline parallelism by torch.distributed.pipelining: what a stage holds, and how it runs.

Under `zero_bubble` a stage's linears put their weight gradients off until the schedule's W pass
(`precision.linear.LaterWgrads`). torch's own split of backward would run a custom Function's whole
backward in both passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from fp8train.layout import Layout
from fp8train.models.llama import Llama
from fp8train.parallel.mesh import Mesh
from fp8train.precision.linear import LaterWgrads, QuantizedLinear

Schedule = Schedule1F1B | ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble


def keep_stage(model: Llama, blocks: range, *, first: bool, last: bool) -> None:
    """Leave of a model the parts of one stage; what stays keeps its name."""
    for number in list(model.layers):
        if int(number) not in blocks:
            del model.layers[number]
    if not first:
        model.embed_tokens = None
    if not last:
        model.norm = model.lm_head = None


def put_off_wgrads(model: nn.Module) -> LaterWgrads:
    """Have a stage's linears leave their weight gradients for the W pass."""
    later = LaterWgrads()
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.later = later
    return later


class Stage(PipelineStage):
    """One stage of the pipeline on this rank.

    Args:
        examples: what it takes and gives, on the meta device.
        later: weight gradients that are put off; None where backward computes them.

    Attributes:
        before: called with the number of a micro batch before each of its forwards.
    """

    before: Callable[[int], None]

    def __init__(
        self,
        model: nn.Module,
        index: int,
        mesh: Mesh,
        device: torch.device,
        examples: tuple[Tensor, Tensor],
        later: LaterWgrads | None,
    ) -> None:
        super().__init__(
            model,
            index,
            mesh.layout.stages,
            device,
            input_args=examples[0],
            output_args=examples[1],
            group=mesh.pipeline,
            dw_builder=None if later is None else later.take,
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As the base class's, after telling the layers which micro batch comes."""
        self.before(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """As the base class's; then add up in FP32, which FSDP does in backward's hooks only."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if not self.has_backward:  # an evaluation
            return
        if isinstance(self.submod, FSDPModule):  # reached as in `perform_reduce_grad`
            states = fully_shard.state(self.submod)._state_ctx.all_states  # type: ignore[attr-defined]
            for state in states:
                for group in state._fsdp_param_groups:
                    group.post_backward()


def schedule(
    name: str, stages: list[Stage], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Schedule:
    """torch's schedule of that name over this rank's stages; `loss` adds up, not averages."""
    if name == "1f1b":
        (stage,) = stages
        return Schedule1F1B(stage, micro_batches, loss_fn=loss, scale_grads=False)
    kind = ScheduleInterleaved1F1B if name == "interleaved" else ScheduleInterleavedZeroBubble
    return kind(list(stages), micro_batches, loss_fn=loss, scale_grads=False)


@dataclass(frozen=True)
class Examples:
    """Tensors on the meta device, in the shapes of what stages hand on.

    Attributes:
        tokens: [micro, T/c] of this rank.
        hidden: [micro, T/c, D], under sequence parallelism [micro, T/c/t, D].
        logits: [micro, T/c, V/t].
    """

    tokens: Tensor
    hidden: Tensor
    logits: Tensor

    @classmethod
    def of(
        cls,
        layout: Layout,
        micro: int,
        length: int,
        hidden: int,
        vocabulary: int,
        dtype: torch.dtype,
    ) -> Examples:
        length //= layout.context
        part = length // layout.tensor if layout.sequence else length
        return cls(
            torch.empty(micro, length, dtype=torch.int64, device="meta"),
            torch.empty(micro, part, hidden, dtype=dtype, device="meta", requires_grad=True),
            torch.empty(micro, length, vocabulary // layout.tensor, dtype=dtype, device="meta"),
        )

    def of_stage(self, first: bool, last: bool) -> tuple[Tensor, Tensor]:
        """What a stage takes and gives."""
        return self.tokens if first else self.hidden, self.logits if last else self.hidden
