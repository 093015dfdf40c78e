"""The training run, from a configuration to a finished folder."""

from __future__ import annotations

import logging
import math
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fp8train.config import Config, check, gradient_reduction
from fp8train.data.dataset import PreparedData, prepare
from fp8train.data.order import TrainSamples, fingerprint, validation_samples
from fp8train.parallel import runtime
from fp8train.parallel.parallelize import ParallelModel, build
from fp8train.parallel.runtime import Ranks
from fp8train.planning.flops import fp8_fraction, model_flops
from fp8train.precision.backends.select import choose_backend
from fp8train.training import checkpoint, progress
from fp8train.training.checkpoint import Progress
from fp8train.training.optimizer import build_optimizer
from fp8train.training.run_folder import RunFolder
from fp8train.training.schedule import learning_rate

log = logging.getLogger("fp8train")


def train(config: Config) -> int:
    """Train as configured; every rank of the run calls it. Returns the exit code.

    Raises:
        ConfigError: a mistake in the configuration, found before any process group exists.
    """
    ranks = Ranks.from_environment()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO if ranks.is_first else logging.ERROR)
    check(config, ranks.world_size)
    device = runtime.choose_device(config.trainer.device, ranks)
    backend = choose_backend(config.precision, device)
    folder = RunFolder(config)
    folder.check()
    data = prepare(config.data, config.trainer.sequence_length)
    check_vocabulary(config, data)
    resume_from = checkpoint.newest(folder.checkpoints) if config.resume == "auto" else None
    state = Progress()
    if resume_from is not None:
        state = checkpoint.read_manifest(
            resume_from, config, fingerprint(data, config.trainer)
        )
        if state.step >= config.trainer.steps and folder.finished_steps() == state.step:
            log.info("%s is complete at step %d: nothing to do", folder.path, state.step)
            return 0
    runtime.start(ranks, device)
    try:
        Run(config, ranks, device, backend, folder, data, state).train(resume_from)
        dist.barrier()
    finally:
        runtime.stop()
    return 0


def check_vocabulary(config: Config, data: PreparedData) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    from fp8train.config import ConfigError

    if data.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is below the {data.vocab_size} ids of "
            f"data.tokenizer={config.data.tokenizer}: raise it"
        )


@dataclass
class StepResult:
    """One optimizer step: mean loss over the global batch, norm before clipping."""

    loss: float
    grad_norm: float
    skipped: bool


