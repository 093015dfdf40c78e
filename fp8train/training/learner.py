"""One optimizer step and one validation: the arithmetic of training, without its reporting."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.config import Config
from fp8train.data.dataset import PreparedData
from fp8train.data.order import TrainSamples, validation_samples
from fp8train.layout import micro_batches
from fp8train.parallel.audit import Audit
from fp8train.parallel.context import positions
from fp8train.parallel.execution import MicroBatch
from fp8train.parallel.parallelize import ParallelModel
from fp8train.parallel.vocabulary import IGNORE
from fp8train.precision.telemetry import Statistics, Telemetry
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.clip import clip_gradients, share_tied_gradient
from fp8train.training.loss_scale import LossScaler, divide
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
        gradient_audit: as `Audit.report`; None where the step is not audited.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    bytes_reduced: int
    skipped: bool
    loss_scale: float
    telemetry: dict[str, Statistics] | None
    gradient_audit: dict[str, float] | None


class Learner:
    """Model, optimizer and data of one rank, and how far they have come."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        data: PreparedData,
        progress: Progress,
        parallel: ParallelModel,
    ) -> None:
        self.config, self.device, self.progress = config, device, progress
        self.parallel, self.mesh = parallel, parallel.mesh
        length = config.trainer.sequence_length
        layout, place = self.mesh.layout, self.mesh.place
        self.positions = positions(length, layout.context, place.context, torch.device("cpu"))
        self.end_of_document = data.eos_id if config.data.eod_mask_loss else None
        self.samples = TrainSamples(data.train, length, config.trainer.seed)
        self.held_out = validation_samples(
            data.validation, length, config.trainer.validation_samples
        )
        self.optimizer = build_optimizer(parallel.model, config.optimizer)
        self.loss_scaler = LossScaler(config, progress)
        every, numerics = config.precision.telemetry.every, parallel.numerics()
        # All ranks take part in a sample, those of a pipeline stage without a quantised layer too.
        elsewhere = torch.tensor(float(bool(numerics)), device=device)
        dist.all_reduce(elsewhere, dist.ReduceOp.MAX)
        self.telemetry = Telemetry(numerics, every, device, elsewhere=bool(elsewhere))

    @property
    def tokens_a_step(self) -> int:
        return self.config.trainer.global_batch_size * self.config.trainer.sequence_length

    def step(self) -> StepResult:
        """Forward and backward over the global batch, one reduction, one update."""
        trainer, progress, scale = self.config.trainer, self.progress, self.loss_scaler.scale
        self.parallel.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        self.telemetry.begin_step(progress.step + 1)
        audit = self._audit()
        self.parallel.reduction.begin_step(progress.step, audit)
        loss = self._gradients()
        telemetry = self._end_telemetry()
        self.loss_scaler.unscale(self.parallel.model.parameters())
        if self.parallel.tied_across_stages:
            share_tied_gradient(self.parallel)
        grad_norm = clip_gradients(self.parallel, trainer.clip_grad_norm or math.inf)
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
        self.parallel.reduction.end_step(skipped=skipped)
        sent, audited = self.parallel.reduction.take_bytes(), audit.report() if audit else None
        return StepResult(loss, grad_norm, rate, sent, skipped, scale, telemetry, audited)

    def _audit(self) -> Audit | None:
        """What compares this step's reduction with one in FP32; None where it is not asked for."""
        every = self.config.gradients.audit_every
        return Audit(self.device) if every and (self.progress.step + 1) % every == 0 else None

    def _gradients(self) -> float:
        """Leave the mean gradient in the FP32 shards, times the loss scale.

        Returns:
            the mean loss over the global batch's targets, without the scale.
        """
        micro, data = self.config.trainer.micro_batch_size, self.mesh.layout.data
        batches = []
        for index in range(micro_batches(self.config, self.mesh.layout)):
            first = self.progress.consumed_samples + index * data * micro
            mine = first + self.mesh.place.data * micro
            batches.append(self._batch(self.samples.batch(mine, micro), first))
        targets = self._count(batches)
        # A micro batch's loss is its mean, in size, in every layout: output gradients that delayed
        # scaling meets must not depend on how many micro batches there are elsewhere.
        weight = len(batches) * data / max(targets, 1)
        total = self.parallel.train(batches, weight * self.loss_scaler.scale, self._begin)
        # FSDP has averaged over the ranks that have samples or positions of their own.
        divide(self.parallel.model.parameters(), len(batches) / self.mesh.layout.context)
        return self._sum(total) / max(targets, 1)

    def _batch(self, samples: Tensor, first_sample: int, rows: int | None = None) -> MicroBatch:
        """This rank's part of samples [B, T+1], of which only so many rows count."""
        tokens, targets = samples[:, :-1], samples[:, 1:].clone()
        if self.end_of_document is not None:
            targets[tokens == self.end_of_document] = IGNORE
        targets[rows if rows is not None else len(samples) :] = IGNORE
        here = [part[:, self.positions].to(self.device) for part in (tokens, targets)]
        return MicroBatch(here[0], here[1], first_sample)

    def _begin(self, batch: MicroBatch) -> None:
        """Tell the layers which rows of which micro batch come."""
        samples, length = batch.tokens.shape[0], self.config.trainer.sequence_length
        first = self.mesh.place.data * samples
        numbers = torch.arange(first, first + samples)[:, None] * length + self.positions
        rows = numbers.to(self.device)
        for conversion in self.parallel.conversions():
            conversion.begin_micro_batch(self.progress.step, batch.first_sample, rows)

    def _count(self, batches: list[MicroBatch]) -> int:
        """Targets of all ranks' micro batches that count."""
        count = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        if self.end_of_document is None:
            return count * self.mesh.layout.data * self.mesh.layout.context
        return int(self._sum(torch.tensor(count, device=self.device), everywhere=True))

    def _sum(self, value: Tensor, *, everywhere: bool = False) -> float:
        """The sum over the ranks that have samples or positions of their own.

        Args:
            everywhere: every pipeline stage has the value, and not the last one alone.
        """
        value = value.double()
        if self.mesh.place.tensor or (everywhere and self.mesh.place.pipeline):
            value = torch.zeros_like(value)
        dist.all_reduce(value)
        return float(value)

    def _end_telemetry(self) -> dict[str, Statistics] | None:
        """The sample of this step, of the layers of all stages."""
        found = self.telemetry.end_step(self.mesh.stage)
        if found is None or self.mesh.layout.pipeline == 1:
            return found
        stages: list[dict[str, Statistics]] = [{}] * self.mesh.layout.pipeline
        dist.all_gather_object(stages, found, group=self.mesh.pipeline)
        every = {name: value for stage in stages for name, value in stage.items()}
        return dict(sorted(every.items(), key=lambda item: block_number(item[0])))

    def _update(self, rate: float, skipped: bool) -> None:
        """Step the masters and roll the amax histories, or leave both for a skipped step."""
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        for conversion in self.parallel.conversions():
            conversion.end_step(self.mesh.stage, skipped=skipped)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the held-out samples. All ranks do the same number of forwards."""
        self.parallel.model.eval()
        micro, count = self.config.trainer.micro_batch_size, len(self.held_out)
        batches = []
        for first in range(0, count, micro * self.mesh.layout.data):
            mine = first + self.mesh.place.data * micro
            rows = mine + torch.arange(micro)
            samples = self.held_out[rows.clamp(max=count - 1)]
            batches.append(self._batch(samples, first, min(max(count - mine, 0), micro)))
        total = self._sum(self.parallel.evaluate(batches, self._begin))
        targets = sum(int((batch.targets != IGNORE).sum()) for batch in batches)
        counted = self._sum(torch.tensor(targets, device=self.device), everywhere=True)
        self.parallel.release_weights()
        return total / counted


def block_number(name: str) -> float:
    """The block that a layer's full name is in; infinity for one behind the blocks."""
    return next((int(part) for part in name.split(".") if part.isdigit()), math.inf)
