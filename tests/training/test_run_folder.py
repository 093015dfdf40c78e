"""A run's folder: what is refused, what overwriting leaves, what damage is survived."""

import json
from pathlib import Path

import pytest

from fp8train.config import Config, ConfigError, ModelConfig, PrecisionConfig
from fp8train.training.run_folder import RunFolder


def config(folder: Path | str, **run: object) -> Config:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
    made = Config(
        model=ModelConfig(name="m", num_heads=4, num_kv_heads=2, **sizes),
        precision=PrecisionConfig(recipe="bf16"),
    )
    made.run.name, made.run.dir = "x", str(folder)
    for key, value in run.items():
        setattr(made.run, key, value)
    return made


def test_overwriting_leaves_what_is_not_the_run_s(tmp_path: Path) -> None:
    where = tmp_path / "run"
    RunFolder(config(where)).open(resuming=False)
    (where / "metrics.jsonl").write_text('{"step": 1}\n')
    (where / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(config(where)).check()
    anew = RunFolder(config(where, overwrite=True))
    anew.check()
    anew.open(resuming=False)
    assert (where / "thesis.txt").read_text() == "precious"
    assert not (where / "metrics.jsonl").exists()


def test_a_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("theirs")
    with pytest.raises(ConfigError, match="files of something else"):
        RunFolder(config(tmp_path, overwrite=True)).check()
    assert (tmp_path / "config.yaml").read_text() == "theirs"


@pytest.mark.parametrize("where", ["/dev/null/x", "/proc/x/y"])
def test_a_folder_that_can_t_be_made_is_refused(where: str) -> None:
    folder = RunFolder(config(where))
    with pytest.raises(ConfigError, match="can't be made"):
        folder.check()
        folder.open(resuming=False)


def test_damaged_lines_are_cut(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path))
    good = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}, {"step": 3, "loss": 1.0}]
    lines = [*map(json.dumps, good), '{"loss": 3}', '"x"', '{"step": 4, "lo']
    folder.metrics.write_text("\n".join(lines))
    folder.cut_metrics(2)
    assert folder.logged("loss") == {1: 2.0, 2: 1.5}


@pytest.mark.parametrize("text", ["{}", '{"step"', "[]", '{"steps": null}'])
def test_a_damaged_summary_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert RunFolder(config(tmp_path)).finished_steps() is None
