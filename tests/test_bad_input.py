"""Mistakes on the command line: one line, exit code 2, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

MISTAKES = [  # overrides, what the line must say
    (["+recipe=nope"], ["+recipe=nope", "available: llama3_405b_fp8, llama3_8b_fp8, llama_fp8"]),
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
    (["parallel.tensor=2"], ["parallel.tensor=2", "there is 1", "set parallel.tensor=1"]),
    (["parallel.shard=3"], ["parallel.shard=3", "there is 1", "set parallel.shard=1"]),
    (["trainer.global_batch_size=7"], ["trainer.global_batch_size=7", "use 8"]),
]
LAYOUTS = [  # processes, overrides, what the line must say
    (4, ["parallel.tensor=4"], ["model.num_kv_heads=2", "tensor=4", "use parallel.tensor=2"]),
    (4, ["parallel.tensor=3"], ["there are 4: start as many, or set parallel.tensor=2 or"]),
    (8, ["parallel.pipeline=8"], ["model.num_layers=4", "parallel.pipeline=8", "pipeline=4"]),
    (
        4,
        ["parallel.pipeline=4"],
        ["trainer.global_batch_size=16 makes 2 micro batches", "idle 60%", "use 32"],
    ),
    (
        2,
        ["parallel.context=2", "trainer.sequence_length=126"],
        ["trainer.sequence_length=126", "use 124 or 128 or parallel.context=1"],
    ),
    (
        2,
        ["parallel.context=2", "precision=fp8_block"],
        ["blocks of 128 in fp8_block", "sequence_length=128", "use 512 or parallel.context=1"],
    ),
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
    one_line(tmp_path, train(tmp_path, *overrides), parts)


@pytest.mark.parametrize("ranks, overrides, parts", LAYOUTS, ids=lambda value: str(value))
def test_a_layout_is_refused_before_processes_meet(
    tmp_path: Path, ranks: int, overrides: list[str], parts: list[str]
) -> None:
    """One of the processes is started, as torchrun would: it must not wait for the others."""
    one_line(tmp_path, train(tmp_path, *overrides, RANK="0", WORLD_SIZE=str(ranks)), parts)


def one_line(folder: Path, done: subprocess.CompletedProcess[str], parts: list[str]) -> None:
    """Exit code 2, one line with those parts, and nothing written."""
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(part in line for part in parts), line
    assert done.stdout == ""
    assert list(folder.iterdir()) == []


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
