"""Reading a run's folder, and what is said where it can't be read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8train.analysis.runs import load_run
from fp8train.config import ConfigError

MakeRun = Callable[..., Path]


def test_a_run_is_read_back(make_run: MakeRun) -> None:
    run = load_run(make_run("bf16-run", steps=20, validate_every=5, seconds=0.25))
    assert run.name == "bf16-run"
    assert run.steps == 20
    assert list(run.losses) == list(range(1, 21))
    assert list(run.validation) == [0, 5, 10, 15, 20]
    assert run.step_seconds == 0.25
    assert run.config["model"]["hidden_size"] == 128
    assert run.config["optimizer"]["eps"] == 1e-8
    assert run.environment["versions"]["torch"] == "2.13.0"


def test_losses_that_are_no_numbers_become_nan(make_run: MakeRun) -> None:
    folder = make_run("a", steps=3, summary={"final_validation_loss": None})
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[1]["loss"], lines[2]["loss"], lines[3]["loss"] = math.nan, math.inf, "NaN"
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    run = load_run(folder)
    assert [math.isnan(loss) for loss in run.losses.values()] == [True, True, True]
    assert math.isnan(run.final_validation_loss)


def test_a_missing_folder_names_the_nearest(make_run: MakeRun) -> None:
    folder = make_run("llama_tiny-bf16-s1234", steps=2)
    with pytest.raises(ConfigError, match=r"does not exist; nearest: .*llama_tiny-bf16-s1234$"):
        load_run(folder.with_name("llama_tiny-bf16-s123"))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run \(it has no config.yaml\)"):
        load_run(tmp_path)


def test_an_unfinished_run_is_told_to_resume(make_run: MakeRun) -> None:
    folder = make_run("a", steps=2)
    (folder / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": 2}))
    with pytest.raises(ConfigError, match=r"not finished \(status interrupted\).*resume=auto"):
        load_run(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"not finished \(it has no summary.json\).*resume=auto"):
        load_run(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("summary.json", "{", "can't be read as JSON"),
        ("summary.json", "[]", "does not hold a JSON object"),
        ("summary.json", '{"status": "finished"}', "has no number of steps"),
        ("config.yaml", "a: [", "can't be read as YAML"),
        ("config.yaml", "- a", "is not the configuration of a run"),
        ("metrics.jsonl", '{"step": 1, "loss": 2}\n{"step', "line 2 is not a line of metrics"),
        ("metrics.jsonl", '{"loss": 2}\n', "line 1 is not a line of metrics"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    make_run: MakeRun, name: str, content: str, message: str
) -> None:
    folder = make_run("a", steps=2)
    (folder / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_run(folder)
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
