"""Losses and gradient norms of two short runs, held to what they were when they were written down.

A change that moves them on purpose writes them anew and says so in CHANGELOG.md:

    python -m tests.parallel.test_golden --write
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8train.config import Config
from fp8train.precision.scaling import ScaleRule, Scales
from tests.parallel.test_layouts import losses, small
from tests.ranks import on_ranks

FILE = Path(__file__).with_name("golden.json")
WRITE = "python -m tests.parallel.test_golden --write"
STEPS = 5
RUNS: dict[str, tuple[int, Config]] = {
    "fp32, one process": (1, small()),
    "fp8_current, TP2 x PP2": (4, small("fp8_current", tensor=2, pipeline=2)),
}
# Of losses and gradient norms, relative. Seen to move the norms, and losses by less than a quarter:
# in FP32, torch without vector instructions and oneDNN with AVX2 alone, 1e-7; in FP8, where such
# differences change what some values round to, BF16 GEMMs and attention instead of FP32's rounded,
# as on a CPU with avx512_bf16, 1.0e-3, and initial weights that are off by 2e-7, 0.8e-3. Scales
# that are off by 1% move the norms by 8e-3 and more from the first step on.
TOLERANCES = {"fp32, one process": (1e-5, 1e-5), "fp8_current, TP2 x PP2": (1e-3, 4e-3)}


def trained(name: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; at last the validation loss, with 0."""
    ranks, config = RUNS[name]
    found: list[tuple[float, float]] = on_ranks(ranks, losses, config, ranks, STEPS)[0]
    return found


def write() -> None:
    """Put what is trained here and now in the place of what was."""
    versions = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    runs = {name: trained(name) for name in RUNS}
    FILE.write_text(json.dumps({"versions": versions, "runs": runs}, indent=1) + "\n")


def differs(name: str, found: list[tuple[float, float]]) -> str:
    """What to say if a run isn't what it was; empty if it is."""
    golden = json.loads(FILE.read_text())
    expected = golden["runs"][name]
    limits = np.abs(expected) * TOLERANCES[name]
    if (
        np.shape(found) == np.shape(expected)
        and (np.abs(np.subtract(found, expected)) <= limits).all()
    ):
        return ""
    pairs = "\n".join(f"{new} was {old}" for new, old in zip(found, expected, strict=False))
    return (
        f"{name} trains differently from when {FILE.name} was written, with "
        f"{golden['versions']} (loss, gradient norm):\n{pairs}\n"
        f"If the change means to, run `{WRITE}` and say in CHANGELOG.md that losses move and why."
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_what_they_were(name: str) -> None:
    difference = differs(name, trained(name))
    assert not difference, difference


def with_wrong_scales(config: Config, ranks: int) -> list[tuple[float, float]]:
    """A run whose values are multiplied back by 1.01 of what they should be."""
    right = ScaleRule.scales

    def wrong(self: ScaleRule, *args: Any, **options: Any) -> Scales:
        scale, scale_inv = right(self, *args, **options)
        return Scales(scale, scale_inv * 1.01)

    ScaleRule.scales = wrong  # type: ignore[method-assign]
    try:
        return losses(config, ranks, STEPS)
    finally:
        ScaleRule.scales = right  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_scale_that_is_off_by_one_percent_is_seen() -> None:
    name = "fp8_current, TP2 x PP2"
    ranks, config = RUNS[name]
    found = on_ranks(ranks, with_wrong_scales, config, ranks)[0]
    assert "say in CHANGELOG.md" in differs(name, found)
    ranks, config = RUNS["fp32, one process"]
    alone = differs("fp32, one process", on_ranks(ranks, with_wrong_scales, config, ranks)[0])
    assert not alone, "FP32 has no scales"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {WRITE}")
    write()
