"""Mistakes on the command line: one line, exit code 2, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

MISTAKES = [  # overrides, what the line must say
    (["+recipe=nope"], ["+recipe=nope", "available: llama3_8b_fp8, llama_fp8"]),
    (["precision=fp9"], ["precision=fp9", "fp8_current"]),
    (["recipe=llama_fp8"], ["+recipe=NAME"]),
    (["+recip=x"], ["unknown key recip", "+recipe=NAME"]),
    (["+trainer.foo=1"], ["unknown key trainer.foo"]),
    (["trainer.stepz=5"], ["unknown key trainer.stepz", "trainer.steps"]),
    (["lr=3"], ["unknown key lr", "optimizer.lr"]),
    (["trainer.steps=many"], ["trainer.steps=many", "whole number"]),
    (["trainer=7"], ["trainer is a group of keys"]),
    (["precision.recipe=bf16"], ["read-only", "precision=bf16"]),
    (["steps"], ["cannot read steps", "key=value"]),
    (["data=local"], ["data.path", "FILE_OR_FOLDER"]),
    (["data.path=/no/such/file"], ["data.path=/no/such/file"]),
    (["precision.backend=transformer_engine"], ["transformer_engine", "CUDA GPU", "emulated"]),
    (["precision.include=[layers.*.mlpp]"], ["layers.*.mlpp", "layers.*.mlp.up_proj"]),
    (["precision.exclude=*.down_proj"], ["precision.exclude: give a list"]),
    (["precision.smooth_swiglu=perhaps"], ["precision.smooth_swiglu", "true or false"]),
    (
        ['precision.layer_recipes=[{patern: "*.down_proj", recipe: mxfp8}]'],
        ["precision.layer_recipes: give", '{pattern: "*.down_proj", recipe: fp8_block}'],
    ),
    (
        ['precision.layer_recipes=[{pattern: "*.down_proj"}]'],
        ["precision.layer_recipes[0].recipe is not set: give", "recipe: fp8_block"],
    ),
    (["parallel.tensor=2"], ["parallel.tensor=2", "does not run yet"]),
    (["parallel.shard=3"], ["parallel.shard=3", "world size, 1"]),
    (["trainer.global_batch_size=7"], ["trainer.global_batch_size=7", "use 8"]),
]


def train(folder: Path, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPO / "launch/train.py"), "logging.wandb.mode=disabled", *overrides],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("overrides, parts", MISTAKES, ids=lambda value: str(value[0]))
def test_one_line(tmp_path: Path, overrides: list[str], parts: list[str]) -> None:
    done = train(tmp_path, *overrides)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_traceback_when_asked(tmp_path: Path) -> None:
    done = train(tmp_path, "trainer.steps=0", HYDRA_FULL_ERROR="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.strip().splitlines()[-1] == "error: trainer.steps=0: must be at least 1"


@pytest.mark.parametrize("flags", [["--help"], ["--cfg", "job"]])
def test_hydra_s_own_flags_work(tmp_path: Path, flags: list[str]) -> None:
    done = train(tmp_path, "+recipe=llama_fp8", *flags)
    assert done.returncode == 0
    assert "sequence_length: 128" in done.stdout
    assert list(tmp_path.iterdir()) == []
