"""What a run says and keeps: banner, progress, metrics.jsonl, W&B, summary. Rank 0 speaks."""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fp8train.config import Config, PrecisionConfig, flattened, written
from fp8train.layout import Layout
from fp8train.parallel.runtime import Ranks
from fp8train.planning.flops import fp8_fraction, model_flops, parameter_count
from fp8train.precision.convert import Conversion
from fp8train.rules import sent_as
from fp8train.training.learner import Learner, StepResult
from fp8train.training.progress import ProgressLine, print_banner
from fp8train.training.run_folder import RunFolder

if TYPE_CHECKING:
    from fp8train.training.wandb_log import WandbLog


class Reporter:
    """Follows a learner and writes its run folder; all ranks call it, and rank 0 writes."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        folder: RunFolder,
        learner: Learner,
        conversion: Conversion,
        backend: str,
        data_id: str,
    ) -> None:
        self.config, self.ranks, self.folder, self.learner = config, ranks, folder, learner
        self.backend, self.data_id = backend, data_id
        length = config.trainer.sequence_length
        self.flops_per_token = model_flops(config.model, length)
        self.table = conversion.table
        share = {
            name: layer.recipe.formats.quantized_share for name, layer in conversion.layers.items()
        }
        self.fp8_fraction = fp8_fraction(config.model, length, share)
        self.parameters = parameter_count(config.model)
        self.layout = learner.mesh.layout.described(config.parallel.pipeline_schedule)
        self.wandb: WandbLog | None = None
        self.line = ProgressLine(config.trainer.steps, learner.progress.step, ranks.is_first)
        self.began = time.monotonic()
        self.rates: list[float] = []  # tokens a second, of the steps of this process
        self.bytes_reduced: list[int] = []

    @contextlib.contextmanager
    def open(self, resuming: bool) -> Iterator[None]:
        """Start the run's files, say what is run, and show progress until the end."""
        if self.ranks.is_first:
            self.folder.open(resuming)
            self.folder.cut_metrics(self.learner.progress.step)
            if self.config.logging.wandb.mode != "disabled":
                from fp8train.training.wandb_log import WandbLog  # only rank 0 pays the import

                progress = self.learner.progress
                self.wandb = WandbLog(
                    self.config, self.folder.path, self.ranks.world_size, progress.wandb_id
                )
                progress.wandb_id = self.wandb.id
        print_banner(self.line.console, self._facts(), self.table)
        with self.line:
            yield

    def stepped(self, result: StepResult, seconds: float) -> None:
        """One optimizer step is done; it took so long."""
        progress = self.learner.progress
        rate = self.learner.tokens_a_step / seconds
        self.rates.append(rate)
        self.bytes_reduced.append(result.bytes_reduced)
        if result.skipped:
            now = f"; loss scale now {progress.loss_scale}" if progress.loss_scale else ""
            self.line.say(f"step {progress.step}: skipped, its gradients are not finite{now}")
        self.line.update(progress.step, result.loss, rate, seconds)
        if result.telemetry is not None:
            self._record({"step": progress.step, "telemetry": result.telemetry})
        if progress.step % self.config.logging.every:
            return
        scaled = self.learner.loss_scaler.mode != "none"
        memory = torch.tensor(peak_memory(self.learner.device), device=self.learner.device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)  # pipeline stages differ in it
        self._record(
            {
                "step": progress.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "tokens": progress.tokens,
                "tokens_per_second": rate,
                "step_seconds": seconds,
                "peak_memory_bytes": int(memory),
                "model_tflops_per_device": rate
                * self.flops_per_token
                / self.ranks.world_size
                / 1e12,
                "bytes_reduced": result.bytes_reduced,
                "skipped_steps": progress.skipped_steps,
                **({"loss_scale": result.loss_scale} if scaled else {}),
                **({"gradient_audit": audit} if (audit := result.gradient_audit) else {}),
            }
        )

    def validated(self, loss: float) -> None:
        """The held-out loss after the current step."""
        progress = self.learner.progress
        self._record({"step": progress.step, "tokens": progress.tokens, "validation_loss": loss})
        self.line.say(f"step {progress.step}  validation loss {loss:.4f}")
        if not math.isfinite(loss):
            self.line.say("the run has diverged: lower optimizer.lr, or look at the data")

    def not_saved(self, failures: list[str]) -> None:
        """Checkpoints could not be written; training goes on."""
        for failure in failures:
            self.line.say(f"error: {failure}")
            if self.wandb:
                self.wandb.alert("Checkpoint not saved", failure)

    def finish(self) -> None:
        """Write the summary, which says that the run is complete."""
        if not self.ranks.is_first:
            return
        progress = self.learner.progress
        losses, validation = self.folder.logged("loss"), self.folder.logged("validation_loss")
        summary = {
            "name": self.config.run.name,
            "status": "finished",
            "steps": progress.step,
            "initial_validation_loss": validation.get(0),
            "final_validation_loss": validation.get(progress.step),
            "final_loss": losses[max(losses)] if losses else None,
            "tokens": progress.tokens,
            "skipped_steps": progress.skipped_steps,
            "median_tokens_per_second": statistics.median(self.rates) if self.rates else None,
            "wall_seconds": time.monotonic() - self.began,
            "precision": self.config.precision.recipe,
            "backend": self.backend,
            "gradient_reduction": sent_as(self.config, self.learner.mesh.layout),
            "bytes_reduced_per_step": statistics.median(self.bytes_reduced or [0]),
            "fp8_flop_fraction": self.fp8_fraction,
            "parameters": self.parameters,
            "world_size": self.ranks.world_size,
            "layout": self.layout,
            "data_fingerprint": self.data_id,
        }
        if self.wandb:
            self.wandb.finish(summary)
        self._draw_telemetry()
        self.folder.finish(summary)

    def _draw_telemetry(self) -> None:
        """telemetry.png, where there is something to show."""
        if self.learner.telemetry.on:
            from fp8train.analysis import heatmap  # matplotlib takes its time

            if samples := heatmap.read_samples(self.folder.path):
                heatmap.plot_samples(samples, self.folder.path / heatmap.PICTURE)

    def _record(self, line: dict[str, Any]) -> None:
        if self.ranks.is_first:
            self.folder.append_metrics(line)
            if self.wandb:
                self.wandb.log(line)

    def _facts(self) -> dict[str, str]:
        """The banner's lines, by name."""
        config, trainer = self.config, self.config.trainer
        note = " (right numerics, no speed-up)" if self.backend == "emulated" else ""
        facts = {
            "run": f"{config.run.name} in {self.folder.path}",
            "model": f"{config.model.name}, {self.parameters:,} parameters",
            "layout": f"{self.layout}, on {self.learner.device.type}",
            "recipe": f"{config.precision.recipe}, backend {self.backend}{note}",
            "quantised": f"{self.fp8_fraction:.1%} of the blocks' GEMM FLOPs have two operands of "
            "eight bits or fewer",
            "gradients": gradients_in_words(config, self.learner.mesh.layout),
            "weights": weights_in_words(config, self.learner.mesh.layout),
            "batch": f"{trainer.global_batch_size} samples of {trainer.sequence_length} tokens, "
            f"{self.learner.tokens_a_step:,} tokens a step",
            "data": f"{config.data.path or config.data.name}, fingerprint {self.data_id}",
        }
        if options := options_set(config.precision):
            facts["options"] = options
        scaler = self.learner.loss_scaler
        if scaler.mode != "none":
            facts["loss scale"] = f"{scaler.mode}, {scaler.scale}"
        if every := config.precision.telemetry.every:
            if self.learner.telemetry.on:
                facts["telemetry"] = f"step 1 and every {every} steps"
            elif self.backend == "transformer_engine":
                facts["telemetry"] = "none: Transformer Engine shows no values before its cast"
        if self.wandb:
            facts["W&B"] = self.wandb.place
        if self.learner.progress.step:
            facts["resumed"] = f"from step {self.learner.progress.step}"
        return facts


