"""The folders of a run's checkpoints: which are whole, and how one comes and goes.

A checkpoint is written under a hidden name and renamed when all of it is on disk, and it is renamed
again before it is deleted. So what is called step_00000100 was whole once, whenever the run was
killed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

LATEST = "latest"  # a file with the newest one's name, for people and their scripts


def folder_name(step: int) -> str:
    """Of a step's checkpoint."""
    return f"step_{step:08d}"


def newest_first(checkpoints: Path) -> list[Path]:
    """All checkpoints, damaged ones too."""
    return sorted(checkpoints.glob("step_*"), key=lambda path: path.name, reverse=True)


def partial(checkpoints: Path, step: int) -> Path:
    """Where a step's checkpoint is written."""
    return checkpoints / f".{folder_name(step)}.partial"


def clear(checkpoints: Path) -> None:
    """Delete what a killed run has left of saves and deletions."""
    for left in checkpoints.glob(f".{LATEST}.*"):
        left.unlink()
    for left in checkpoints.glob(".step_*"):
        shutil.rmtree(left)


def publish(written: Path, step: int) -> Path:
    """Give a whole checkpoint its name, then point `latest` to it. Returns its folder."""
    target = written.parent / folder_name(step)
    _delete(target)
    written.rename(target)
    sync(target.parent)
    pointer = target.parent / f".{LATEST}.new"
    pointer.write_text(target.name + "\n", encoding="utf-8")
    pointer.replace(target.parent / LATEST)
    sync(target.parent)
    return target


def prune(checkpoints: Path, newest: Path, keep: int, keep_every: int) -> None:
    """Delete all but the newest `keep` and those whose step `keep_every` divides, 0 for none.

    Args:
        newest: the one just written. What has a later step is damaged, since the run has come from
            an earlier one: it counts for nothing, and is replaced when its step comes again.
    """
    known = [path for path in newest_first(checkpoints) if path.name <= newest.name]
    for old in known[keep:]:
        step = old.name.removeprefix("step_")
        if not (keep_every and step.isdecimal() and int(step) % keep_every == 0):
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
