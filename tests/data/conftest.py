"""Real files of every kind, and data configurations with a cache of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8train.config import DataConfig

DOCUMENTS = [
    f"Document {i}\nsays {i * i} é, and then goes on: {'na ' * (i % 7)}end." for i in range(60)
]


@pytest.fixture
def documents() -> list[str]:
    """Sixty short texts, all different, with a character outside ASCII."""
    return list(DOCUMENTS)


@pytest.fixture
def jsonl(tmp_path: Path, documents: list[str]) -> Path:
    """The documents as jsonl with two columns, `text` and `id`."""
    path = tmp_path / "corpus.jsonl"
    rows = [json.dumps({"id": i, "text": text}) for i, text in enumerate(documents)]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """Make a DataConfig whose cache lies in the test's own folder."""

    def make(**keys: Any) -> DataConfig:
        keys = {key: str(value) if key == "path" else value for key, value in keys.items()}
        return DataConfig(**{"cache_dir": str(tmp_path / "cache"), **keys})

    return make
