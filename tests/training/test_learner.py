"""One optimizer step on two real processes: what is accumulated, skipped, rolled and kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8train.config import Config, ConfigError, ModelConfig, PrecisionConfig
from fp8train.data.dataset import PreparedData
from fp8train.parallel.parallelize import parallelize
from fp8train.precision.delayed import DelayedState
from fp8train.precision.recipes import NAMED, DelayedScaling
from fp8train.training.checkpoint.load import load
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.checkpoint.save import save
from fp8train.training.learner import Learner
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def learner(**optimizer: Any) -> Learner:
    config = small_config()
    for key, value in optimizer.items():
        setattr(config.optimizer, key, value)
    return learner_of(config, Progress())


def small_config() -> Config:
    config = Config()
    config.model = ModelConfig(
        name="small",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    )
    config.precision = PrecisionConfig(recipe="fp8_delayed")
    config.trainer.sequence_length, config.trainer.global_batch_size = 16, 8
    config.trainer.micro_batch_size, config.trainer.validation_samples = 2, 4
    config.schedule.warmup_steps = 0
    return config


def learner_of(config: Config, progress: Progress) -> Learner:
    tokens = np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint16)
    data = PreparedData.__new__(PreparedData)  # the two arrays are all that a learner reads
    object.__setattr__(data, "train", tokens)
    object.__setattr__(data, "validation", tokens[:200])
    return Learner(config, CPU, data, progress, parallelize(config, CPU))


def tensors(of: Learner) -> list[torch.Tensor]:
    """Masters, moments, scales and histories."""
    found = list(of.parallel.model.parameters())
    for state in of.optimizer.state.values():
        found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in found]
    delayed = of.parallel.conversions()[0].delayed
    state = [delayed.scale, delayed.history] if isinstance(delayed, DelayedState) else []
    return [t.detach().clone() for t in (*local, *state)]


def steps(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    one = learner()
    delayed = one.parallel.conversions()[0].delayed
    assert isinstance(delayed, DelayedState)
    one.step()
    seen["grad dtypes"] = {p.grad.dtype for p in one.parallel.model.parameters()}
    seen["scale"] = delayed.scale.clone()
    before = tensors(one)
    one.validate()
    seen["validation changes nothing"] = all(map(torch.equal, before, tensors(one)))
    poison = one.parallel.model.norm.register_forward_hook(lambda m, args, out: out * torch.nan)
    result = one.step()
    seen["skipped"] = result.skipped, one.progress.skipped_steps, one.progress.step
    seen["a skipped step changes nothing"] = all(map(torch.equal, before, tensors(one)))
    poison.remove()
    seen["goes on"] = one.step().skipped
    seen["loss"] = one.step().loss

    # Two micro batches add up unsharded, in FP32, before the one reduction.
    one.optimizer.zero_grad()
    model = one.parallel.parts[0].model
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    model(one.samples.batch(0, 2)[:, :-1]).float().mean().backward()
    groups = [block._get_fsdp_state()._fsdp_param_group for block in model.layers.values()]
    accumulated = [p.unsharded_accumulated_grad for group in groups for p in group.fsdp_params]
    seen["accumulated"] = {grad.dtype for grad in accumulated}
    model.set_requires_gradient_sync(True)
    model(one.samples.batch(0, 2)[:, :-1]).float().mean().backward()

    # A checkpoint, loaded into a learner of other settings.
    save(folder, one.parallel, one.optimizer, one.progress, one.config, "data")
    other = learner(weight_decay=0.0, betas=[0.8, 0.9], eps=1e-4)
    load(folder / f"step_{one.progress.step:08d}", other.parallel, other.optimizer, other.config)
    seen["loaded"] = all(map(torch.equal, tensors(one), tensors(other)))
    group = other.optimizer.param_groups[0]
    seen["settings"] = group["weight_decay"], tuple(group["betas"]), group["eps"]

    # An amax that one rank alone saw counts on all.
    recipe = DelayedScaling(NAMED["e4m3"], history_length=4)
    shared = DelayedState({"layer": recipe}, CPU)
    shared.stage(0, torch.tensor(1.0 + dist.get_rank()))
    shared.roll(dist.group.WORLD)
    seen["amax"] = 448.0 / shared.scale[0].item()
    return seen


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, steps, tmp_path_factory.mktemp("saved"))


def test_gradients_are_fp32_all_the_way(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["grad dtypes"] == seen["accumulated"] == {torch.float32}


def test_a_step_that_is_not_finite_changes_nothing(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["skipped"] == (True, 1, 2)
        assert seen["a skipped step changes nothing"]
        assert seen["goes on"] is False and seen["loss"] > 0


def test_validation_changes_nothing(by_rank: list[dict[str, Any]]) -> None:
    assert all(seen["validation changes nothing"] for seen in by_rank)


def test_scales_are_the_same_on_all_ranks(by_rank: list[dict[str, Any]]) -> None:
    first, second = (seen["scale"] for seen in by_rank)
    assert torch.equal(first, second) and (first != 1).any()
    assert [seen["amax"] for seen in by_rank] == [2.0, 2.0]


def test_a_checkpoint_holds_everything_but_the_settings(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["loaded"]
        assert seen["settings"] == (0.0, (0.8, 0.9), 1e-4)


def test_ranks_that_find_different_checkpoints_are_told() -> None:
    for message in on_ranks(2, disagree):
        assert "(rank 0: none; rank 1: step_1)" in message


def disagree() -> str:
    from fp8train.training.resume import check_agreement
    from fp8train.training.run_folder import RunFolder

    try:
        found = [Path(f"step_{dist.get_rank()}")][: dist.get_rank()]
        check_agreement(found, RunFolder(Config()))
    except ConfigError as error:
        return str(error)
    return "nothing"


def positions() -> tuple[int, int, list[int]]:
    """Where stochastic rounding stands in the second micro batch of the second step."""
    config = small_config()
    config.trainer.global_batch_size, config.trainer.micro_batch_size = 8, 2
    one = learner_of(config, Progress())
    one.step()
    one.step()
    position = one.parallel.conversions()[0].position
    assert position.rows is not None
    return position.step, position.micro_batch, position.rows.flatten().tolist()


def test_every_rank_and_micro_batch_draws_bits_of_its_own() -> None:
    """Step 1 begins at sample 8; its second round at 12; rank 1's rows follow rank 0's 2·16."""
    rows = [list(range(32)), list(range(32, 64))]
    assert on_ranks(2, positions) == [(1, 12, own) for own in rows]
