"""What a precision recipe means: the formats of each operand, and how their scales are formed.

fprop  y  = x · wᵀ      input × weight
dgrad  dx = g · w       grad_output × weight
wgrad  dw = gᵀ · x      grad_output × input

Each of the three tensors takes part in two GEMMs: once with its columns as the reduction (the
row-wise copy: fprop for input and weight, dgrad for grad_output), once with its rows (the
column-wise copy).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8train.config import ROLES, PrecisionConfig
from fp8train.precision.formats import BY_NAME, E2M1, E4M3, E5M2, Format
from fp8train.precision.scaling import ScaleRule
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity

# GEMM → the role and the copy of its two operands.
OPERANDS = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}


class Copies(NamedTuple):
    """Formats of a role's two copies; None stays in BF16."""

    rowwise: Format | None
    columnwise: Format | None

    def __str__(self) -> str:
        names = [fmt.name if fmt else "BF16" for fmt in self]
        return "|".join(dict.fromkeys(names))


@dataclass(frozen=True)
class Formats:
    """The formats of each role."""

    input: Copies
    weight: Copies
    grad_output: Copies

    @classmethod
    def of_roles(
        cls, input: Format | None, weight: Format | None, grad_output: Format | None
    ) -> Formats:
        return cls(*(Copies(fmt, fmt) for fmt in (input, weight, grad_output)))

    def __str__(self) -> str:
        return "/".join(str(self.of(role)) for role in ROLES)

    @property
    def quantized_share(self) -> float:
        """Share of the three GEMMs that have two quantised operands."""
        counts = [
            all(getattr(self.of(role), copy) is not None for role, copy in operands)
            for operands in OPERANDS.values()
        ]
        return sum(counts) / len(counts)

    def of(self, role: str) -> Copies:
        copies: Copies = getattr(self, role)
        return copies


HYBRID = Formats.of_roles(E4M3, E4M3, E5M2)
ALL_E4M3 = Formats.of_roles(E4M3, E4M3, E4M3)
WEIGHTS_E2M1 = Formats.of_roles(None, E2M1, None)
ALL_E2M1 = Formats.of_roles(E2M1, E2M1, E2M1)
NAMED = {"hybrid": HYBRID, "e4m3": ALL_E4M3}


@dataclass(frozen=True)
class Recipe:
    """What all recipes have.

    Attributes:
        formats: of each role and copy.
        margin: an amax is brought to max·2^-margin.
        power_of_two: scales are rounded to powers of two.
        stochastic: the roles that are rounded stochastically instead of to nearest even.
        smooth: the input is levelled channel by channel (Smooth-SwiGLU), and fprop's weight
            against it, so that the weight of dgrad is another matrix.
    """

    formats: Formats
    margin: int = 0
    power_of_two: bool = False
    stochastic: frozenset[str] = frozenset()
    smooth: bool = False

    @property
    def rule(self) -> ScaleRule:
        return ScaleRule("power_of_two" if self.power_of_two else "fp32", self.margin)

    def granularity(self, role: str) -> tuple[Granularity, Granularity]:
        """The shapes that share a scale in the role's row-wise and column-wise copies."""
        return TENSOR, TENSOR

    def shares_copies(self, role: str) -> bool:
        """Whether one copy serves both GEMMs of the role."""
        if self.smooth and role == "weight":
            return False
        rowwise, columnwise = self.granularity(role)
        square = rowwise == columnwise and rowwise.rows == rowwise.columns
        return square and self.formats.of(role).rowwise == self.formats.of(role).columnwise

    @property
    def weight_travels_as_bytes(self) -> bool:
        """Whether the ranks that own a weight's rows can cast them for all: one eight-bit copy
        serves both GEMMs, rounded to nearest. Two would cost BF16's bytes."""
        fmt = self.formats.weight.rowwise
        eight = fmt is not None and fmt.bits == 8
        return eight and self.shares_copies("weight") and "weight" not in self.stochastic


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """One scale a tensor, from the tensor's own amax."""

    formats: Formats = HYBRID


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the amaxes of earlier steps (Micikevicius et al. 2022; TE)."""

    formats: Formats = HYBRID
    history_length: int = 1024
    amax_compute: str = "max"


@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """One scale a row of the left operand and a column of the right one (torchao).

    Attributes:
        bf16_wgrad: the variant with the weight gradient in BF16, whose dgrad weight has one scale
            in all, as there.
    """

    formats: Formats = ALL_E4M3
    power_of_two: bool = True
    bf16_wgrad: bool = False

    def granularity(self, role: str) -> tuple[Granularity, Granularity]:
        return ROW, TENSOR if role == "weight" and self.bf16_wgrad else COLUMN


@dataclass(frozen=True)
class BlockScaling(Recipe):
    """1×128 blocks of inputs and gradients along each GEMM's reduction, 128×128 of weights
    (DeepSeek-V3, section 3.3)."""

    formats: Formats = ALL_E4M3
    power_of_two: bool = True
    size: int = 128

    def granularity(self, role: str) -> tuple[Granularity, Granularity]:
        if role == "weight":
            return Granularity(self.size, self.size), Granularity(self.size, self.size)
        return Granularity(1, self.size), Granularity(self.size, 1)


@dataclass(frozen=True)
class MXScaling(Recipe):
    """Blocks of 32 along each GEMM's reduction with E8M0 scales (OCP Microscaling 1.0, the scale
    rounded up as on Blackwell)."""

    formats: Formats = ALL_E4M3
    power_of_two: bool = True
    size: int = 32

    @property
    def rule(self) -> ScaleRule:
        return ScaleRule("e8m0", self.margin)

    def granularity(self, role: str) -> tuple[Granularity, Granularity]:
        return Granularity(1, self.size), Granularity(self.size, 1)


@dataclass(frozen=True)
class MXFP4Weights(MXScaling):
    """Weights alone in MXFP4, for export: the run trains the weights that will be served, and the
    gradient passes straight through to the masters. One copy, the exported one, serves both GEMMs.
    """

    formats: Formats = WEIGHTS_E2M1

    def shares_copies(self, role: str) -> bool:
        rowwise, columnwise = self.formats.of(role)
        return role == "weight" and rowwise == columnwise and not self.smooth


@dataclass(frozen=True)
class NVFP4Scaling(Recipe):
    """E2M1 with an E4M3 scale a block and an FP32 scale a tensor; 1×16 blocks, 16×16 of weights;
    gradients rounded stochastically; wgrad's operands go through a random Hadamard transform
    (NVIDIA, arXiv 2509.25149; TE `NVFP4BlockScaling`)."""

    formats: Formats = ALL_E2M1
    stochastic: frozenset[str] = frozenset({"grad_output"})
    hadamard: bool = True
    size: int = 16

    @property
    def transforms_wgrad(self) -> bool:
        """Whether wgrad's operands go through the transform; both or neither must."""
        operands = (self.formats.input.columnwise, self.formats.grad_output.columnwise)
        return self.hadamard and None not in operands

    def granularity(self, role: str) -> tuple[Granularity, Granularity]:
        if role == "weight":
            return Granularity(self.size, self.size), Granularity(self.size, self.size)
        return Granularity(1, self.size), Granularity(self.size, 1)


