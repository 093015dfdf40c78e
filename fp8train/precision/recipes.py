"""What a precision recipe means: formats of the three roles, and how scales are formed.

fprop  y  = x · wᵀ      input × weight
dgrad  dx = g · w       grad_output × weight
wgrad  dw = gᵀ · x      grad_output × input
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8train.config import PrecisionConfig
from fp8train.precision.formats import E4M3, E5M2, Format

ROLES = ("input", "weight", "grad_output")


@dataclass(frozen=True)
class Formats:
    """The format of each role."""

    input: Format = E4M3
    weight: Format = E4M3
    grad_output: Format = E4M3

    def __str__(self) -> str:
        return "/".join(self.of(role).name for role in ROLES)

    def of(self, role: str) -> Format:
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}[role]


FORMATS = {"hybrid": Formats(grad_output=E5M2), "e4m3": Formats()}


@dataclass(frozen=True)
class CurrentScaling:
    """One scale a tensor, from the tensor's own amax."""

    formats: Formats
    margin: int = 0
    power_of_two: bool = False


@dataclass(frozen=True)
class DelayedScaling:
    """One scale a tensor, from the amaxes of earlier steps (Micikevicius et al. 2022; TE)."""

    formats: Formats
    margin: int = 0
    power_of_two: bool = False
    history_length: int = 1024
    amax_compute: str = "max"


@dataclass(frozen=True)
class BlockScaling:
    """1×128 blocks of inputs and gradients along each GEMM's reduction, 128×128 of weights,
    power-of-two scales (DeepSeek-V3, section 3.3)."""

    formats: Formats
    margin: int = 0
    size: int = 128


Recipe = CurrentScaling | DelayedScaling | BlockScaling


def recipe_of(precision: PrecisionConfig) -> Recipe | None:
    """The recipe that the configuration names; None for a precision without FP8."""
    formats = FORMATS[precision.format]
    margin, power_of_two = precision.margin, precision.power_of_two_scales
    match precision.recipe:
        case "fp8_current":
            return CurrentScaling(formats, margin, power_of_two)
        case "fp8_delayed":
            return DelayedScaling(
                formats,
                margin,
                power_of_two,
                precision.amax_history_length,
                precision.amax_compute,
            )
        case "fp8_block":
            return BlockScaling(formats, margin)
    return None
