"""Losses and gradient norms of two short runs, held to what they were when they were written down.

A change that moves them on purpose writes them anew and says so in CHANGELOG.md:

    python tests/parallel/test_golden.py --write
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from fp8train.config import Config
from fp8train.precision.scaling import ScaleRule, Scales
from tests.parallel.test_layouts import losses, small
from tests.ranks import on_ranks

FILE = Path(__file__).with_name("golden.json")
STEPS = 5
RUNS: dict[str, tuple[int, Config]] = {
    "fp32, one process": (1, small()),
    "fp8_current, TP2 x PP2": (4, small("fp8_current", tensor=2, pipeline=2)),
}
TOLERANCES = {"fp32, one process": 1e-5, "fp8_current, TP2 x PP2": 5e-3}


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
    if np.shape(found) == np.shape(expected) and np.allclose(
        found, expected, rtol=TOLERANCES[name], atol=0
    ):
        return ""
    pairs = "\n".join(f"{new} was {old}" for new, old in zip(found, expected, strict=False))
    return (
        f"{name} trains differently from when {FILE.name} was written, with "
        f"{golden['versions']} (loss, gradient norm):\n{pairs}\n"
        f"If the change means to, run `python tests/parallel/{Path(__file__).name} --write` and "
        f"say in CHANGELOG.md that losses move and why."
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_what_they_were(name: str) -> None:
    difference = differs(name, trained(name))
    assert not difference, difference


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write")
    write()
