"""A checksum for every file of a checkpoint, so that damage is found before anything is loaded.

`SHA256SUMS` has the form of sha256sum's output: `sha256sum -c SHA256SUMS` in the folder checks a
checkpoint without fp8train. It lists all files but itself, in the order of their names; what it
must say follows from the others, so that a change of any file is a difference, its own too.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUMS = "SHA256SUMS"


UNREADABLE = "unreadable"  # how the reason begins that stands for the digest of such a file


def names(folder: Path) -> list[str]:
    """What a folder holds but for the list itself; nothing where it can't be read."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    except OSError:
        return []


def digests(folder: Path, files: list[str]) -> dict[str, str]:
    """SHA-256 of files in a folder, in hexadecimal, by name; what can't be read has a reason
    there."""
    return {name: _digest(folder / name) for name in files}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{UNREADABLE} ({error.strerror})"


def write(folder: Path, found: dict[str, str]) -> None:
    """Write the list of a folder's digests and have it on disk."""
    with (folder / SUMS).open("w", encoding="utf-8") as file:
        file.write(_text(found))
        file.flush()
        os.fsync(file.fileno())


def damage(folder: Path, found: dict[str, str]) -> str | None:
    """What is wrong with a folder whose files have these digests; None: all is as written."""
    try:
        written = (folder / SUMS).read_bytes()
    except OSError as error:
        return f"{SUMS} can't be read: {error.strerror}"
    if written == _text(found).encode():
        return None
    lines = [line.partition("  ") for line in written.decode(errors="replace").splitlines()]
    listed = {name: digest for digest, _, name in lines if name}
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in listed:
            return f"{name} is not in {SUMS}"
        if listed[name] != found[name]:
            unreadable = found[name].startswith(UNREADABLE)
            return f"{name} {'is ' + found[name] if unreadable else f'does not match {SUMS}'}"
    return f"{SUMS} has changed"


def listed_as_it_is(folder: Path, name: str) -> bool:
    """Whether one file is as the list says."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False
    return f"{_digest(folder / name)}  {name}" in lines


def _text(found: dict[str, str]) -> str:
    return "".join(f"{found[name]}  {name}\n" for name in sorted(found))
