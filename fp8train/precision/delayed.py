"""Delayed scaling's memory: an amax history and a scale for each quantised tensor of the model.

Slot 0 of a history collects the maximum over the micro batches of one optimizer step; the roll
comes once a step, for all tensors and ranks together, after the last backward. So neither
gradient accumulation nor recomputation changes a scale. Source of the update: TE
`common/recipe/delayed_scaling.cu`; when it happens is ours (TE rolls per micro batch).
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.precision.recipes import ROLES, DelayedScaling
from fp8train.precision.scaling import delayed_scale


class DelayedState:
    """Histories [R, L] and scales [R] in FP32: a row for each role of each layer, and a second
    one, NAME.columnwise, where the role's two copies have different formats.

    Args:
        layers: recipes of the quantised layers by full name; they differ in formats only.
        device: where amaxes and scales live.
    """

    def __init__(self, layers: dict[str, DelayedScaling], device: torch.device) -> None:
        largest: dict[str, float] = {}
        self.places: dict[tuple[str, str], tuple[int, int]] = {}
        for (layer, recipe), role in product(layers.items(), ROLES):
            rows = []
            name = f"{layer}.{role}"
            for copy, fmt in enumerate(recipe.formats.of(role)):
                if copy == 1 and not recipe.shares_copies(role):
                    name += ".columnwise"
                if fmt is None:
                    rows.append(-1)
                    continue
                largest.setdefault(name, fmt.max)
                rows.append(list(largest).index(name))
            self.places[layer, role] = rows[0], rows[1]
        self.names = list(largest)
        self.recipe = next(iter(layers.values()))
        self.max = torch.tensor(list(largest.values()), device=device)
        self.history = torch.zeros(len(self.names), self.recipe.history_length, device=device)
        self.scale = torch.ones(len(self.names), device=device)

    def rows(self, layer: str, role: str) -> tuple[int, int]:
        """Rows of a role's row-wise and column-wise copies; −1 for one that is not quantised."""
        return self.places[layer, role]

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
