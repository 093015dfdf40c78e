"""Configurations, as the command line composes them."""

from functools import cache
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fp8train.config import Config, from_container
from tests.conftest import REPO

MODELS = {
    "llama_tiny": 1_066_112,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


def compose(*overrides: str) -> Config:
    return from_container(_container(*overrides))


@cache
def _container(*overrides: str) -> dict[str, Any]:
    ConfigStore.instance().store(name="train_schema", node=Config)
    with hydra.initialize_config_dir(str(REPO / "configs"), version_base="1.3"):
        composed = hydra.compose("train", list(overrides))
    return cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
