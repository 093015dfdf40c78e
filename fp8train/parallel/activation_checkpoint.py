"""Activation checkpointing: backward computes a block's activations again instead of keeping them.

`full` keeps a block's input alone. `selective` keeps the results of its GEMMs and of the attention
core too, and recomputes what is cheap and large: norms, rotary embedding, silu · up, and the
quantised copies of inputs and weights.

The recomputation gives the same bits under every recipe. It draws the random bits of its own micro
batch, where a pipeline has begun another in the meantime. Scales of earlier steps change once an
optimizer step (`precision/delayed.py`), so those of the forward are still there, and the amax that
is staged again is a maximum with itself. It runs below FSDP2's hooks, while backward has the
block's weights gathered anyway: nothing is gathered or reduced twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8train.precision.linear import Gemms, QuantizedLinear
from fp8train.precision.quantizers import Operand, Position

aten = torch.ops.aten
KEPT_OPERATORS = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
]


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: str, position: Position) -> None:
    """Have each block's forward run under activation checkpointing; names stay as they are.

    Comes before `fully_shard`, whose hooks have to stay outside of what is recomputed.

    Args:
        blocks: modules whose forward gives the same bits for the same inputs.
        mode: "none", "selective" or "full".
        position: of the micro batch, shared by the blocks' layers.
    """
    if mode == "none":
        return
    blocks, kept = list(blocks), KeptResults()
    if mode == "selective":
        for block in blocks:
            _keep_gemms(block, kept)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        forward, recomputation = kept.contexts() if mode == "selective" else (nullcontext(),) * 2
        return forward, _restored(position, replace(position), recomputation)

    options: dict[str, Any] = {"use_reentrant": False, "context_fn": contexts}
    for block in blocks:
        # Not a wrapper around the block, which would add a part to its parameters' names; and a
        # partial rather than a closure, so that a deep copy of the block runs itself.
        block.forward = partial(checkpoint, block.forward, **options)


@contextmanager
def _restored(
    position: Position, then: Position, inner: AbstractContextManager[None]
) -> Iterator[None]:
    """The position as it was then, for as long as `inner` lasts."""
    now = vars(position).copy()
    vars(position).update(vars(then))
    try:
        with inner:
            yield
    finally:
        vars(position).update(now)


class KeptResults:
    """What a block's forward leaves for its recomputation; one object for all blocks.

    torch's selective checkpointing keeps results of operators. What a quantised layer's GEMM is
    made of are not its result but sums in FP32, one a block of the reduction or none at all where
    C++ adds: so of a GEMM it is the result that is kept, here.

    Attributes:
        results: of the running block's GEMMs, in order; None outside of checkpointed blocks.
        recomputing: the running block reads results, and does not leave them.
    """

    def __init__(self) -> None:
        self.results: deque[Tensor] | None = None
        self.recomputing = False

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of one forward of a block and of its recomputation."""
        results: deque[Tensor] = deque()
        forward, recomputation = create_selective_checkpoint_contexts(KEPT_OPERATORS)
        return self._run(results, False, forward), self._run(results, True, recomputation)

    @contextmanager
    def _run(
        self, results: deque[Tensor], recomputing: bool, operators: AbstractContextManager[Any]
    ) -> Iterator[None]:
        self.results, self.recomputing = results, recomputing
        try:
            with operators:
                yield
        finally:
            self.results = None


@dataclass
class KeptGemms:
    """A layer's backend, with the results of fprop kept for recomputation."""

    gemms: Gemms
    kept: KeptResults

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """As `Gemms.gemm`."""
        results = self.kept.results
        if results is None:
            return self.gemms.gemm(kind, a, b, dtype)
        if self.kept.recomputing:
            return results.popleft()
        # torch's contexts count operators, and would miss in recomputation those of this GEMM.
        with _disable_current_modes():
            result = self.gemms.gemm(kind, a, b, dtype)
        results.append(result)
        return result


def _keep_gemms(block: nn.Module, kept: KeptResults) -> None:
    """Put `KeptGemms` between a block's quantised layers, which may share it, and their backend."""
    for layer in block.modules():
        if isinstance(layer, QuantizedLinear):
            gemms = layer.numerics.gemms
            if not isinstance(gemms, KeptGemms):
                layer.numerics.gemms = KeptGemms(gemms, kept)
