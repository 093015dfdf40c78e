"""Every shipped file composes, every recipe with every precision, and the rules hold."""

import itertools
from collections.abc import Iterator

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fp8train.config import FP8_RECIPES, CompareConfig, Config, ConfigError, from_container
from fp8train.rules import CHOICES, check, gradient_reduction
from tests.conftest import REPO

RECIPES = sorted(path.stem for path in (REPO / "recipes").glob("*.yaml"))
PRECISIONS = sorted(path.stem for path in (REPO / "configs/precision").glob("*.yaml"))
GROUP_FILES = sorted(
    (path.parent.name, path.stem)
    for path in (REPO / "configs").glob("*/*.yaml")
    if path.parent.name != "recipe"
)


@pytest.fixture(scope="module", autouse=True)
def hydra_app() -> Iterator[None]:
    store = ConfigStore.instance()
    store.store(name="train_schema", node=Config)
    store.store(name="compare_schema", node=CompareConfig)
    with hydra.initialize_config_dir(str(REPO / "configs"), version_base="1.3"):
        yield


def compose(*overrides: str, app: str = "train") -> Config:
    container = OmegaConf.to_container(hydra.compose(app, list(overrides)), resolve=True)
    return from_container(container, CompareConfig if app == "compare" else Config)


@pytest.mark.parametrize("recipe, precision", list(itertools.product(RECIPES, PRECISIONS)))
def test_every_recipe_with_every_precision(recipe: str, precision: str) -> None:
    config = compose(f"+recipe={recipe}", f"precision={precision}")
    sizes = {"llama3_8b_fp8": 8, "llama3_405b_fp8": 512}
    check(config, world_size=sizes.get(recipe, 1))
    assert config.precision.recipe == precision
    expected = "e5m2" if precision in FP8_RECIPES else "fp32"
    assert gradient_reduction(config) == expected, "a recipe must leave gradients.reduce alone"


@pytest.mark.parametrize("group, name", GROUP_FILES)
def test_every_group_file(group: str, name: str) -> None:
    larger = ["model=llama3_8b"] if name == "fineweb_edu" else []  # its BPE has 32,000 ids
    config = compose(f"{group}={name}", *larger)
    assert getattr(config, group) is not None
    if (group, name) != ("data", "local"):  # it needs a path
        check(config, world_size=1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_opens_with_its_hardware_and_only_selects_a_precision(recipe: str) -> None:
    text = (REPO / f"recipes/{recipe}.yaml").read_text()
    assert text.startswith("# @package _global_\n# Hardware: ")
    assert "\nprecision:" not in text and "\ngradients:" not in text
    assert "override /precision:" in text


def test_the_list_of_precisions_is_the_folder() -> None:
    assert sorted(CHOICES["precision.recipe"]) == PRECISIONS


def test_the_compare_app_adds_its_own_keys() -> None:
    config = compose("+recipe=llama_fp8", "compare.processes=4", app="compare")
    assert isinstance(config, CompareConfig)
    assert (config.baseline, config.compare.processes) == ("bf16", 4)


def test_the_default_name_has_model_precision_and_seed() -> None:
    assert compose("trainer.seed=3", "precision=bf16").run.name == "llama_tiny-bf16-s3"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["trainer.steps=0"], "trainer.steps=0: must be at least 1"),
        (["optimizer.lr=nan"], "optimizer.lr=nan"),
        (["model.num_heads=3"], "model.num_heads=3 does not divide model.hidden_size=128"),
        (["model.num_heads=128", "model.num_kv_heads=2"], "odd head size of 1"),
        (["model.num_kv_heads=3"], "model.num_kv_heads=3 does not divide model.num_heads=4"),
        (["trainer.sequence_length=4096"], "above model.max_sequence_length=2048"),
        (["trainer.global_batch_size=20"], "2 data-parallel ranks: use 16 or 32"),
        (["parallel.shard=4"], "needs 4 processes and there are 2: start as many, or set parallel"),
        (["parallel.pipeline_schedule=zigzag"], "choose one of 1f1b, interleaved, zero_bubble"),
        (
            ["gradients.reduce=fp4"],
            "gradients.reduce=fp4: choose one of auto, e5m2, e4m3, bf16, fp32",
        ),
        (["precision.format=e3m4"], "precision.format=e3m4: choose one of null, hybrid, e4m3"),
        (["precision.formats.wgrad.input=e6m2"], "precision.formats.wgrad.input=e6m2: choose one"),
        (
            ["precision=nvfp4", "precision.formats.input=e4m3"],
            "nvfp4, which this run uses, has e2m1 and bf16",
        ),
        (["precision=nvfp4", "precision.format=e4m3"], "precision.format=e4m3: nvfp4 is E2M1"),
        (["precision=mxfp8", "precision.power_of_two_scales=false"], "the scales of mxfp8 are"),
        (["precision=nvfp4", "precision.power_of_two_scales=true"], "the scales of nvfp4 are"),
        (["precision.amax_history_length=2000000"], "must be at most 1048576"),
        (["precision=mxfp8", "precision.accumulate=hopper"], "Hopper has no mxfp8"),
        (["precision.stochastic_rounding=[grad]"], "there are input, weight, grad_output"),
        (
            ["precision.layer_recipes=[{pattern: '*.down_proj', recipe: fp8_blok}]"],
            "fp8_blok for *.down_proj is no recipe; choose one of bf16, fp8_delayed",
        ),
        (
            ["precision=fp32", "precision.layer_recipes=[{pattern: '*.up_proj', recipe: mxfp8}]"],
            "precision=fp32 computes everything in FP32",
        ),
        (["precision.bf16_first_blocks=-1"], "precision.bf16_first_blocks=-1: must be at least 0"),
        (["optimizer.betas=[0.9]"], "optimizer.betas=[0.9]: give two numbers"),
        (["schedule.min_lr_ratio=2"], "schedule.min_lr_ratio=2"),
        (["data.validation_fraction=1"], "data.validation_fraction=1"),
        (["data=local"], "data.path is not set"),
        (
            ["data.tokenizer=bpe"],
            "model.vocab_size=320 is below the 4096 ids of data.tokenizer=bpe",
        ),
        (["run.name="], "run.name is empty"),
        (["optimizer.lr=inf"], "optimizer.lr=inf: must be at most"),
        (["trainer.seed=18446744073709551616"], "trainer.seed=18446744073709551616"),
        (["model.init_std=-1"], "model.init_std=-1"),
        (["model.norm_eps=-1"], "model.norm_eps=-1"),
        (["model.rope_scaling.factor=0"], "model.rope_scaling.factor=0"),
        (["precision.margin=200"], "precision.margin=200: must be at most 32"),
        (["resume=yes"], "resume=yes: choose one of none, auto, or a checkpoint's folder"),
    ],
)
def test_rules(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(compose(*overrides), world_size=2)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
