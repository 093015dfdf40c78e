"""Run a Hydra app so that a mistake is one line: what, where, what to do; exit code 2.

Hydra reports a mistake in four to thirteen lines and exits with 1. Here its full errors are
turned on internally and its exceptions, and ours, become one line on standard error. Under
torchrun one rank says the line and every rank writes it to `$TORCHELASTIC_ERROR_FILE`, so that
torchrun's closing block names it as the root cause. `HYDRA_FULL_ERROR=1` set by the user
shows the traceback too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fp8train.config import (
    Config,
    ConfigError,
    from_container,
    nearest,
    unknown_key,
    value_error,
)

LAYER_RECIPES = """'precision.layer_recipes=[{pattern: "*.down_proj", recipe: fp8_block}]'"""
ROOT = Path(__file__).resolve().parent.parent
Task = Callable[[Config, list[str]], int]


def run_app(
    task: Task, config_name: str, schema: type[Config] = Config, fault_code: int = 1
) -> int:
    """Compose `configs/<config_name>.yaml` with the command line and call the task.

    Args:
        task: called with the typed configuration and the list of command-line overrides; its
            return value is the exit code. With `-m` it is called once a job.
        config_name: file of `configs/`; its schema is registered as `<config_name>_schema`.
        fault_code: exit code for a fault of ours, an exception that nobody foresaw.
    Returns:
        The exit code: the task's largest; 2 for a mistake of the user's; fault_code; 130 after
        Ctrl-C.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us instead of Hydra's own report
    ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)
    codes: list[int] = []
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name=config_name)
    def app(composed: DictConfig) -> None:
        if failures:  # a job of this -m failed; an exception here would add a line of Hydra's
            return
        try:
            overrides = list(HydraConfig.get().overrides.task)
            codes.append(task(build_config(composed, schema), overrides))
        except Exception as error:
            failures.append(error)

    try:
        app()
    except KeyboardInterrupt:
        print("interrupted: go on with resume=auto", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        failures.append(error)
    if not failures:
        return max(codes, default=0)
    failure = failures[0]
    mistake = isinstance(failure, (ConfigError, HydraException, OmegaConfBaseException))
    if show_traceback or not mistake:
        traceback.print_exception(failure)
    if mistake:
        return report_error(failure, schema)
    record_for_torchrun(f"{type(failure).__name__}: {failure}")
    return fault_code


def build_config(composed: DictConfig, schema: type[Config]) -> Config:
    """The typed configuration of what Hydra composed.

    Raises:
        ConfigError: an unknown key, a wrong or missing value, or a key that only mirrors a group
            (`precision.recipe`, `run.recipe`) and was set to something else.
    """
    choices = HydraConfig.get().runtime.choices
    try:
        container = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        give = LAYER_RECIPES if key.startswith("precision.layer_recipes") else f"{key}=VALUE"
        raise ConfigError(f"{key} is not set: give {give}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(container, dict)
    config = from_container({str(key): value for key, value in container.items()}, schema)
    if config.precision.recipe != choices["precision"]:
        raise ConfigError(
            f"precision.recipe={config.precision.recipe} is read-only and the chosen group is "
            f"{choices['precision']}: choose with precision={config.precision.recipe}"
        )
    recipe = choices.get("recipe")
    if config.run.recipe not in (None, recipe):
        raise ConfigError(
            f"run.recipe={config.run.recipe} is read-only: choose with +recipe={config.run.recipe}"
        )
    config.run.recipe = recipe
    return config


def report_error(error: BaseException, schema: type[Config] = Config) -> int:
    """Print the mistake as one line, once over all ranks of a node, and return exit code 2."""
    line = " ".join(one_line(error, schema).split())
    if record_for_torchrun(line):
        print(f"error: {line}", file=sys.stderr, flush=True)
    return 2


def record_for_torchrun(message: str) -> bool:
    """Write the message where torchrun looks for the root cause, if torchrun started us.

    Returns:
        Whether this process is the one to say it aloud. torchrun ends the others as soon as one
        has failed, so it can't be a rank chosen beforehand: it is the first to get here.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return True
    file = Path(path)
    record = {"message": message, "timestamp": int(time.time())}
    file.write_text(json.dumps(record), encoding="utf-8")
    try:
        (file.parent.parent / "said").touch(exist_ok=False)  # the ranks' folders stand in there
    except FileExistsError:
        return False
    return True


def one_line(error: BaseException, schema: type[Config] = Config) -> str:
    """Say a Hydra, OmegaConf or own error in one line that names key, value and remedy."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.options:
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        if str(error.override).startswith("precision.layer_recipes"):
            return f"cannot read {error.override}: give {LAYER_RECIPES}"
        return f"cannot read {error.override}: write key=value, with quotes around special signs"
    text = str(error).strip()
    if match := re.match(r"Could not override '([^']+)'", text):
        key = match[1]
        if key == "recipe" or "No match in the defaults list" in text:
            return f"{key}: to choose one, write +{key}=NAME"
        if key == "precision.layer_recipes":  # the key is right, an entry is not
            return f"{key}: give {LAYER_RECIPES}"
        return unknown_key(key, schema)
    cause = error.__cause__
    if "precision.layer_recipes" in text:
        return f"precision.layer_recipes: give {LAYER_RECIPES}"
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return value_error(cause, schema)
    return text.splitlines()[0] if text else type(error).__name__


def _missing_choice(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    options = sorted(error.options or [])
    sign = "+" if group == "recipe" else ""
    return (
        f"{sign}{group}={name}: there is no such {group}{nearest(name, options)}; "
        f"available: {', '.join(options)}"
    )


def leave(code: int) -> NoReturn:
    """End the process without interpreter shutdown, once everything is written.

    gloo's worker threads may still hold finished work whose tensors want the interpreter's lock;
    ended by Python's shutdown they abort the process after a good run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
