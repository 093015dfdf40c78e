"""Gradient reductions through the learner: what they change, what they keep, what a run says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8train.config import Config
from fp8train.parallel.parallelize import parallelize
from fp8train.rules import check
from fp8train.training.checkpoint.load import load
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.checkpoint.save import save
from fp8train.training.learner import Learner
from tests.parallel.test_layouts import data_of, small
from tests.ranks import on_ranks
from tests.training.conftest import Launcher

CPU = torch.device("cpu")
STEPS = 6


def configuration(gradients: dict[str, Any], **overrides: Any) -> Config:
    config = small("fp32", **overrides)
    config.gradients.reduce = "e5m2"
    for key, value in gradients.items():
        setattr(config.gradients, key, value)
    return config


def learner(config: Config) -> Learner:
    check(config, torch.distributed.get_world_size())
    return Learner(config, CPU, data_of(config), Progress(), parallelize(config, CPU))


def train(config: Config) -> list[tuple[float, float, int]]:
    """(loss, gradient norm, bytes) of each step."""
    one = learner(config)
    results = [one.step() for _ in range(STEPS)]
    return [(result.loss, result.grad_norm, result.bytes_reduced) for result in results]


WAYS: dict[str, tuple[dict[str, Any], float]] = {  # and how far losses may be from FP32's
    "e5m2": ({}, 3e-3),
    "e4m3, a scale a message": ({"reduce": "e4m3", "scaling": "tensor"}, 3e-3),
    "stochastic": ({"rounding": "stochastic"}, 3e-3),
    "error feedback": ({"error_feedback": True}, 3e-3),
    "ring": ({"algorithm": "ring"}, 6e-3),
    "bf16": ({"reduce": "bf16"}, 1e-4),
    "sharded sums": ({"reduce": "fp32", "accumulate": "sharded"}, 1e-6),
    "sharded sums of e5m2": ({"accumulate": "sharded", "error_feedback": True}, 3e-3),
}


@pytest.mark.parametrize("replicate", (1, 2, 4))
def test_sharded_sums_of_weights_that_stay(replicate: int) -> None:
    """Weights that stay gathered between micro batches hide the shards, which have the sums."""
    ways = []
    for accumulate, reshard in (("unsharded", True), ("sharded", False)):
        config = configuration({"reduce": "fp32"}, micro_batch_size=1, replicate=replicate)
        config.gradients.accumulate = accumulate
        config.parameters.reshard_after_forward = reshard
        ways.append(np.array([step[:2] for step in on_ranks(4, train, config)[0]]))
    np.testing.assert_allclose(ways[1], ways[0], rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_reduce_train_one_model(way: str) -> None:
    gradients, bound = WAYS[way]
    plain = on_ranks(4, train, configuration({"reduce": "fp32"}, micro_batch_size=1))[0]
    by_rank = on_ranks(4, train, configuration(gradients, micro_batch_size=1))
    assert all(step[:2] == other[:2] for step, other in zip(by_rank[0], by_rank[3], strict=True))
    losses, exact = (np.array([step[0] for step in steps]) for steps in (by_rank[0], plain))
    np.testing.assert_allclose(losses, exact, rtol=bound)
    if gradients.get("reduce") != "fp32":
        assert (losses[1:] != exact[1:]).any()
    # The small model's norms and biases make for padding.
    width = {"fp32": 4, "bf16": 2}.get(gradients.get("reduce", ""), 1)
    times = 2 if "accumulate" in gradients else 1  # micro batches
    sent, whole = by_rank[0][0][2], plain[0][2]
    assert sent == pytest.approx(whole * width / 4 * times, rel=0.03)


def test_replicas_reduce_in_two_stages() -> None:
    config = configuration({}, replicate=2)
    plain = on_ranks(4, train, configuration({"reduce": "fp32"}))[0]
    by_rank = on_ranks(4, train, config)
    assert all(steps == by_rank[0] for steps in by_rank)
    losses, exact = (np.array([step[0] for step in steps]) for steps in (by_rank[0], plain))
    np.testing.assert_allclose(losses, exact, rtol=3e-3)
    assert (losses[1:] != exact[1:]).any()


def poison(gradients: dict[str, Any], replicate: int) -> dict[str, Any]:
    """A step whose gradient is not finite on one rank alone, between good ones."""
    one = learner(configuration(gradients, replicate=replicate))
    one.step()
    reduction = one.parallel.reduction
    kept = {key: value.clone() for key, value in reduction.residuals().items()}
    parameters = [p.to_local().clone() for p in one.parallel.model.parameters()]
    block = one.parallel.parts[0].model.layers["1"]
    handle = block.mlp.down_proj.register_full_backward_hook(
        lambda module, grad_in, grad_out: tuple(
            None if g is None else g * torch.inf if torch.distributed.get_rank() == 1 else g
            for g in grad_in
        )
    )
    bad = one.step()
    handle.remove()
    after = reduction.residuals()
    same = [torch.equal(kept[key], after[key]) for key in kept]
    masters = [p.to_local() for p in one.parallel.model.parameters()]
    unchanged = all(map(torch.equal, parameters, masters))
    good = one.step()
    return {
        "skipped": (bad.skipped, good.skipped, one.progress.skipped_steps),
        "unchanged": unchanged and all(same),
        "kept": len(kept),
        "loss": good.loss,
    }


@pytest.mark.parametrize(
    ("gradients", "replicate"),
    [({"error_feedback": True}, 1), ({"error_feedback": True}, 2), ({"algorithm": "ring"}, 1)],
)
def test_what_is_not_finite_skips_the_step_everywhere(
    gradients: dict[str, Any], replicate: int
) -> None:
    for seen in on_ranks(4, poison, gradients, replicate):
        assert seen["skipped"] == (True, False, 1)
        assert seen["unchanged"] and np.isfinite(seen["loss"])
        assert seen["kept"] == {"ring": 0}.get(gradients.get("algorithm", ""), 3 * replicate)


def save_and_go_on(folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; and the two again, by another learner."""
    config = configuration({"error_feedback": True, "rounding": "stochastic"}, shard=2, replicate=2)
    one = learner(config)
    for _ in range(2):
        one.step()
    save(folder, one.parallel, one.optimizer, one.progress, config, "data")
    seen: dict[str, Any] = {"going on": [one.step().loss for _ in range(2)]}
    other = learner(config)
    lines = Lines()
    logging.getLogger("fp8train.training.checkpoint.state").addHandler(lines)
    logging.getLogger("fp8train.training.checkpoint.state").setLevel(logging.INFO)
    load(folder / "step_00000002", other.parallel, other.optimizer, config)
    other.progress.step, other.progress.consumed_samples = 2, 2 * config.trainer.global_batch_size
    seen["resumed"] = [other.step().loss for _ in range(2)]
    # The residuals are in the unit of the gradients, which the loss is scaled by.
    scaled = configuration({"error_feedback": True, "rounding": "stochastic"}, shard=2, replicate=2)
    scaled.trainer.loss_scale.mode, scaled.trainer.loss_scale.value = "static", 1024.0
    other = learner(scaled)
    load(folder / "step_00000002", other.parallel, other.optimizer, scaled)
    other.progress.step, other.progress.consumed_samples = 2, 2 * config.trainer.global_batch_size
    seen["scaled"] = [other.step().loss for _ in range(2)]
    tensor = configuration({"error_feedback": True, "rounding": "stochastic"}, tensor=2)
    elsewhere = learner(tensor)
    load(folder / "step_00000002", elsewhere.parallel, elsewhere.optimizer, tensor)
    seen["elsewhere"] = len(elsewhere.parallel.reduction.residuals())
    seen["lines"] = lines.seen
    return seen


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def test_a_checkpoint_has_what_error_feedback_keeps(tmp_path: Path) -> None:
    for seen in on_ranks(4, save_and_go_on, tmp_path):
        assert seen["resumed"] == seen["scaled"] == seen["going on"]
        assert seen["elsewhere"] == 0
        (line,) = seen["lines"]
        assert line.startswith("error feedback starts anew: ")
        assert line.endswith(
            "was saved as replicate 2 × shard 2, and this run is shard 2 × tensor 2"
        )


