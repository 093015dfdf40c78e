"""One optimizer step and one validation: the arithmetic of training, without its reporting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8train.config import Config
from fp8train.data.dataset import PreparedData
from fp8train.data.order import TrainSamples, validation_samples
from fp8train.parallel.parallelize import ParallelModel
from fp8train.parallel.runtime import Ranks
from fp8train.precision.telemetry import Statistics, Telemetry
from fp8train.training.checkpoint import Progress
from fp8train.training.loss_scale import LossScaler
from fp8train.training.optimizer import build_optimizer
from fp8train.training.schedule import learning_rate


@dataclass
class StepResult:
    """One optimizer step over the global batch.

    Attributes:
        loss: mean over the global batch's tokens.
        grad_norm: of the whole gradient, before clipping; not finite for a skipped step.
            Neither loss nor norm carries the loss scale.
        learning_rate: of this step.
        bytes_reduced: gradient bytes that this rank sent.
        skipped: the gradient was not finite, so masters and scales stayed as they were.
        loss_scale: of this step; 1 where scaling is off.
        telemetry: of the quantised layers, by LAYER.ROLE; None where the step is no sample.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    bytes_reduced: int
    skipped: bool
    loss_scale: float
    telemetry: dict[str, Statistics] | None


class Learner:
    """Model, optimizer and data of one rank, and how far they have come."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        device: torch.device,
        data: PreparedData,
        progress: Progress,
        parallel: ParallelModel,
    ) -> None:
        self.config, self.ranks, self.device, self.progress = config, ranks, device, progress
        self.parallel = parallel
        length = config.trainer.sequence_length
        self.samples = TrainSamples(data.train, length, config.trainer.seed)
        self.held_out = validation_samples(
            data.validation, length, config.trainer.validation_samples
        )
        self.optimizer = build_optimizer(parallel.model, config.optimizer)
        self.loss_scaler = LossScaler(config, progress)
        self.telemetry = Telemetry(
            parallel.conversion.numerics, config.precision.telemetry.every, device
        )

    @property
    def tokens_a_step(self) -> int:
        return self.config.trainer.global_batch_size * self.config.trainer.sequence_length

    def step(self) -> StepResult:
        """Forward and backward over the global batch, one reduction, one update."""
        trainer, progress, scale = self.config.trainer, self.progress, self.loss_scaler.scale
        self.parallel.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.telemetry.begin_step(progress.step + 1)
        loss = self._gradients()
        telemetry = self.telemetry.end_step(self.parallel.mesh.get_group())
        self.loss_scaler.unscale(self.parallel.model.parameters())
        grad_norm = self._clip()
        skipped = not math.isfinite(grad_norm)
        progress.step += 1
        progress.consumed_samples += trainer.global_batch_size
        progress.tokens += self.tokens_a_step
        progress.skipped_steps += skipped
        rate = learning_rate(
            progress.step, trainer.steps, self.config.optimizer.lr, self.config.schedule
        )
        self._update(rate, skipped)
        self.loss_scaler.update(skipped)
        sent = self.parallel.reduction.take_bytes()
        return StepResult(loss, grad_norm, rate, sent, skipped, scale, telemetry)

    def _gradients(self) -> float:
        """Leave the mean gradient in the FP32 shards, times the loss scale.

        Returns:
            the mean loss over all ranks, without the scale.
        """
        trainer, ranks = self.config.trainer, self.ranks
        micro = trainer.micro_batch_size
        rounds = trainer.global_batch_size // (micro * ranks.world_size)
        total = torch.zeros((), device=self.device)
        for index in range(rounds):
            self.parallel.synchronize_gradients(index == rounds - 1)
            first = self.progress.consumed_samples + index * ranks.world_size * micro
            self.parallel.conversion.begin_micro_batch(
                self.progress.step, first, ranks.rank * micro * trainer.sequence_length
            )
            batch = self.samples.batch(first + ranks.rank * micro, micro)
            loss = self._losses(batch).mean() / rounds
            (loss * self.loss_scaler.scale).backward()
            total += loss.detach()
        dist.all_reduce(total)
        return float(total) / ranks.world_size

    def _clip(self) -> float:
        """Clip the gradient to `trainer.clip_grad_norm`; return its norm before."""
        limit = self.config.trainer.clip_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parallel.model.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _update(self, rate: float, skipped: bool) -> None:
        """Step the masters and roll the amax histories, or leave both for a skipped step."""
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.parallel.conversion.end_step(self.parallel.mesh.get_group(), skipped=skipped)

    def _losses(self, batch: Tensor) -> Tensor:
        """Next-token cross entropies in FP32, [B, T], of samples [B, T+1]."""
        batch = batch.to(self.device)
        logits = self.parallel.model(batch[:, :-1])
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"
        )
        return losses.view(len(batch), -1)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the held-out samples. All ranks do the same number of forwards."""
        self.parallel.model.eval()
        micro, world_size = self.config.trainer.micro_batch_size, self.ranks.world_size
        count = len(self.held_out)
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, count, micro * world_size):
            rows = first + self.ranks.rank * micro + torch.arange(micro)
            losses = self._losses(self.held_out[rows.clamp(max=count - 1)]).cpu()
            counted = losses[rows < count].double()
            sums += torch.tensor([counted.sum(), counted.numel()], dtype=torch.float64)
        dist.all_reduce(sums)
        self.parallel.release_weights()
        return float(sums[0] / sums[1])
