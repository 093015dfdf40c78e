"""prepare(): tokens are made once, whatever asks for them, and found again."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from fp8train.config import ConfigError, DataConfig
from fp8train.data.dataset import PreparedData, prepare
from fp8train.data.packing import held_out

Make = Callable[..., DataConfig]
ROOT = Path(__file__).resolve().parents[2]


def texts(tokens: np.ndarray, eos: int) -> list[str]:
    """The documents of a byte-level token array."""
    parts = np.split(tokens, np.flatnonzero(tokens == eos) + 1)
    return [part[:-1].astype(np.uint8).tobytes().decode() for part in parts if len(part)]


def works(caplog: pytest.LogCaptureFixture) -> int:
    """How many times tokens were made so far."""
    return sum("data: tokenising" in line for line in caplog.messages)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp8train.data")


def test_documents_come_back_and_the_splits_are_disjoint(
    config: Make, jsonl: Path, documents: list[str]
) -> None:
    prepared = prepare(config(path=jsonl, validation_fraction=0.2), 16)
    train = texts(prepared.train, prepared.eos_id)
    validation = texts(prepared.validation, prepared.eos_id)
    assert train == [text for text in documents if not held_out(text, 0.2)]
    assert validation == [text for text in documents if held_out(text, 0.2)]
    assert (prepared.train_documents, prepared.validation_documents) == (
        len(train),
        len(validation),
    )
    assert prepared.train_tokens == len(prepared.train)
    assert prepared.validation_tokens == len(prepared.validation)
    assert prepared.vocab_size == 257
    assert prepared.tokenizer_name == "bytes"
    assert isinstance(prepared.train, np.memmap)
    assert not prepared.train.flags.writeable


def test_one_text_holds_out_its_end(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("abcdefghij" * 100)
    prepared = prepare(config(path=path, validation_fraction=0.1), 16)
    assert texts(prepared.train, 256) == ["abcdefghij" * 90]
    assert texts(prepared.validation, 256) == ["abcdefghij" * 10]


def test_the_second_time_is_from_the_cache(
    config: Make, jsonl: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare(config(path=jsonl), 16)
    again = prepare(config(path=jsonl), 8)
    assert works(caplog) == 1
    assert again.folder == first.folder
    assert again.content_hash == first.content_hash


def test_what_decides_the_tokens_decides_the_folder(
    config: Make, jsonl: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [
        prepare(config(path=jsonl), 8),
        prepare(config(path=jsonl, validation_fraction=0.3), 8),
        prepare(config(path=jsonl, tokenizer="bpe", bpe_vocab_size=280), 8),
        prepare(config(path=jsonl, tokenizer="bpe", bpe_vocab_size=290), 8),
    ]
    with jsonl.open("a") as file:
        file.write(json.dumps({"id": 60, "text": "one more"}) + "\n")
    made.append(prepare(config(path=jsonl), 8))
    assert works(caplog) == 5
    assert len({item.folder for item in made}) == len({item.content_hash for item in made}) == 5


def test_equal_text_has_an_equal_content_hash_wherever_it_lies(
    config: Make, jsonl: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(jsonl.read_bytes())
    one, two = prepare(config(path=jsonl), 8), prepare(config(path=copy), 8)
    assert one.folder != two.folder
    assert one.content_hash == two.content_hash


def test_bpe_is_trained_once_on_the_training_documents(
    config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The held-out documents are full of a word the others lack: no merge may know it.
    rows = []
    for number in range(1000):
        marked = f"plain words {number} " + "zqx " * 20
        plain = f"plain words {number}"
        rows += [marked] if held_out(marked, 0.2) else []
        rows += [plain] if not held_out(plain, 0.2) else []
    path = tmp_path / "marked.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = config(path=path, tokenizer="bpe", bpe_vocab_size=400, validation_fraction=0.2)
    prepared = prepare(data, 16)
    vocabulary = Tokenizer.from_file(str(prepared.folder / "tokenizer.json")).get_vocab()
    assert any("plain" in token for token in vocabulary)
    assert not any("zq" in token or "qx" in token for token in vocabulary)
    assert prepared.vocab_size == max(vocabulary.values()) + 1
    stamp = (prepared.folder / "tokenizer.json").stat().st_mtime_ns
    assert prepare(data, 16).folder == prepared.folder
    assert (prepared.folder / "tokenizer.json").stat().st_mtime_ns == stamp
    assert works(caplog) == 1


def test_the_tail_of_one_text_is_not_in_the_bpe(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("plain words " * 500 + "zqx " * 300)
    data = config(path=path, tokenizer="bpe", bpe_vocab_size=400, validation_fraction=0.2)
    vocabulary = Tokenizer.from_file(str(prepare(data, 16).folder / "tokenizer.json")).get_vocab()
    assert any("plain" in token for token in vocabulary)
    assert not any("zq" in token for token in vocabulary)


@pytest.mark.parametrize("damage", ["truncate", "no meta", "no array", "bad meta"])
def test_a_damaged_cache_is_made_again(
    config: Make, jsonl: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare(config(path=jsonl), 8)
    before = first.train.tolist()
    train, meta = first.folder / "train.npy", first.folder / "meta.json"
    if damage == "truncate":
        train.write_bytes(train.read_bytes()[:-10])
    elif damage == "no meta":
        meta.unlink()
    elif damage == "no array":
        train.unlink()
    else:
        meta.write_text("{}")
    assert prepare(config(path=jsonl), 8).train.tolist() == before
    assert works(caplog) == 2


def test_what_a_killed_run_left_does_not_matter(config: Make, jsonl: Path) -> None:
    first = prepare(config(path=jsonl), 8)
    partial = first.folder.rename(f"{first.folder}.partial")
    assert prepare(config(path=jsonl), 8).content_hash == first.content_hash
    assert not partial.exists()


def test_processes_that_ask_at_once_share_the_work(
    config: Make, jsonl: Path, tmp_path: Path
) -> None:
    data = config(path=jsonl, tokenizer="bpe", bpe_vocab_size=300)
    script = f"""
