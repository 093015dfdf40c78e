"""What a gradient reduction did to a step's gradients, against the same reduction in FP32."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.precision.wire import Codec, EightBit

SUMS = ("error", "reference", "reduced", "product", "elements", "saturated", "flushed")


class Audit:
    """Sums over the elements of a step, of this rank until `report` adds up all ranks'."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)

    def encoded(self, codec: Codec, messages: Tensor, x: Tensor) -> None:
        """Messages have been made of x, FP32 [N, S]."""
        if isinstance(codec, EightBit):
            self._add("elements", torch.tensor(x.numel()))
            self._add("saturated", codec.saturated(messages, x))
            self._add("flushed", codec.flushed(messages, x))

    def reduced(self, result: Tensor, reference: Tensor) -> None:
        """A shard's mean gradient, and what FP32 would have made of it."""
        ours, exact = result.double(), reference.double()
        self._add("error", (ours - exact).square().sum())
        self._add("reference", exact.square().sum())
        self._add("reduced", ours.square().sum())
        self._add("product", (ours * exact).sum())

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[SUMS.index(name)] += value.to(self.sums)

    def report(self) -> dict[str, float]:
        """Over all ranks: relative error (2-norm) and cosine, and of elements that were encoded in
        eight bits the fractions that saturated, and that were flushed to zero. Every rank calls
        it."""
        dist.all_reduce(self.sums)
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        norm, elements = sums["reference"], sums["elements"]
        lengths = (norm * sums["reduced"]) ** 0.5
        found = {
            "relative_error": (sums["error"] / norm) ** 0.5 if norm else 0.0,
            "cosine": sums["product"] / lengths if lengths else 1.0,
        }
        if elements:
            found |= {name: sums[name] / elements for name in ("saturated", "flushed")}
        return found
