"""Loss scaling: torch's rule, exact powers of two, an FP16 wire that overflows, and a resume."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fp8train.config import Config, ConfigError, LossScaleConfig, from_container
from fp8train.layout import Layout
from fp8train.rules import LARGEST_LOSS_SCALE, check, loss_scaling
from fp8train.training.checkpoint.load import load
from fp8train.training.checkpoint.manifest import MANIFEST, Progress, describe, progress_of
from fp8train.training.checkpoint.save import save
from fp8train.training.learner import Learner
from fp8train.training.loss_scale import LossScaler
from tests.ranks import on_ranks
from tests.training.conftest import Launcher
from tests.training.test_learner import learner_of, small_config, tensors


def scaler(**settings: Any) -> LossScaler:
    config = Config()
    config.trainer.loss_scale = LossScaleConfig(**{"mode": "dynamic", **settings})
    return LossScaler(config, Progress())


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 4),
    st.sampled_from([2.0, 1.5, 1.0]),
    st.sampled_from([0.5, 0.25, 0.75]),
    st.sampled_from([2.0**16, 2.0**126]),
)
def test_the_rule_is_torchs(
    skipped: list[bool], interval: int, growth: float, backoff: float, value: float
) -> None:
    ours = scaler(
        value=value, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    scale, tracker = torch.tensor(value), torch.zeros((), dtype=torch.int32)
    for one in skipped:
        before = scale.item()
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(one)), growth, backoff, interval
        )
        # Theirs has no floor and grows to FP32's end, where 1 / scale is no normal number.
        scale.clamp_(min=1)
        if scale > LARGEST_LOSS_SCALE:
            scale.fill_(before)
        ours.update(one)
        assert ours.scale == pytest.approx(scale.item(), rel=1e-5)
        assert ours.progress.growth_tracker == tracker.item()


@given(st.lists(st.booleans(), max_size=200))
def test_a_power_of_two_stays_one_above_the_floor(skipped: list[bool]) -> None:
    ours = scaler(growth_interval=2, minimum=8.0)
    for one in skipped:
        ours.update(one)
        assert ours.scale >= 8.0 and ours.scale.hex().startswith("0x1.0000000000000p")


def test_only_a_dynamic_scale_moves() -> None:
    for mode, value in (("none", 1.0), ("static", 65536.0)):
        ours = scaler(mode=mode, growth_interval=1)
        for skipped in (True, False):
            ours.update(skipped)
            assert ours.scale == value
        assert ours.progress == Progress()


@pytest.mark.parametrize(
    "reduce, recipe, expected",
    [
        ("auto", "fp8_delayed", "none"),
        ("auto", "bf16", "none"),
        ("bf16", "fp8_current", "none"),
        ("fp16", "fp8_current", "dynamic"),
        ("fp16", "fp32", "dynamic"),
    ],
)
def test_auto(reduce: str, recipe: str, expected: str) -> None:
    config = Config()
    config.gradients.reduce, config.precision.recipe = reduce, recipe
    assert loss_scaling(config) == expected
    config.trainer.loss_scale.mode = "static"
    assert loss_scaling(config) == "static"


@pytest.mark.parametrize("mode", ["auto", "none", "static", "dynamic"])
def test_the_names_survive_yaml(mode: str) -> None:
    written = OmegaConf.create(f"trainer: {{loss_scale: {{mode: {mode}}}}}")
    container = OmegaConf.to_container(OmegaConf.merge(asdict(small_config()), written))
    assert isinstance(container, dict)
    config = from_container({str(key): value for key, value in container.items()})
    assert config.trainer.loss_scale.mode == mode


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("mode", "off", "mode=off: choose one of auto, none, static, dynamic"),
        ("value", 0.5, "value=0.5: must be at least 1"),
        ("value", float("inf"), "value=inf: must be at most"),
        ("backoff_factor", 1.0, "backoff_factor=1.0: must lie between 0 and 1"),
        ("backoff_factor", float("nan"), "backoff_factor=nan: must lie between 0 and 1"),
        ("growth_factor", 0.5, "growth_factor=0.5: must be at least 1"),
        ("growth_interval", 0, "growth_interval=0: must be at least 1"),
        ("minimum", 2.0**17, "lower the first or raise the second"),
    ],
)
def test_settings_that_cannot_be(key: str, value: Any, message: str) -> None:
    config = small_config()
    config.model.vocab_size = 257
    check(config, world_size=1)
    setattr(config.trainer.loss_scale, key, value)
    with pytest.raises(ConfigError, match=f"^trainer.loss_scale.*{message}") as error:
        check(config, world_size=1)
    assert "\n" not in str(error.value)


def build(recipe: str, reduce: str, progress: Progress | None = None, **scale: Any) -> Learner:
    config = small_config()
    config.precision.recipe, config.gradients.reduce = recipe, reduce
    config.trainer.loss_scale = LossScaleConfig(**scale)
    return learner_of(config, progress or Progress())


def follow(one: Learner, count: int) -> list[dict[str, Any]]:
    """What that many steps gave, and whether each left masters and moments alone."""
    seen = []
    for _ in range(count):
        before = tensors(one)
        result = asdict(one.step())
        after = tensors(one)
        unchanged = len(before) == len(after) and all(map(torch.equal, before, after))
        seen.append({**result, "unchanged": unchanged})
    return seen


def runs(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for mode, value in (("none", 1.0), ("static", 2.0**20), ("static", 3.0)):
        seen[f"fp32 {mode} {value:g}"] = follow(build("fp32", "fp32", mode=mode, value=value), 3)

    # A first good step makes moments; then far too large a scale, which must come down.
    one = build("fp8_delayed", "fp16", value=2.0**8, backoff_factor=2.0**-8, growth_interval=3)
    seen["good"] = follow(one, 1)
    one.progress.loss_scale = 2.0**37
    seen["too large"] = follow(one, 10)
    seen["progress"] = asdict(one.progress)

    # A resume in the middle of a row of good steps.
    checkpoint = save(folder, one.parallel, one.optimizer, one.progress, one.config, "data")
    seen["went on"] = follow(one, 4)
    progress = progress_of(checkpoint, one.config, "data")
    other = build(
        "fp8_delayed", "fp16", progress, value=2.0**30, backoff_factor=2.0**-8, growth_interval=3
    )
    load(checkpoint, other.parallel, other.optimizer, other.config)
    seen["resumed"] = follow(other, 4)
    return seen


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, runs, tmp_path_factory.mktemp("saved"))


def test_a_power_of_two_changes_no_bit(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        plain, scaled, by_three = (
            [(step["loss"], step["grad_norm"]) for step in seen[name]]
            for name in ("fp32 none 1", "fp32 static 1.04858e+06", "fp32 static 3")
        )
        assert plain == scaled
        assert plain != by_three, "a scale that reaches the gradients rounds if it is no power of 2"
        assert [norm for _, norm in by_three] == pytest.approx(
            [norm for _, norm in plain], rel=1e-4
        )


def test_a_scale_too_large_for_fp16_backs_off_and_trains_on(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert [step["skipped"] for step in seen["good"]] == [False]
        steps = seen["too large"]
        skipped = [step["skipped"] for step in steps]
        count = skipped.index(False)
        assert count >= 2 and not any(skipped[count:])
        assert [step["unchanged"] for step in steps] == skipped
        wanted = [2.0 ** (37 - 8 * min(index, count)) for index in range(count + 3)]
        assert [step["loss_scale"] for step in steps][: count + 3] == wanted
        assert steps[count + 3]["loss_scale"] == 2 * wanted[-1], "three good steps: it grows"
        assert seen["progress"]["skipped_steps"] == count
        assert all(0 < step["grad_norm"] < 10 for step in steps[count:]), "without the scale"
        assert all(3 < step["loss"] < 6 for step in steps), "without the scale"
    assert repr(by_rank[0]) == repr(by_rank[1])  # by text: NaN is not equal to itself


def test_a_dynamic_scale_survives_a_resume(by_rank: list[dict[str, Any]]) -> None:
    for seen in by_rank:
        assert seen["progress"]["growth_tracker"] > 0
        assert seen["resumed"] == seen["went on"]
        scales = [step["loss_scale"] for step in seen["resumed"]]
        assert scales[-1] == 2 * scales[0]


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[[Config, dict[str, Any]], Path]:
    """Writes a checkpoint's manifest with a given progress."""

    def write(config: Config, progress: dict[str, Any]) -> Path:
        content = describe(Progress(), config, Layout(), "data") | {"progress": progress}
        (tmp_path / MANIFEST).write_text(json.dumps(content))
        return tmp_path

    return write