def _bf16_wgrad(formats: Formats) -> Formats:
    return replace(
        formats,
        input=Copies(formats.input.rowwise, None),
        grad_output=Copies(formats.grad_output.rowwise, None),
    )


DEFAULTS: dict[str, Recipe] = {
    "fp8_delayed": DelayedScaling(),
    "fp8_current": CurrentScaling(),
    "fp8_rowwise": RowwiseScaling(),
    "fp8_rowwise_bf16_wgrad": RowwiseScaling(_bf16_wgrad(ALL_E4M3), bf16_wgrad=True),
    "fp8_block": BlockScaling(),
    "mxfp8": MXScaling(),
    "nvfp4": NVFP4Scaling(),
    "mxfp4": MXFP4Weights(),
}


def recipe_of(precision: PrecisionConfig, name: str | None = None) -> Recipe | None:
    """A recipe with the configuration's options; None for bf16 and fp32.

    Args:
        name: of the recipe; the configuration's own if None.
    """
    name = name or precision.recipe
    if name not in DEFAULTS:
        return None
    recipe = DEFAULTS[name]
    formats = recipe.formats
    if precision.format is not None:
        formats = NAMED[precision.format]
        if name == "fp8_rowwise_bf16_wgrad":
            formats = _bf16_wgrad(formats)
    recipe = replace(recipe, formats=_with_overrides(formats, precision), margin=precision.margin)
    if precision.power_of_two_scales is not None:
        recipe = replace(recipe, power_of_two=precision.power_of_two_scales)
    if precision.stochastic_rounding is not None:
        recipe = replace(recipe, stochastic=frozenset(precision.stochastic_rounding))
    if isinstance(recipe, DelayedScaling):
        recipe = replace(
            recipe,
            history_length=precision.amax_history_length,
            amax_compute=precision.amax_compute,
        )
    if isinstance(recipe, NVFP4Scaling):
        recipe = replace(recipe, hadamard=precision.hadamard)
    return recipe


def _with_overrides(formats: Formats, precision: PrecisionConfig) -> Formats:
    """The formats after `precision.formats`: a role's first, then a GEMM's.

    A role's leaves a copy that the recipe keeps in BF16 there; its GEMM's name reaches it.
    """
    asked = precision.formats
    found = {
        (role, copy): getattr(formats.of(role), copy)
        for operands in OPERANDS.values()
        for role, copy in operands
    }
    for role, copy in found:
        if (name := getattr(asked, role)) is not None and found[role, copy] is not None:
            found[role, copy] = BY_NAME.get(name)  # bf16 is no format to cast to
    for gemm, operands in OPERANDS.items():
        for role, copy in operands:
            if (name := getattr(getattr(asked, gemm), role)) is not None:
                found[role, copy] = BY_NAME.get(name)
    return Formats(*(Copies(found[role, "rowwise"], found[role, "columnwise"]) for role in ROLES))
