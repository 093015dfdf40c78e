"""scripts/doctor.py, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8train.config import RECIPES
from fp8train.precision.backends.support import BACKENDS

REPO = Path(__file__).resolve().parents[2]


def doctor(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts/doctor.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def record(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "doctor.json"
    done = doctor(*arguments, "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU runs")
def test_this_machine(tmp_path: Path) -> None:
    told, shown = record(tmp_path)
    assert list(told) == ["name", "hardware", "versions", "config", "rows"]
    assert told["versions"]["torch"] == torch.__version__
    assert told["versions"]["cpu_kernels"].startswith(("built", "not built"))
    assert {"transformer_engine", "apex", "compiler", "cuda"} < set(told["versions"])
    assert told["hardware"]["cores"] > 0
    pairs = [(row["recipe"], row["backend"]) for row in told["rows"]]
    assert pairs == [(recipe, backend) for recipe in RECIPES for backend in BACKENDS]
    for row in told["rows"]:
        assert row["runs"] == (row["why_not"] is None)
        if row["backend"] == "emulated":
            assert row["runs"]
        if row["backend"] == "transformer_engine":
            assert not row["runs"]
    assert "What runs on this CPU" in shown
    assert "precision.backend=auto takes emulated" in shown


@pytest.mark.slow
def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    told, shown = record(tmp_path, "--capability", "9.0")
    assert told["config"]["capability"] == "9.0"
    runs = {(row["recipe"], row["backend"]) for row in told["rows"] if row["runs"]}
    assert ("fp8_block", "torch") in runs
    assert ("mxfp8", "torch") not in runs
    reasons = {(row["recipe"], row["backend"]): row["why_not"] for row in told["rows"]}
    assert reasons["mxfp8", "transformer_engine"].endswith("this GPU is 9.0")
    assert "a GPU of compute capability 9.0" in shown


@pytest.mark.slow
def test_no_capability() -> None:
    done = doctor("--capability", "hopper")
    assert done.returncode == 2
    assert "hopper: give a compute capability, as 9.0" in done.stderr.splitlines()[-1]
