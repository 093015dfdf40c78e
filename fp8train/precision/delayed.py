"""Delayed scaling's memory: an amax history and a scale for each quantised tensor of the model.

Slot 0 of a history collects the maximum over the micro batches of one optimizer step; the roll
comes once a step, for all tensors and ranks together, after the last backward. So neither
gradient accumulation nor recomputation changes a scale. Source of the update: TE
`common/recipe/delayed_scaling.cu`; when it happens is ours (TE rolls per micro batch).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.precision.recipes import ROLES, DelayedScaling
from fp8train.precision.scaling import delayed_scale


class DelayedState:
    """Histories [R, L] and scales [R] in FP32; one row for each role of each layer.

    Args:
        layers: full names of the quantised layers.
        recipe: history length, margin, formats.
        device: where amaxes and scales live.
    """

    def __init__(self, layers: list[str], recipe: DelayedScaling, device: torch.device) -> None:
        self.names = [f"{layer}.{role}" for layer in layers for role in ROLES]
        self.recipe = recipe
        self.max = torch.tensor(
            [recipe.formats.of(role).max for _ in layers for role in ROLES], device=device
        )
        self.history = torch.zeros(len(self.names), recipe.history_length, device=device)
        self.scale = torch.ones(len(self.names), device=device)

    def stage(self, row: int, amax: Tensor) -> None:
        """Enter the amax of one micro batch. NaN does not enter, by `scaling.amax`."""
        slot = self.history[row, 0]
        torch.maximum(slot, amax, out=slot)

    def discard(self) -> None:
        """Forget the staged amaxes: the step was skipped."""
        self.history[:, 0] = 0

    def roll(self, group: dist.ProcessGroup | None = None) -> None:
        """End an optimizer step: share the staged amaxes, roll the histories, form new scales.

        Args:
            group: the ranks that hold a piece of the same tensors; None for this rank alone.
        """
        staged = self.history[:, 0].clone()
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(staged, dist.ReduceOp.MAX, group=group)
        rolled = torch.cat((self.history[:, 1:], staged[:, None]), dim=1)
        # The maximum runs over the entry about to be dropped too, as in TE.
        amax = staged if self.recipe.amax_compute == "most_recent" else rolled.amax(dim=1)
        seen = staged != 0  # an amax of 0 neither rolls the history nor changes the scale
        new_scale = delayed_scale(
            amax,
            self.scale,
            self.max,
            margin=self.recipe.margin,
            power_of_two=self.recipe.power_of_two,
        )
        self.scale.copy_(torch.where(seen, new_scale, self.scale))
        self.history.copy_(torch.where(seen[:, None], rolled, self.history))
        self.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """Two tensors a row, by name: what a resume needs to go on with the same scales."""
        state = {}
        for row, name in enumerate(self.names):
            state[f"{name}.amax_history"] = self.history[row]
            state[f"{name}.scale"] = self.scale[row : row + 1]
        return state