class Run:
    """One run's objects and its loop."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        device: torch.device,
        backend: str,
        folder: RunFolder,
        data: PreparedData,
        state: Progress,
    ) -> None:
        self.config, self.ranks, self.device = config, ranks, device
        self.backend, self.folder, self.state = backend, folder, state
        self.fingerprint = fingerprint(data, config.trainer)
        length = config.trainer.sequence_length
        self.samples = TrainSamples(data.train, length, config.trainer.seed)
        self.held_out = validation_samples(
            data.validation, length, config.trainer.validation_samples
        )
        self.parallel: ParallelModel = build(config, device)
        self.optimizer = build_optimizer(self.parallel.model, config.optimizer)
        self.wandb: Any = None
        self.flops_per_token = model_flops(config.model, length)
        self.fp8_fraction = fp8_fraction(config.model, length, self.parallel.conversion.layers)

    # --- the loop -------------------------------------------------------------------------------

    def train(self, resume_from: Any) -> None:
        """Go from the state's step to the last one, and write the summary."""
        trainer, start = self.config.trainer, self.state.step
        if resume_from is not None:
            checkpoint.load(resume_from, self.parallel, self.optimizer)
        if self.ranks.is_first:
            self.folder.open(resuming=resume_from is not None)
            self.folder.cut_metrics(start)
            self.start_wandb()
        began = time.monotonic()
        rates: list[float] = []
        bytes_reduced: list[int] = []
        with progress.ProgressLine(trainer.steps, start, self.ranks.is_first) as line:
            self.banner(line)
            first_validation = validation = self.validate() if start == 0 else math.nan
            if start == 0:
                self.record({"step": 0, "tokens": 0, "validation_loss": validation})
                line.say(f"step 0  validation loss {validation:.4f}")
            loss = math.nan
            while self.state.step < trainer.steps:
                step_began = time.monotonic()
                result = self.step()
                loss = result.loss
                seconds = time.monotonic() - step_began
                rates.append(self.tokens_a_step / seconds)
                bytes_reduced.append(self.parallel.reduction.take_bytes())
                if result.skipped:
                    line.say(f"step {self.state.step}: skipped, its gradients are not finite")
                if self.state.step % self.config.logging.every == 0:
                    self.record(self.metrics(result, seconds, bytes_reduced[-1]))
                line.update(self.state.step, loss, rates[-1])
                if self.due(trainer.validate_every) or self.state.step == trainer.steps:
                    validation = self.validate()
                    self.record(
                        {
                            "step": self.state.step,
                            "tokens": self.state.tokens,
                            "validation_loss": validation,
                        }
                    )
                    line.say(f"step {self.state.step}  validation loss {validation:.4f}")
                at_end = self.state.step == trainer.steps and self.config.checkpoint.at_end
                if self.due(self.config.checkpoint.every) or at_end:
                    self.save()
        if self.ranks.is_first:
            self.finish(
                {
                    "initial_validation_loss": self.initial_validation(first_validation),
                    "final_validation_loss": validation,
                    "final_loss": loss,
                    "median_tokens_per_second": statistics.median(rates) if rates else None,
                    "wall_seconds": time.monotonic() - began,
                    "bytes_reduced_per_step": statistics.median(bytes_reduced)
                    if bytes_reduced
                    else None,
                }
            )

    def step(self) -> StepResult:
        """One optimizer step over the global batch."""
        config, model = self.config, self.parallel.model
        micro, ranks = config.trainer.micro_batch_size, self.ranks
        rounds = config.trainer.global_batch_size // (micro * ranks.world_size)
        model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for index in range(rounds):
            self.parallel.synchronize_gradients(index == rounds - 1)
            offset = (index * ranks.world_size + ranks.rank) * micro
            batch = self.samples.batch(self.state.consumed_samples + offset, micro)
            loss = self.loss(batch) / rounds
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.SUM)
        grad_norm = self.clip()
        skipped = not math.isfinite(grad_norm)
        self.state.step += 1
        self.state.consumed_samples += config.trainer.global_batch_size
        self.state.tokens += self.tokens_a_step
        self.state.skipped_steps += skipped
        self.update(skipped)
        return StepResult(total.item() / ranks.world_size, grad_norm, skipped)

    def update(self, skipped: bool) -> None:
        """Step the masters and roll the amax histories, or leave both for a skipped step."""
        delayed = self.parallel.conversion.delayed
        if skipped:
            if delayed:
                delayed.discard()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        if delayed:
            delayed.roll(self.parallel.mesh.get_group())

    def loss(self, batch: Tensor, reduction: str = "mean") -> Tensor:
        """Next-token cross entropy in FP32 of samples [B, T+1]: the mean, or [B, T] for none."""
        batch = batch.to(self.device)
        logits = self.parallel.model(batch[:, :-1]).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction
        )
        return losses if reduction == "mean" else losses.view(len(batch), -1)

    def clip(self) -> float:
        """Clip the gradients to `trainer.clip_grad_norm`; return their norm before."""
        limit = self.config.trainer.clip_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parallel.model.parameters(), limit)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return float(full)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the held-out samples. All ranks do the same number of forwards."""
        self.parallel.model.eval()
        micro, world = self.config.trainer.micro_batch_size, self.ranks.world_size
        count = len(self.held_out)
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, count, micro * world):
            rows = first + self.ranks.rank * micro + torch.arange(micro)
            losses = self.loss(self.held_out[rows.clamp(max=count - 1)], "none").cpu()
            counted = losses[rows < count].double()
            sums += torch.tensor([counted.sum(), counted.numel()], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    # --- what is said and kept -------------------------------------------------------------------

    @property
    def tokens_a_step(self) -> int:
        return self.config.trainer.global_batch_size * self.config.trainer.sequence_length

    def learning_rate(self) -> float:
        config = self.config
        return learning_rate(
            self.state.step, config.trainer.steps, config.optimizer.lr, config.schedule
        )

    def due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def metrics(self, result: StepResult, seconds: float, bytes_reduced: int) -> dict[str, Any]:
        rate = self.tokens_a_step / seconds
        return {
            "step": self.state.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": self.learning_rate(),
            "tokens": self.state.tokens,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "peak_memory_bytes": peak_memory(self.device),
            "model_tflops_per_device": rate * self.flops_per_token / self.ranks.world_size / 1e12,
            "bytes_reduced": bytes_reduced,
            "skipped_steps": self.state.skipped_steps,
        }

    def record(self, line: dict[str, Any]) -> None:
        """One line to metrics.jsonl and W&B, from rank 0."""
        if self.ranks.is_first:
            self.folder.append_metrics(line)
            if self.wandb:
                self.wandb.log(line)

    def save(self) -> None:
        checkpoint.save(
            self.folder.checkpoints,
            self.parallel,
            self.optimizer,
            self.state,
            self.config,
            self.fingerprint,
        )

    def start_wandb(self) -> None:
        if self.config.logging.wandb.mode == "disabled":
            return
        from fp8train.training.wandb_log import WandbLog  # rank 0 alone pays for the import

        self.wandb = WandbLog(
            self.config, self.folder.path, self.ranks.world_size, self.state.wandb_id
        )
        self.state.wandb_id = self.wandb.id

    def banner(self, line: progress.ProgressLine) -> None:
        config = self.config
        parameters = sum(p.numel() for p in self.parallel.model.parameters())
        note = " (right numerics, no speed-up)" if self.backend == "emulated" else ""
        reduction = gradient_reduction(config)
        if self.ranks.world_size == 1:
            reduction += " (one process: nothing to send)"
        rows = {
            "run": f"{config.run.name} in {self.folder.path}",
            "model": f"{config.model.name}, {parameters:,} parameters",
            "layout": f"{self.ranks.world_size} x shard on {self.device.type}",
            "recipe": f"{config.precision.recipe}, backend {self.backend}{note}",
            "FP8": f"{self.fp8_fraction:.1%} of the blocks' GEMM FLOPs",
            "gradients": f"summed in FP32, sent as {reduction}",
            "batch": f"{config.trainer.global_batch_size} samples of "
            f"{config.trainer.sequence_length} = {self.tokens_a_step:,} tokens a step",
            "data": f"{config.data.path or config.data.name}, fingerprint {self.fingerprint}",
        }
        if self.state.step:
            rows["resumed"] = f"from step {self.state.step}"
        progress.print_banner(line.console, rows, self.parallel.conversion.table)

    def initial_validation(self, measured: float) -> float | None:
        """The loss at step 0, from metrics.jsonl where this process did not measure it."""
        return self.folder.first_validation_loss() if math.isnan(measured) else measured

    def finish(self, results: dict[str, Any]) -> None:
        summary = {
            "name": self.config.run.name,
            "status": "finished",
            "steps": self.state.step,
            "tokens": self.state.tokens,
            "skipped_steps": self.state.skipped_steps,
            "precision": self.config.precision.recipe,
            "backend": self.backend,
            "gradient_reduction": gradient_reduction(self.config),
            "fp8_flop_fraction": self.fp8_fraction,
            "parameters": sum(p.numel() for p in self.parallel.model.parameters()),
            "world_size": self.ranks.world_size,
            "data_fingerprint": self.fingerprint,
            **results,
        }
        if self.wandb:
            self.wandb.finish(summary)
        self.folder.finish(summary)


def peak_memory(device: torch.device) -> int:
    """Most memory this rank has held, in bytes: the allocator's on a GPU, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
