"""Checkpoints on disk: what is whole, what is damaged, what is never run."""

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8train.config import ConfigError
from fp8train.layout import Layout
from fp8train.training.checkpoint import checksums, folders
from fp8train.training.checkpoint.load import first_verified, load
from fp8train.training.checkpoint.manifest import MANIFEST, Progress, describe, progress_of
from fp8train.training.checkpoint.save import save
from fp8train.training.checkpoint.storage import METADATA, read_tensors, write_tensors
from fp8train.training.resume import foresee
from fp8train.training.run_folder import RunFolder
from tests.ranks import on_ranks
from tests.training.test_learner import learner_of, small_config


def saved(folder: Path) -> list[str]:
    """Two steps with a checkpoint each. Returns the files of the newest."""
    config = small_config()
    config.precision.recipe = "fp8_delayed"
    one = learner_of(config, Progress())
    for _ in range(2):
        one.step()
        newest = save(folder, one.parallel, one.optimizer, one.progress, config, "data")
    return sorted(path.name for path in newest.iterdir())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for files in on_ranks(2, saved, folder):
        assert files == [checksums.SUMS, "__0_0.distcp", "__1_0.distcp", MANIFEST, METADATA]
    return folder


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints, tmp_path / "checkpoints"))


def test_latest_points_to_the_newest(checkpoints: Path) -> None:
    assert (checkpoints / folders.LATEST).read_text() == "step_00000002\n"
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step_00000001", "step_00000002", folders.LATEST}


def test_it_can_be_checked_without_us(copy: Path) -> None:
    newest = copy / "step_00000002"
    command = ["sha256sum", "--check", "--strict", checksums.SUMS]
    assert subprocess.run(command, cwd=newest, capture_output=True, check=False).returncode == 0
    (newest / MANIFEST).write_text("{}")
    assert subprocess.run(command, cwd=newest, capture_output=True, check=False).returncode == 1


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_the_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def add_another(path: Path) -> None:
    path.with_name("another").touch()


DAMAGE = (truncate, empty, flip_a_bit, flip_the_last, lengthen, Path.unlink, add_another)
FILES = (checksums.SUMS, "__0_0.distcp", "__1_0.distcp", MANIFEST, METADATA)


def found(folder: Path) -> tuple[str | None, str | None]:
    """The newest verified, and why the newest was passed over."""
    newest = first_verified(folders.newest_first(folder))
    last = folder / "step_00000002"
    wrong = checksums.damage(last, checksums.digests(last, checksums.names(last)))
    return newest.name if newest else None, wrong


def all_found(folders_of: list[Path]) -> list[tuple[str | None, str | None]]:
    return [found(folder) for folder in folders_of]


def test_damage_to_any_file_is_found_and_never_loaded(checkpoints: Path, tmp_path: Path) -> None:
    copies = []
    for file in FILES:
        for harm in DAMAGE:
            folder = tmp_path / f"{file} {harm.__name__}"
            shutil.copytree(checkpoints, folder)
            harm(folder / "step_00000002" / file)
            copies.append(folder)
    for by_rank in on_ranks(2, all_found, copies):
        for folder, (newest, wrong) in zip(copies, by_rank, strict=True):
            assert newest == "step_00000001" and wrong, folder.name
            file = "another" if folder.name.endswith("add_another") else folder.name.split()[0]
            assert file in wrong, (folder.name, wrong)


def what_is_left(folder: Path) -> str:
    try:
        return str(first_verified(folders.newest_first(folder)))
    except ConfigError as error:
        return str(error)


def test_without_a_whole_one_the_run_is_refused(copy: Path) -> None:
    for step in ("step_00000001", "step_00000002"):
        flip_a_bit(copy / step / "__0_0.distcp")
    for said in on_ranks(2, what_is_left, copy):
        assert "step_00000002: __0_0.distcp does not match SHA256SUMS): restore one" in said
    shutil.rmtree(copy)
    assert on_ranks(2, what_is_left, copy) == ["None", "None"]


def test_it_is_held_to_the_configuration(tmp_path: Path) -> None:
    config = small_config()
    manifest = describe(Progress(step=2), config, Layout(), "data")
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert progress_of(tmp_path, config, "data") == Progress(step=2)
    with pytest.raises(ConfigError, match="other data"):
        progress_of(tmp_path, config, "others")
    config.precision.margin = 3
    with pytest.raises(ConfigError, match=r"precision\.margin is 0 there and 3 here"):
        progress_of(tmp_path, config, "data")