def gradients_in_words(config: Config, layout: Layout) -> str:
    """How gradients travel and are summed."""
    gradients, sent = config.gradients, sent_as(config, layout)
    if sent == "none":
        return "not sent: no two ranks hold the same parameters"
    summed = f"in {sent.upper()}, in a ring" if gradients.algorithm == "ring" else "in FP32"
    words = [f"sent as {sent}, summed {summed}"]
    if gradients.scaling == "none" or (gradients.scaling == "tensor" and summed == "in FP32"):
        words.append(f"scaling {gradients.scaling}")
    if gradients.rounding == "stochastic":
        words.append("rounded stochastically")
    if gradients.error_feedback:
        words.append("with error feedback")
    if gradients.accumulate == "sharded":
        words.append("after each micro batch")
    return ", ".join(words)


def weights_in_words(config: Config, layout: Layout) -> str:
    """How weights reach the ranks that compute with them."""
    if layout.shard * layout.context == 1:
        return "not sent: no two ranks share them"
    kept = layout.pipeline > 1 or not config.parameters.reshard_after_forward
    when = "gathered once a step" if kept else "gathered for each pass"
    computed = "fp32" if config.precision.recipe == "fp32" else "bf16"
    if config.parameters.gather == "fp8":
        return f"{when} as bytes in the FP8 linears, {computed} elsewhere"
    return f"{when} as {computed}"


def options_set(precision: PrecisionConfig) -> str:
    """The options of a precision that differ from the defaults, as they are written."""
    default = flattened(asdict(PrecisionConfig(precision.recipe)))
    apart = ("backend", "telemetry.every")  # have lines of their own
    return " ".join(
        f"{key}={written(value)}"
        for key, value in flattened(asdict(precision)).items()
        if value != default[key] and key not in apart
    )


def peak_memory(device: torch.device) -> int:
    """Most memory this rank has held, in bytes: the allocator's on a GPU, else the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
