"""Overrides of a pair of runs, and the children that train them (real torchrun processes)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore

from fp8train.analysis.pair import (
    PlannedRun,
    key_of,
    plan,
    train,
    training_overrides,
    with_precision,
)
from fp8train.config import CompareConfig, Config, ConfigError, RunConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("a.b=1", "a.b"),
        ("++a.b=x=y", "a.b"),
        ("+recipe=llama_fp8", "recipe"),
        ("~data", "data"),
        ("precision@mine=bf16", "precision"),
    ],
)
def test_the_key_of_an_override(override: str, key: str) -> None:
    assert key_of(override) == key


def test_train_does_not_see_the_keys_of_compare() -> None:
    given = ["+recipe=llama_fp8", "baseline=bf16", "compare.processes=1", "++compare.dir=x"]
    assert training_overrides([*given, "optimizer.lr=1"]) == ["+recipe=llama_fp8", "optimizer.lr=1"]


def test_the_baseline_drops_the_options_of_the_candidates_precision() -> None:
    given = ["+recipe=r", "precision=fp8_block", "++precision.margin=2", "optimizer.lr=1"]
    assert with_precision(given, "bf16") == ["+recipe=r", "optimizer.lr=1", "precision=bf16"]


@pytest.fixture
def hydra_app() -> Iterator[None]:
    """Hydra as it is inside of launch/compare.py."""
    ConfigStore.instance().store(name="compare_schema", node=CompareConfig)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        yield


def pair_of(overrides: list[str], processes: int = 2) -> list[PlannedRun]:
    variants = [
        ("candidate", "fp8_block", [*overrides, "precision=fp8_block", "precision.margin=1"]),
        ("baseline", "bf16", with_precision(overrides, "bf16")),
    ]
    return plan(variants, processes)


@pytest.mark.usefixtures("hydra_app")
def test_runs_get_names_and_folders_of_their_own() -> None:
    candidate, baseline = pair_of(["trainer.seed=7", "optimizer.lr=0.1"])
    assert (candidate.name, baseline.name) == ("llama_tiny-fp8_block-s7", "llama_tiny-bf16-s7")
    assert candidate.config.precision.margin == 1
    assert baseline.config.precision.margin == 0
    assert candidate.config.optimizer == baseline.config.optimizer
    assert baseline.overrides == ["trainer.seed=7", "optimizer.lr=0.1", "precision=bf16"]

    candidate, baseline = pair_of(["run.name=x"])
    assert (candidate.name, baseline.name) == ("x", "x-bf16")
    assert baseline.config.run.dir == "outputs/x-bf16"
    assert baseline.overrides == ["precision=bf16", "run.name=x-bf16"]


@pytest.mark.usefixtures("hydra_app")
def test_one_folder_for_two_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.dir=x would hold two runs.*run.name=NAME"):
        pair_of(["run.dir=x"])
    candidate, baseline = pair_of(["run.dir=x/${run.name}"])
    assert candidate.config.run.dir != baseline.config.run.dir


@pytest.mark.usefixtures("hydra_app")
def test_a_full_folder_is_refused_before_any_run(tmp_path: Path) -> None:
    full = tmp_path / "llama_tiny-bf16-s1234"  # the baseline's
    full.mkdir()
    (full / "config.yaml").write_text("")
    place = f"run.dir={tmp_path}/${{run.name}}"
    with pytest.raises(ConfigError, match=r"llama_tiny-bf16-s1234 already holds a run.*resume="):
        pair_of([place])
    for remedy in ("resume=auto", "run.overwrite=true"):
        assert len(pair_of([place, remedy])) == 2


@pytest.mark.usefixtures("hydra_app")
def test_rules_are_checked_before_any_run() -> None:
    with pytest.raises(ConfigError, match=r"trainer.micro_batch_size=8 times 3 data-parallel"):
        pair_of([], processes=3)
    with pytest.raises(ConfigError, match=r"compare.processes=0: must be at least 1"):
        pair_of([], processes=0)


def planned(name: str, overrides: list[str]) -> PlannedRun:
    return PlannedRun("candidate", Config(run=RunConfig(name=name)), overrides)


def test_a_child_gets_its_overrides_and_its_failure_is_named(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import os, sys, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / os.environ['RANK']).write_text(' '.join(sys.argv[1:]))\n"
        "sys.exit(3 if 'fail=1' in sys.argv else 0)\n"
    )
    train(planned("x", ["a=1", "b='c d'"]), 2, script)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "a=1 b='c d'"
    with pytest.raises(ConfigError, match=r"the candidate run x failed with exit code 1:"):
        train(planned("x", ["fail=1"]), 1, script)


def test_a_signal_stops_the_children(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import os, pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "path.with_suffix('.new').rename(path)\n"
        "time.sleep(300)\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}]\n"
        "from pathlib import Path\n"
        "from fp8train.analysis.pair import PlannedRun, train\n"
        "from fp8train.config import Config, RunConfig\n"
        "run = PlannedRun('candidate', Config(run=RunConfig(name='x')), [sys.argv[1]])\n"
        "try:\n"
        f"    train(run, 1, Path({str(child)!r}))\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    path = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, str(parent), str(path)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # SIGINT takes the same way, by Python's own handler
    process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)