def test_a_changed_manifest_is_not_believed(copy: Path) -> None:
    """It says that another data set was trained on, and the one before is taken all the same."""
    config = small_config()
    config.run.dir, config.resume, config.precision.recipe = str(copy.parent), "auto", "fp8_delayed"
    folder, found = RunFolder(config), folders.newest_first(copy)
    whole = foresee(found, config, "data", folder)
    assert whole is not None and whole.step == 2
    path = copy / "step_00000002" / MANIFEST
    path.write_text(path.read_text().replace('"data"', '"dato"', 1))
    assert foresee(found, config, "data", folder) is None


@pytest.mark.parametrize("text", ["{}", '{"progress"', "", "[]"])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        progress_of(tmp_path, small_config(), "data")


def test_keep(tmp_path: Path) -> None:
    for step in range(1, 8):
        (tmp_path / folders.folder_name(step)).mkdir()
    folders.prune(tmp_path, tmp_path / folders.folder_name(7), keep=2, keep_every=3)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["3", "6", "7"]
    (tmp_path / folders.folder_name(4)).mkdir()  # after a resume from 3: 6 and 7 were damaged
    folders.prune(tmp_path, tmp_path / folders.folder_name(4), keep=1, keep_every=3)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["3", "4", "6", "7"]


def test_what_somebody_keeps_beside_them_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / folders.folder_name(step)).mkdir()
    (tmp_path / "step_00000001.tar").touch()
    (tmp_path / "step_00000002.bak").mkdir()
    (tmp_path / "step_00000000").symlink_to(tmp_path)
    (tmp_path / ".step_00000009.deleted").touch()  # somebody's file in place of a folder
    assert [path.name[-1] for path in folders.newest_first(tmp_path)] == ["3", "2", "1"]
    folders.clear(tmp_path)
    folders.prune(tmp_path, tmp_path / folders.folder_name(3), keep=1, keep_every=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    kept = ["step_00000000", "step_00000001.tar", "step_00000002.bak", "step_00000003"]
    assert names == kept


def test_rubbish_of_a_killed_run_goes(tmp_path: Path) -> None:
    for name in (".step_00000003.partial", ".step_00000001.deleted", "step_00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".latest.new").touch()
    folders.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


class Attack:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.touched),)


def read_one(folder: Path) -> str:
    tensor = torch.zeros(4)
    try:
        read_tensors(folder, {"x": tensor})
    except (Exception, torch.distributed.checkpoint.CheckpointException) as error:
        return str(error)
    return str(tensor.tolist())


def write_one(folder: Path) -> None:
    write_tensors(folder, {"x": torch.arange(4.0)})


def test_no_pickle_is_run(tmp_path: Path) -> None:
    """Not even from files whose checksums somebody has made anew."""
    folder, touched = tmp_path / "one", tmp_path / "touched"
    on_ranks(1, write_one, folder)
    assert on_ranks(1, read_one, folder) == ["[0.0, 1.0, 2.0, 3.0]"]
    attack = pickle.dumps(Attack(touched))
    metadata = json.loads((folder / METADATA).read_text())

    (folder / METADATA).write_bytes(attack)
    assert METADATA in on_ranks(1, read_one, folder)[0]
    (folder / ".metadata").write_bytes(attack)
    torch.save(Attack(touched), folder / "__0_0.distcp")
    size = (folder / "__0_0.distcp").stat().st_size
    metadata["x"]["chunks"][0] |= {"position": 0, "length": size}
    (folder / METADATA).write_text(json.dumps(metadata))
    assert "Weights only load failed" in on_ranks(1, read_one, folder)[0]
    assert not touched.exists()

    metadata["x"]["chunks"][0]["file"] = "../one/__0_0.distcp"
    (folder / METADATA).write_text(json.dumps(metadata))
    assert "outside of the folder" in on_ranks(1, read_one, folder)[0]


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is not a tensor"):
        on_ranks(1, write_a_number, tmp_path / "one")


def write_a_number(folder: Path) -> None:
    write_tensors(folder, {"x": 1})  # type: ignore[dict-item]


def draw(folder: Path) -> list[list[float]]:
    """Random numbers after a checkpoint, going on and after a load."""
    config = small_config()
    one = learner_of(config, Progress())
    one.step()
    torch.manual_seed(torch.distributed.get_rank())
    save(folder, one.parallel, one.optimizer, one.progress, config, "data")
    seen = [torch.rand(3).tolist()]
    other = learner_of(config, Progress())
    load(folder / "step_00000001", other.parallel, other.optimizer, config)
    return [*seen, torch.rand(3).tolist()]


def test_each_rank_has_its_random_numbers_back(tmp_path: Path) -> None:
    first, second = on_ranks(2, draw, tmp_path / "checkpoints")
    assert first[0] == first[1] != second[0] == second[1]
