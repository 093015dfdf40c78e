"""Loss scaling: keep small gradients above the bottom of a narrow range.

The loss of each micro batch is multiplied by the scale before its backward, and the FP32 shards
are divided by it after the reduction, before their norm is taken. A dynamic scale follows
torch.amp.GradScaler: a gradient that is not finite skips the step and backs the scale off, a run
of good steps lets it grow; its floor is Megatron's (`megatron/core/optimizer/grad_scaler.py`).
With powers of two for scale and factors, scaling moves exponents only: no bit of a mantissa
changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8train.config import Config
from fp8train.rules import LARGEST_LOSS_SCALE, loss_scaling
from fp8train.training.checkpoint.manifest import Progress


class LossScaler:
    """The loss scale of one run. What a resume needs of it lives in the run's `Progress`.

    Attributes:
        mode: none | static | dynamic.
    """

    def __init__(self, config: Config, progress: Progress) -> None:
        self.mode = loss_scaling(config)
        self.settings, self.progress = config.trainer.loss_scale, progress
        if self.mode == "dynamic":
            progress.loss_scale = progress.loss_scale or self.settings.value
        else:  # a later resume under `dynamic` starts from the configured value
            progress.loss_scale, progress.growth_tracker = None, 0

    @property
    def scale(self) -> float:
        """What the loss of the next step is multiplied by; 1 where scaling is off."""
        if self.mode == "none":
            return 1.0
        return self.progress.loss_scale or self.settings.value

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, in place. Inf and NaN stay what they are."""
        if self.mode != "none":
            divide(parameters, self.scale)

    def update(self, skipped: bool) -> None:
        """The scale of the next step, after one that was skipped or not (dynamic scaling only).

        All ranks must give the same answer, as they do when it comes from the global norm. The
        rule is that of `torch._amp_update_scale_`, which does not grow beyond FP32 either.
        """
        if self.mode != "dynamic":
            return
        settings, progress = self.settings, self.progress
        if skipped:
            progress.growth_tracker = 0
            progress.loss_scale = max(self.scale * settings.backoff_factor, settings.minimum)
            return
        progress.growth_tracker += 1
        if progress.growth_tracker >= settings.growth_interval:  # `>`: it was lowered on a resume
            progress.growth_tracker = 0
            grown = self.scale * settings.growth_factor
            progress.loss_scale = grown if grown <= LARGEST_LOSS_SCALE else self.scale


@torch.no_grad()
def divide(parameters: Iterable[Tensor], divisor: float) -> None:
    """Divide the parameters' gradients, in place."""
    for parameter in parameters:
        if divisor != 1 and (grad := parameter.grad) is not None:
            (grad.to_local() if isinstance(grad, DTensor) else grad).div_(divisor)