import logging, sys, time
from pathlib import Path
from fp8train.config import DataConfig
from fp8train.data.dataset import prepare
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
here = Path({str(tmp_path)!r})
(here / f"ready-{{sys.argv[1]}}").touch()
while len(list(here.glob("ready-*"))) < 2:
    time.sleep(0.01)
print("hash", prepare(DataConfig(**{dataclasses.asdict(data)!r}), 8).content_hash)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(number)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    lines = [line for process in processes for line in process.communicate()[0].splitlines()]
    assert all(process.returncode == 0 for process in processes)
    assert sum(line.startswith("data: tokenising") for line in lines) == 1
    hashes = [line for line in lines if line.startswith("hash")]
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    left = {path.suffix for path in Path(data.cache_dir).iterdir()}
    assert left == {"", ".lock"}


def test_the_standard_library_is_quick_and_needs_no_datasets_when_cached(
    config: Make, tmp_path: Path
) -> None:
    prepared = prepare(config(), 128)
    assert prepared.train_tokens > 5_000_000
    assert prepared.validation_tokens > 50_000
    script = f"""
import sys, time
from fp8train.config import DataConfig
from fp8train.data.dataset import prepare
started = time.perf_counter()
prepare(DataConfig(cache_dir={config().cache_dir!r}), 128)
seconds = time.perf_counter() - started
assert "datasets" not in sys.modules and "tokenizers" not in sys.modules
print(seconds)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 1.0


def _message(data: DataConfig, sequence_length: int) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(data, sequence_length)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_text_shorter_than_a_sample_is_refused(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 99)
    data = config(path=path, validation_fraction=0.5)
    for _ in range(2):  # nothing half-made is found the second time
        message = _message(data, 128)
        assert f"data.path={path} gives 51 training tokens" in message
        assert "trainer.sequence_length=128 needs 129" in message
    assert prepare(data, 49).train_tokens == 51
    assert "gives 51 training tokens" in _message(data, 51)  # from the cache now
    data = config(path=path, validation_fraction=0.1)
    message = _message(data, 32)
    assert "gives 11 validation tokens" in message
    assert "raise data.validation_fraction=0.1" in message


def test_a_hash_that_holds_out_nothing_is_refused(config: Make, jsonl: Path) -> None:
    message = _message(config(path=jsonl, validation_fraction=1e-6), 8)
    assert "gives 0 validation tokens" in message
    assert "raise data.validation_fraction=1e-06" in message


def test_a_source_without_text_is_refused(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "nothing.jsonl"
    path.write_text('{"text": ""}\n')
    for name in ("bytes", "bpe"):
        assert f"data.path={path} holds no text" in _message(config(path=path, tokenizer=name), 8)


def test_a_cache_folder_that_cannot_be_used_is_refused(
    config: Make, jsonl: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    message = _message(config(path=jsonl, cache_dir=str(tmp_path / "file" / "cache")), 8)
    assert "data.cache_dir=" in message
    assert "choose a folder" in message


def test_a_failed_preparation_leaves_nothing(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "a"}\nnot json\n')
    data = config(path=path)
    assert "can't be read" in _message(data, 8)
    assert {item.suffix for item in Path(data.cache_dir).iterdir()} == {".lock"}


def test_home_is_expanded(
    config: Make, jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prepared: PreparedData = prepare(config(path="~/corpus.jsonl", cache_dir="~/kept"), 8)
    assert prepared.folder.parent == tmp_path / "kept"
    started = time.monotonic()
    assert prepare(config(path=jsonl, cache_dir="~/kept"), 8).folder == prepared.folder
    assert time.monotonic() - started < 5
