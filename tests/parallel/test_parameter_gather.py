"""Weights gathered as bytes against weights gathered in BF16: the same bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8train.config import Config
from fp8train.parallel.parallelize import parallelize
from fp8train.precision.linear import QuantizedLinear
from fp8train.rules import check
from fp8train.training.checkpoint.load import load
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.checkpoint.save import save
from fp8train.training.learner import Learner
from tests.parallel.test_layouts import data_of, small
from tests.ranks import on_ranks

CPU = torch.device("cpu")
STEPS = 3


def configuration(recipe: str, gather: str, **overrides: Any) -> Config:
    """A model whose matrices have 128, 256 and 512 rows, so that three ranks' rows and blocks of
    128 straddle each other."""
    options = {
        key: overrides.pop(key) for key in list(overrides) if hasattr(Config().precision, key)
    }
    config = small(recipe, **{"micro_batch_size": 1, "sequence_length": 128, **overrides})
    config.model.hidden_size, config.model.intermediate_size = 256, 512
    config.model.num_heads = 4
    config.model.num_kv_heads = overrides.get("num_kv_heads", 2)
    config.trainer.global_batch_size = 12
    for key, value in options.items():
        setattr(config.precision, key, value)
    config.parameters.gather = gather
    return config


class Gathered(TorchDispatchMode):
    """Bytes that all-gathers have delivered."""

    bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_allgather_base_" in op.__name__:
            self.bytes += args[0].numel() * args[0].element_size()
        return op(*args, **(kwargs or {}))


def learner(config: Config) -> Learner:
    check(config, torch.distributed.get_world_size())
    return Learner(config, CPU, data_of(config), Progress(), parallelize(config, CPU))


def train(config: Config) -> dict[str, Any]:
    one = learner(config)
    with Gathered() as gathered:
        seen: dict[str, Any] = {"steps": []}
        for _ in range(STEPS):
            result = one.step()
            seen["steps"].append((result.loss, result.grad_norm, one.validate()))
    seen["masters"] = [p.to_local().clone() for p in one.parallel.model.parameters()]
    seen["delayed"] = {k: v.clone() for k, v in one.parallel.delayed_state().items()}
    seen["bytes"] = gathered.bytes
    layers = [m for m in one.parallel.model.modules() if isinstance(m, QuantizedLinear)]
    seen["as bytes"] = sum(layer.bytes is not None for layer in layers)
    return seen


def compare(ranks: int, recipe: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One rank's results with each gather, after holding all ranks' to one another."""
    plain = on_ranks(ranks, train, configuration(recipe, "bf16", **overrides))
    bytes_ = on_ranks(ranks, train, configuration(recipe, "fp8", **overrides))
    for one, other in zip(plain, bytes_, strict=True):
        assert one["steps"] == other["steps"]
        assert one["as bytes"] == 0 and other["as bytes"] > 0
        for ours, theirs in zip(one["masters"], other["masters"], strict=True):
            assert torch.equal(ours, theirs)
        assert one["delayed"].keys() == other["delayed"].keys()
        for key, value in one["delayed"].items():
            assert torch.equal(value, other["delayed"][key]), key
    return plain[0], bytes_[0]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_bit_equal_to_gathering_bf16(recipe: str, ranks: int) -> None:
    plain, gathered = compare(ranks, recipe)
    assert gathered["as bytes"] == 14  # all linears of two blocks
    blocks = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 512 * 256)  # elements of linears
    rest = 2 * 2 * 128 * 256 + 5 * 256  # embedding and head, norms
    share = (blocks + 2 * rest) / (2 * blocks + 2 * rest)
    assert gathered["bytes"] / plain["bytes"] == pytest.approx(share, abs=0.06)


OTHERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "FP32 block scales": (3, "fp8_block", {"power_of_two_scales": False}),
    "exact emulation": (2, "fp8_block", {"emulation": "exact"}),
    "torch's GEMMs": (2, "fp8_current", {"backend": "torch"}),
    "E5M2 weights": (2, "fp8_current", {"format": None, "margin": 1}),
    "tensor": (4, "fp8_current", {"tensor": 2}),
    "tensor, delayed": (4, "fp8_delayed", {"tensor": 2}),
    "tensor, TE's amaxes": (4, "fp8_current", {"tensor": 2, "amax_groups": "te"}),
    "tensor, blocks": (4, "fp8_block", {"tensor": 2, "num_kv_heads": 4}),
    "context": (2, "fp8_current", {"context": 2}),
    "replicas": (4, "fp8_current", {"replicate": 2}),
    "checkpointed": (2, "fp8_block", {"activation_checkpoint": "full"}),
    "cached": (2, "fp8_delayed", {"cache_weights": True}),
    "zero bubble": (
        *(4, "fp8_current"),
        {"pipeline": 2, "pipeline_schedule": "zero_bubble", "global_batch_size": 8},
    ),
    "smooth": (2, "fp8_current", {"smooth_swiglu": True}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_with_everything_else(case: str) -> None:
    ranks, recipe, overrides = OTHERS[case]
    _, gathered = compare(ranks, recipe, **overrides)
    blocks = 1 if "pipeline" in overrides else 2
    assert gathered["as bytes"] == blocks * (6 if case == "smooth" else 7)


def save_and_load(folder: Any) -> list[list[float]]:
    """Losses going on, and after a load into each kind of gather."""
    config = configuration("fp8_delayed", "fp8")
    one = learner(config)
    one.step()
    save(folder, one.parallel, one.optimizer, one.progress, config, "data")
    losses = [[one.step().loss, one.step().loss]]
    for gather in ("fp8", "bf16"):
        other = learner(configuration("fp8_delayed", gather))
        load(folder / "step_00000001", other.parallel, other.optimizer, other.config)
        other.progress.step, other.progress.consumed_samples = 1, 12
        losses.append([other.step().loss, other.step().loss])
    return losses


def test_checkpoints_know_nothing_of_it(tmp_path: Any) -> None:
    for going_on, loaded, loaded_plainly in on_ranks(2, save_and_load, tmp_path):
        assert going_on == loaded == loaded_plainly


@pytest.mark.parametrize("gather", ["bf16", "fp8"])
def test_weights_that_stay_for_a_step_are_gathered_less_and_the_same(gather: str) -> None:
    config = configuration("fp8_current", gather)
    again = on_ranks(2, train, config)[0]
    config.parameters.reshard_after_forward = False
    once = on_ranks(2, train, config)[0]
    assert once["steps"] == again["steps"]
    assert all(map(torch.equal, once["masters"], again["masters"]))
    # Of 6 micro batches a step, twice each, and those of the validation.
    assert once["bytes"] < again["bytes"] / 4