@pytest.mark.slow
def test_a_run_says_how_its_gradients_travel(launcher: Launcher) -> None:
    run = launcher.train(
        "audited",
        *("precision=fp8_current", "gradients.audit_every=2", "gradients.rounding=stochastic"),
        *("gradients.error_feedback=true", "gradients.accumulate=sharded"),
        *("parallel.replicate=2", "parameters.gather=fp8", "precision.telemetry.every=3"),
        processes=4,
    )
    assert run.code == 0, run.err
    assert "Warning" not in run.err
    said = " ".join(run.out.split())
    assert "sent as bf16 inside, e5m2 between, summed in FP32" in said
    assert "rounded stochastically, with error feedback, after each micro batch" in said
    assert "weights gathered for each pass as bytes in the FP8 linears, bf16 elsewhere" in said
    roles = {name.rsplit(".")[-1] for line in run.lines("telemetry") for name in line["telemetry"]}
    assert roles == {"input", "grad_output"}  # the weights were cast before they came here
    audits = {line["step"]: line["gradient_audit"] for line in run.lines("gradient_audit")}
    assert list(audits) == [2, 4, 6]
    for audit in audits.values():
        assert 0.03 < audit["relative_error"] < 0.25 and audit["cosine"] > 0.97
        assert 0 <= audit["flushed"] < 0.2 and 0 <= audit["saturated"] < 0.02
    assert run.summary["gradient_reduction"] == "bf16 inside, e5m2 between"
