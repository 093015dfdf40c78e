"""Run micro batches through the model: forward, loss and backward, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fp8train.parallel.pipeline import Schedule, Stage
from fp8train.parallel.reduction import GradientReduction
from fp8train.parallel.vocabulary import IGNORE

Loss = Callable[[Tensor, Tensor], Tensor]  # logits, targets → the sum of the losses


@dataclass(frozen=True)
class MicroBatch:
    """What one rank sees of a micro batch.

    Attributes:
        tokens, targets: [B, T/c] int64; targets are `IGNORE` where nothing is to be predicted.
        first_sample: of the micro batch over all ranks, in the stream of samples.
    """

    tokens: Tensor
    targets: Tensor
    first_sample: int


class Execution(Protocol):
    """How a rank's part of the model runs.

    `before` is called with a micro batch before each forward of it on this rank.
    """

    def train(
        self, batches: list[MicroBatch], weight: float, before: Callable[[MicroBatch], None]
    ) -> Tensor:
        """Leave the gradient of weight · (sum of losses), averaged over the data ranks, in the
        shards. Returns the sum of losses of this rank's tokens, FP64; 0 where it has no logits."""
        ...

    def evaluate(self, batches: list[MicroBatch], before: Callable[[MicroBatch], None]) -> Tensor:
        """The sum of losses alone; run under `torch.no_grad()`."""
        ...


@dataclass
class Sequential:
    """The whole model on this rank: one micro batch after the other.

    Attributes:
        reduction: of each micro batch's gradients; None: of their sum, with the last one.
        keep_weights: gathered by the first micro batch, they stay until the last one's backward.
    """

    model: nn.Module
    loss: Loss
    reduction: GradientReduction | None = None
    keep_weights: bool = False

    def train(
        self, batches: list[MicroBatch], weight: float, before: Callable[[MicroBatch], None]
    ) -> Tensor:
        """As `Execution.train`; gradients add up unsharded in FP32 until the last micro batch, or
        in the shards."""
        assert isinstance(self.model, FSDPModule)
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        shards = list(self.model.parameters())  # what FSDP2 gathers later has no gradient
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            self.model.set_requires_gradient_sync(last or self.reduction is not None)
            self.model.set_reshard_after_backward(last or not self.keep_weights)
            # FSDP2 would add to a gradient that is there one whose bytes are still on the way.
            sums = take_gradients(shards) if self.reduction is not None else []
            before(batch)
            loss = self.loss(self.model(batch.tokens), batch.targets)
            (loss * weight).backward()
            total += loss.detach()
            if self.reduction is not None:
                self.reduction.finish()
                for before_it, shard in sums:
                    assert shard.grad is not None
                    shard.grad.add_(before_it)
        return total

    def evaluate(self, batches: list[MicroBatch], before: Callable[[MicroBatch], None]) -> Tensor:
        """As `Execution.evaluate`."""
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        for batch in batches:
            before(batch)
            total += self.loss(self.model(batch.tokens), batch.targets)
        return total


def take_gradients(shards: list[nn.Parameter]) -> list[tuple[Tensor, nn.Parameter]]:
    """The gradients that there are, taken away from their shards."""
    found = [(shard.grad, shard) for shard in shards if shard.grad is not None]
    for _, shard in found:
        shard.grad = None
    return found


class Pipelined:
    """Stages of the model on this rank, in the order of a schedule.

    Args:
        make: the schedule over the stages that it is given a loss for.
        stages: this rank's.
    """

    def __init__(
        self, stages: list[Stage], make: Callable[[Loss], Schedule], loss: Loss, count: int
    ) -> None:
        self.stages, self.loss, self.count = stages, loss, count
        self.first = any(stage.is_first for stage in stages)
        self.last = any(stage.is_last for stage in stages)
        self.weight = 1.0
        self.losses: list[Tensor] = []  # of a step's micro batches, where this rank has the logits
        self.schedule = make(self._weighted)

    def _weighted(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(logits, targets)
        self.losses.append(loss.detach())
        return loss * self.weight

    def train(
        self, batches: list[MicroBatch], weight: float, before: Callable[[MicroBatch], None]
    ) -> Tensor:
        """As `Execution.train`."""
        self.weight = weight
        return self._run(self.schedule.step, batches, before)

    def evaluate(self, batches: list[MicroBatch], before: Callable[[MicroBatch], None]) -> Tensor:
        """As `Execution.evaluate`. A schedule has a fixed number of micro batches: missing ones are
        run with nothing to predict."""
        self.weight = 1.0
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        nothing = replace(batches[0], targets=torch.full_like(batches[0].targets, IGNORE))
        for start in range(0, len(batches), self.count):
            some = batches[start : start + self.count]
            some = some + [nothing] * (self.count - len(some))
            total += self._run(self.schedule.eval, some, before)
        return total

    def _run(
        self,
        step: Callable[..., object],
        batches: list[MicroBatch],
        before: Callable[[MicroBatch], None],
    ) -> Tensor:
        for stage in self.stages:
            stage.before = lambda number: before(batches[number])
        self.losses.clear()
        tokens = [torch.cat([batch.tokens for batch in batches])] if self.first else []
        targets = torch.cat([batch.targets for batch in batches]) if self.last else None
        step(*tokens, target=targets, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        return sum(self.losses, total)
