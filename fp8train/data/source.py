"""Where the documents come from: the standard library, local files, or the hub.

`datasets` is imported when documents are read and not before: what a source is (`identity`) is
known without it, so a run whose tokens are cached never pays for the import.
"""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8train.config import ConfigError, DataConfig
from fp8train.data.hub import first_line, use_cache_if_unreachable

STDLIB = "python-stdlib"
STDLIB_SKIPPED = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst", ".py"),
    "json": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet",),
}
MAX_TEXT_FILE = 2**31 - 1  # bytes; Arrow's limit for one string, and a text file is one document


REPLACED = "\ufffd"  # what bytes that are no UTF-8 become
BROKEN = 0.01  # share of them above which a file is taken for something else


@dataclass(frozen=True)
class Source:
    """A collection of documents that can be read any number of times, always in one order."""

    label: str  # the key and value that chose it, for messages: `data.path=corpus.txt`
    identity: list[Any]  # everything that decides the documents; JSON
    documents: Callable[[], Iterator[str]]  # non-empty texts


def open_source(data: DataConfig) -> Source:
    """Find the source that `data.path`, or else `data.name`, names. Reads no documents yet.

    Raises:
        ConfigError: the path does not exist, is empty, or holds nothing that can be read.
    """
    if data.path is not None:
        return _local(data)
    if data.name == STDLIB:
        return _stdlib()
    return _hub(data)


# --- the standard library -----------------------------------------------------------------------


def _stdlib() -> Source:
    label = f"data.name={STDLIB}"
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, STDLIB_SKIPPED) if path.suffix == ".py"]
    if not files:
        raise ConfigError(
            f"{label}: no source files under {root}; install them or set data.path=FILE_OR_FOLDER"
        )
    digest = hashlib.sha256()
    for path in files:  # 10 to 20 MB: reading them all is cheaper than being wrong
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return Source(
        label=label,
        identity=[STDLIB, platform.python_version(), digest.hexdigest()],
        documents=lambda: _read_files(label, "text", files, "text"),
    )


def _walk(root: Path, skipped: Iterable[str] = ()) -> list[Path]:
    """Files below a folder, sorted by relative path; hidden and skipped names left out."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and name not in skipped
        ]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


# --- local files --------------------------------------------------------------------------------


def _local(data: DataConfig) -> Source:
    label = f"data.path={data.path}"
    if not data.path:  # the working folder is not what an empty path means
        raise ConfigError(f"{label} is empty: give a file or a folder")
    root = Path(os.path.abspath(os.path.expanduser(data.path)))
    kind, files = _files_of_one_kind(label, root)
    stats = {path: path.stat() for path in files}
    files = [path for path in files if stats[path].st_size]
    if not files:
        what = "holds only empty files" if root.is_dir() else "is empty"
        raise ConfigError(f"{label} {what}: give a file with text in it")
    for path in files:
        if kind == "text" and stats[path].st_size > MAX_TEXT_FILE:
            raise ConfigError(
                f"{label}: {path.name} has {stats[path].st_size} bytes, and a text file is one "
                f"document of at most {MAX_TEXT_FILE}: split it, or write jsonl or parquet"
            )
    # Size and time of change, not content: a corpus may be far larger than what one reads at start.
    identity = [[str(path), stats[path].st_size, stats[path].st_mtime_ns] for path in files]
    field = "text" if kind == "text" else data.text_field
    return Source(
        label=label,
        identity=["files", kind, field, identity],
        documents=lambda: _read_files(label, kind, files, field),
    )


def _kind(path: Path) -> str | None:
    """text, json or parquet by the file's name; None: not one of ours."""
    name = path.name.lower()
    for kind, suffixes in SUFFIXES.items():
        plain = name.removesuffix(".gz") if kind != "parquet" else name
        if plain.endswith(suffixes):
            return kind
    return None


def _files_of_one_kind(label: str, root: Path) -> tuple[str, list[Path]]:
    known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    if not os.path.exists(root):
        raise ConfigError(f"{label} does not exist: give a file or a folder (looked at {root})")
    if not root.is_dir():
        kind = _kind(root)
        if kind is None:
            raise ConfigError(
                f"{label}: unknown file extension {root.suffix or '(none)'}; known: {known}"
            )
        return kind, [root]
    files = [(kind, path) for path in _walk(root) if (kind := _kind(path)) and path.is_file()]
    counts = Counter(kind for kind, _ in files)
    if not counts:
        raise ConfigError(f"{label} is a folder without files that can be read; known: {known}")
    if len(counts) > 1:  # a README beside parquet files must not become training text unasked
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise ConfigError(
            f"{label} holds files of several kinds ({found}): "
            "name one file, or a folder with one kind"
        )
    return next(iter(counts)), [path for _, path in files]


def _read_files(label: str, kind: str, files: list[Path], field: str) -> Iterator[str]:
    datasets = _import_datasets()
    options: dict[str, Any] = {}
    if kind == "text":
        options = {"sample_by": "document", "encoding_errors": "replace"}
    with _one_line_errors(label, "check that the files are whole"):
        dataset = datasets.load_dataset(
            kind,
            data_files=[glob.escape(str(path)) for path in files],
            split="train",
            streaming=True,  # the files lie here already; don't write them once more as Arrow
            **options,
        )
        for text in _texts(label, dataset, field):
            if kind == "text" and text.count(REPLACED) > BROKEN * len(text):
                raise ConfigError(
                    f"{label} holds a file that is not UTF-8 text ({text.count(REPLACED):,} of "
                    f"{len(text):,} characters can't be read): convert it, or leave it out"
                )
            yield text


# --- the hub ------------------------------------------------------------------------------------


def _hub(data: DataConfig) -> Source:
    label = f"data.name={data.name}"
    if not data.name or os.path.exists(data.name):
        raise ConfigError(
            f"{label} is not a hub name: set data.path={data.name or 'FILE_OR_FOLDER'} "
            f"for local files, or data.name={STDLIB}"
        )

    def documents() -> Iterator[str]:
        use_cache_if_unreachable()
        datasets = _import_datasets()
        remedy = (
            "check the name, data.subset, data.split and the network, "
            f"or set data.path=FILE_OR_FOLDER or data.name={STDLIB}"
        )
        with _one_line_errors(label, remedy):
            dataset = datasets.load_dataset(data.name, data.subset, split=data.split)
            yield from _texts(label, dataset, data.text_field)

    identity = ["hub", data.name, data.subset, data.split, data.text_field]
    return Source(label=label, identity=identity, documents=documents)


# --- shared -------------------------------------------------------------------------------------


def _import_datasets() -> Any:
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # a local file needs no request
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # we report errors ourselves
    return datasets


@contextmanager
def _one_line_errors(label: str, remedy: str) -> Iterator[None]:
    """Turn whatever a reader raises into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{label} can't be read ({first_line(error)}): {remedy}") from error


def _texts(label: str, dataset: Any, field: str) -> Iterator[str]:
    """The non-empty texts of one column; rows without a value are passed over."""
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if columns and field not in columns:
        raise ConfigError(
            f"{label} has no column data.text_field={field}: choose one of {', '.join(columns)}"
        )
    for row in dataset:
        text = row.get(field)
        if isinstance(text, str):
            if text:
                yield text
        elif text is not None:
            raise ConfigError(
                f"{label}: the column data.text_field={field} holds {type(text).__name__} "
                f"where text is needed: choose one of {', '.join(columns)}"
            )