def test_a_checkpoint_from_before_loss_scaling(
    manifest: Callable[[Config, dict[str, Any]], Path],
) -> None:
    config = small_config()
    old = {"step": 3, "consumed_samples": 24, "tokens": 384, "skipped_steps": 0, "wandb_id": None}
    progress = progress_of(manifest(config, old), config, "data")
    config.trainer.loss_scale.mode = "dynamic"
    assert LossScaler(config, progress).scale == 65536.0
    assert progress.step == 3


@pytest.mark.slow
def test_a_run_logs_its_loss_scale(launcher: Launcher) -> None:
    overrides = ["precision=bf16", "gradients.reduce=fp16", "trainer.loss_scale.growth_interval=2"]
    run = launcher.train("fp16", *overrides)
    assert run.code == 0, run.err
    assert "dynamic, 65536.0" in run.out
    scales = [line["loss_scale"] for line in run.lines("loss")]
    assert scales == [2.0**16] * 2 + [2.0**17] * 2 + [2.0**18] * 2
    kept = json.loads((run.folder / "checkpoints/step_00000006/manifest.json").read_text())
    assert kept["progress"]["loss_scale"] == 2.0**19
    plain = launcher.train("plain", *overrides, "trainer.loss_scale.mode=none")
    assert plain.code == 0 and not plain.lines("loss_scale")
