"""Telemetry in training: losses stay the same to the last bit, ranks count together, files hold
it."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8train.precision.recipes import ROLES
from fp8train.training.checkpoint.manifest import Progress, held
from fp8train.training.wandb_log import flat
from tests.conftest import REPO
from tests.ranks import on_ranks
from tests.training.conftest import Launcher
from tests.training.test_learner import learner_of, small_config


def losses_and_telemetry(precision: str, every: int, recompute: str = "none") -> tuple[Any, ...]:
    config = small_config()
    config.precision.recipe = precision
    config.precision.telemetry.every = every
    config.parallel.activation_checkpoint = recompute
    learner = learner_of(config, Progress())
    results = [learner.step() for _ in range(3)]
    weights = torch.cat([p.full_tensor().flatten() for p in learner.parallel.model.parameters()])
    return [(r.loss, r.grad_norm) for r in results], weights, [r.telemetry for r in results]


def with_and_without() -> dict[str, Any]:
    seen = {}
    for precision in ("fp8_delayed", "fp8_block"):
        on, off = (losses_and_telemetry(precision, every) for every in (2, 0))
        seen[precision] = on[0] == off[0] and torch.equal(on[1], off[1])
        seen["telemetry"], seen["none"] = on[2], off[2]
    for recompute in ("full", "selective"):
        again = losses_and_telemetry("fp8_block", 2, recompute)
        seen[recompute] = on[0] == again[0] and on[2] == again[2]
    seen["amaxes"] = [None, None]
    dist.all_gather_object(seen["amaxes"], _first_amax())
    return seen


def _first_amax() -> float:
    """The amax of one input on this rank alone, in the first micro batch."""
    config = small_config()
    config.precision.recipe = "fp8_block"
    learner = learner_of(config, Progress())
    found = []
    learner.parallel.model.layers["0"].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: found.append(args[0].abs().max().item())
    )
    learner.step()
    return found[0]


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return on_ranks(2, with_and_without)


def test_training_is_the_same_to_the_last_bit(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["fp8_delayed"] and seen["fp8_block"]


def test_recomputation_counts_nothing_twice(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["full"] and seen["selective"]


def test_ranks_count_together(by_rank: list[dict[str, Any]]) -> None:
    first, second = by_rank
    assert first["telemetry"] == second["telemetry"]
    assert first["none"] == [None, None, None]
    assert [each is not None for each in first["telemetry"]] == [True, True, False]
    found = first["telemetry"][0]["layers.0.mlp.down_proj.input"]["amax"]
    one, other = first["amaxes"]
    assert one != other and found == pytest.approx(max(one, other), rel=1e-5)


def test_w_and_b_gets_flat_keys() -> None:
    line = {"step": 3, "telemetry": {"layers.0.up.input": {"amax": 2.0, "snr_db": None}}}
    assert flat(line) == {"step": 3, "telemetry/amax/layers.0.up.input": 2.0}
    assert flat({"step": 3, "loss": 1.0}) == {"step": 3, "loss": 1.0}


def test_a_resume_may_change_it() -> None:
    config, other = small_config(), small_config()
    other.precision.telemetry.every = 7
    assert held(config) == held(other)


@pytest.mark.slow
def test_a_run_keeps_and_draws_it(launcher: Launcher) -> None:
    every = "precision.telemetry.every=2"
    run = launcher.train("watched", "precision=fp8_delayed", every, "checkpoint.every=3")
    assert run.code == 0, run.err
    assert "telemetry" in run.out and "step 1 and every 2 steps" in run.out
    lines = run.lines("telemetry")
    assert [line["step"] for line in lines] == [1, 2, 4, 6]
    names = [f"layers.0.self_attn.q_proj.{role}" for role in ROLES]
    assert list(lines[0]["telemetry"])[:3] == names
    text = (run.folder / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [line["step"] for line in run.lines("loss")] == [1, 2, 3, 4, 5, 6]
    picture = run.folder / "telemetry.png"
    before = picture.read_bytes()
    assert before.startswith(b"\x89PNG")
    picture.unlink()
    command = [sys.executable, str(REPO / "scripts/heatmap.py")]
    drawn = subprocess.run([*command, str(run.folder)], capture_output=True, text=True)
    assert drawn.returncode == 0 and picture.read_bytes() == before

    bf16 = launcher.train("unobserved", "precision=bf16", every)
    assert bf16.code == 0 and not bf16.lines("telemetry")
    assert not (bf16.folder / "telemetry.png").exists()
    refused = subprocess.run([*command, str(bf16.folder)], capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert json.loads((bf16.folder / "summary.json").read_text())["status"] == "finished"
