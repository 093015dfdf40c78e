"""The picture of telemetry: what is read, what is drawn, for few layers and for many."""

import json
import random
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from fp8train.analysis.heatmap import Samples, plot_samples, read_samples
from fp8train.analysis.runs import load_run
from fp8train.config import ConfigError
from tests.analysis.conftest import MakeRun

LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
ROLES = ("input", "weight", "grad_output")


def telemetry(blocks: int, noise: random.Random) -> dict[str, Any]:
    return {
        f"layers.{block}.{linear}.{role}": {
            "amax": 1.0,
            "scale": 64.0,
            "saturated": 10 ** noise.uniform(-6, -2) if noise.random() < 0.3 else 0.0,
            "flushed": 10 ** noise.uniform(-5, -1),
            "snr_db": None if linear == "mlp.down_proj" else 25 + noise.random(),
            "kurtosis": 3.0,
        }
        for block in range(blocks)
        for linear in LINEARS
        for role in ROLES
    }


def add(folder: Path, blocks: int, steps: list[int]) -> None:
    noise = random.Random(0)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "telemetry": telemetry(blocks, noise)}) + "\n")


def test_readers_of_a_run_do_not_stumble(make_run: MakeRun) -> None:
    folder = make_run("watched", "fp8_current")
    before = load_run(folder)
    add(folder, 2, [1, 50])
    assert load_run(folder) == before


def test_samples_are_read_while_the_run_goes_on(make_run: MakeRun) -> None:
    folder = make_run("watched", "fp8_current")
    assert read_samples(folder) is None
    add(folder, 2, [50, 1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "telem')
    samples = read_samples(folder)
    assert samples is not None
    assert (samples.run, samples.steps) == ("watched", [1, 50])
    assert samples.layers("weight") == [f"layers.{b}.{name}" for b in (0, 1) for name in LINEARS]
    table = samples.table("input", "snr_db")
    assert table.shape == (8, 2)
    assert np.isnan(table[3]).all() and (table[0] > 25).all()
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        read_samples(folder.parent)


@pytest.mark.parametrize("blocks", [1, 7, 80])
@pytest.mark.parametrize("count", [1, 12])
def test_pictures_of_few_and_many_layers(tmp_path: Path, blocks: int, count: int) -> None:
    add(tmp_path, blocks, [max(1, 50 * i) for i in range(count)])
    samples = read_samples(tmp_path)
    assert samples is not None
    plot_samples(samples, tmp_path / "a.png")
    picture = matplotlib.image.imread(tmp_path / "a.png")
    assert picture.shape[1] == 1875 and 500 < picture.shape[0] < 3000
    assert len(np.unique(picture[..., 0])) > 100 if count > 1 else True


def test_a_changed_value_changes_the_picture_and_no_values_are_drawn(tmp_path: Path) -> None:
    add(tmp_path, 1, [1, 2])
    samples = read_samples(tmp_path)
    assert samples is not None
    plot_samples(samples, tmp_path / "a.png")
    samples.values[2]["layers.0.mlp.up_proj.weight"]["flushed"] = 0.0
    plot_samples(samples, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    nothing = {name: dict.fromkeys(("snr_db", "saturated", "flushed")) for name in samples.names}
    plot_samples(Samples("x", [1], samples.names, {1: nothing}), tmp_path / "c.png")
