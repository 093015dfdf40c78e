"""What a backend is: something that puts its layers in the place of a model's linears."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8train.precision.linear import Numerics, WeightCache
from fp8train.precision.plan import LayerPlan
from fp8train.precision.quantizers import Position
from fp8train.precision.split import WHOLE, Split, Splits


@dataclass(frozen=True)
class Job:
    """A model to be put under a precision.

    Attributes:
        model: on any device, also meta.
        plans: of the linears to replace, by full name; at least one.
        device: where the model will run.
        seed: of stochastic rounding.
        position, cache: shared by the model's layers.
        splits: how ranks share the linears' matrices.
    """

    model: nn.Module
    plans: dict[str, LayerPlan]
    device: torch.device
    seed: int = 0
    position: Position = field(default_factory=Position)
    cache: WeightCache = field(default_factory=WeightCache)
    splits: Splits = field(default_factory=dict)

    def linear(self, name: str) -> nn.Linear:
        found = self.model.get_submodule(name)
        assert isinstance(found, nn.Linear)
        return found

    def split(self, name: str, role: str) -> Split:
        return self.splits.get(name, {}).get(role, WHOLE)


class History(Protocol):
    """Amax histories of delayed scaling."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a resume needs, as tensors that a load writes into."""
        ...

    def roll(self, group: dist.ProcessGroup | None = None) -> None:
        """End an optimizer step, over the ranks of a group."""
        ...

    def discard(self) -> None:
        """Forget the amaxes of a skipped step."""
        ...


@dataclass
class Installed:
    """State that the installed layers share.

    Attributes:
        numerics: of the layers that quantise by our own recipes, by full name.
        delayed: None without delayed scaling.
    """

    numerics: dict[str, Numerics] = field(default_factory=dict)
    delayed: History | None = None


class Backend(Protocol):
    """One way to compute quantised linears; `name` is a value of `precision.backend`."""

    @property
    def name(self) -> str: ...

    def install(self, job: Job) -> Installed:
        """Replace the planned linears, sharing their parameters.

        Raises:
            ConfigError: a layer that this backend can't compute.
        """
        ...


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
