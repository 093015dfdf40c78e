"""Every command of the README is run: here, or by .ci/run, or by the test that is named."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

README = (REPO / "README.md").read_text()
QUICK = [
    *("trainer.steps=2", "model.hidden_size=64", "model.num_layers=1", "trainer.validate_every=0"),
    *("trainer.sequence_length=32", "trainer.validation_samples=8", "schedule.warmup_steps=1"),
]
ELSEWHERE = {  # command: what runs it
    "scripts/quickstart.sh": ".ci/run",
    "scripts/test.sh": ".ci/run",
    "source .venv/bin/activate": "scripts/setup.sh",
}
TRAIN = "torchrun --nproc-per-node 2 launch/train.py +recipe=llama_fp8"
PAIR = "python launch/compare.py +recipe=llama_fp8 baseline=bf16"
FOLDERS = "python launch/compare.py outputs/A outputs/B"


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def run(command: str, folder: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    """The command as written, with the repository's launch files and this Python's programs."""
    words = [
        str(REPO / word) if word.startswith(("launch/", "scripts/")) else word
        for word in shlex.split(command)
    ]
    program = Path(sys.executable).with_name(words[0])
    return subprocess.run(
        [str(program), *words[1:], *extra], cwd=folder, capture_output=True, text=True, timeout=300
    )


def test_every_command_is_run_somewhere() -> None:
    assert set(commands()) == {*ELSEWHERE, TRAIN, PAIR, FOLDERS}
    ci = (REPO / ".ci/run").read_text()
    assert all(command in ci for command, where in ELSEWHERE.items() if where == ".ci/run")
    assert "python scripts/gap_table.py" in README and "scripts/gap_table.py" in ci


@pytest.mark.slow
def test_train_then_compare(tmp_path: Path) -> None:
    trained = run(TRAIN, tmp_path, *QUICK)
    assert trained.returncode == 0, trained.stderr
    paired = run(PAIR, tmp_path, *QUICK, "resume=auto", "compare.max_gap=0.5")
    assert paired.returncode == 0, paired.stderr
    assert "nothing to do" in paired.stderr  # the FP8 run above is the candidate
    for name, precision in (("A", "fp8_current"), ("B", "bf16")):
        (tmp_path / f"outputs/llama_tiny-{precision}-s1234").rename(tmp_path / f"outputs/{name}")
    again = run(FOLDERS, tmp_path, "compare.max_gap=0.5", "compare.dir=outputs/again")
    assert again.returncode == 0, again.stderr
    reports = [path.name for path in (tmp_path / "outputs/").rglob("loss.png")]
    assert len(reports) == 2


@pytest.mark.slow
def test_the_table_s_own_text_row(tmp_path: Path) -> None:
    assert "`data=local data.path=FILE_OR_FOLDER`" in README
    (tmp_path / "own.txt").write_text("one word and another word " * 2000)
    command = "python launch/train.py +recipe=llama_fp8 data=local data.path=own.txt"
    done = run(command, tmp_path, *QUICK, "logging.wandb.mode=disabled")
    assert done.returncode == 0, done.stderr


def test_the_keys_of_the_table_exist() -> None:
    from fp8train.config import valid_keys

    keys = {match for match in re.findall(r"`[^`]*?([a-z_]+\.[a-z_.]+)=", README)}
    assert keys and keys <= set(valid_keys()) | {"compare.max_gap"}


def test_links_and_pictures_are_there() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (REPO / target).exists(), target
