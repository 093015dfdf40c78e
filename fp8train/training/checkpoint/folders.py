"""The folders of a run's checkpoints: which are whole, and how one comes and goes.

A checkpoint is written under a hidden name and renamed when all of it is on disk, and it is renamed
again before it is deleted. So what is called step_00000100 was whole once, whenever the run was
killed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LATEST = "latest"  # a file with the newest one's name, for people and their scripts


def folder_name(step: int) -> str:
    """Of a step's checkpoint."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """The step in a folder's name; None where it has not the name of a checkpoint."""
    found = re.fullmatch(r"step_(\d{8,})", checkpoint.name)
    return int(found[1]) if found else None


def newest_first(checkpoints: Path) -> list[Path]:
    """All checkpoints, damaged ones too; what else somebody keeps beside them is not ours."""
    found = [
        (step, path)
        for path in checkpoints.glob("step_*")
        if (step := step_of(path)) is not None and path.is_dir() and not path.is_symlink()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def partial(checkpoints: Path, step: int) -> Path:
    """Where a step's checkpoint is written."""
    return checkpoints / f".{folder_name(step)}.partial"


def clear(checkpoints: Path) -> None:
    """Delete what a killed run has left of saves and deletions, as far as can be."""
    for left in checkpoints.iterdir():
        if re.fullmatch(rf"\.(step_\d+\.(partial|deleted)|{LATEST}\.new)", left.name):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def publish(written: Path, step: int) -> None:
    """Give a whole checkpoint its name."""
    target = written.parent / folder_name(step)
    _delete(target)
    written.rename(target)
    sync(target.parent)


def point_to(target: Path) -> None:
    """Have `latest` name a checkpoint."""
    pointer = target.parent / f".{LATEST}.new"
    pointer.write_text(target.name + "\n", encoding="utf-8")
    pointer.replace(target.parent / LATEST)
    sync(target.parent)


def prune(checkpoints: Path, newest: Path, keep: int, keep_every: int) -> None:
    """Delete all but the newest `keep` and those whose step `keep_every` divides, 0 for none.

    Args:
        newest: the one just written. What has a later step is damaged, since the run has come from
            an earlier one: it counts for nothing, and is replaced when its step comes again.
    """
    last = step_of(newest) or 0
    known = [path for path in newest_first(checkpoints) if (step_of(path) or 0) <= last]
    for old in known[keep:]:
        if not keep_every or (step_of(old) or 0) % keep_every:
            _delete(old)


def _delete(checkpoint: Path) -> None:
    """Delete it, so that it is never seen in part."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
    if checkpoint.exists():
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def sync(folder: Path) -> None:
    """Have the folder's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
