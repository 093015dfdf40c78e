"""Documents from the standard library and from files, and what is said when there are none."""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8train.config import ConfigError, DataConfig
from fp8train.data.source import open_source

Make = Callable[..., DataConfig]


def read(data: DataConfig) -> list[str]:
    return list(open_source(data).documents())


def refused(data: DataConfig) -> str:
    """The one line with which reading the source is refused."""
    with pytest.raises(ConfigError) as caught:
        read(data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_standard_library_is_read_in_order_without_its_tests(config: Make) -> None:
    texts = read(config())
    root = Path(sysconfig.get_paths()["stdlib"])
    assert sum(map(len, texts)) > 5_000_000
    assert (root / "argparse.py").read_text() in texts
    order = [texts.index((root / name).read_text()) for name in ("abc.py", "ast.py", "zipapp.py")]
    assert order == sorted(order)
    for path in list(root.glob("test/test_a*.py")) + list(root.glob("site-packages/*.py")):
        assert path.read_text(errors="replace") not in texts


def test_a_text_file_is_one_document(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("first line\n\nthird line\n")
    assert read(config(path=path)) == ["first line\n\nthird line\n"]


def test_a_folder_is_read_in_sorted_order_without_hidden_and_empty_files(
    config: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "odd [names]*?"
    for name in ("b.txt", "a/z.md", "c[1].txt", ".hidden/x.txt", ".x.txt", "picture.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty.txt").touch()
    (folder / "dangling.txt").symlink_to(folder / "gone.txt")
    assert read(config(path=folder)) == ["a/z.md", "b.txt", "c[1].txt"]


def test_a_stray_byte_is_replaced_and_a_binary_file_refused(config: Make, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"cafe, " * 100 + "caf\xe9".encode("latin-1"))
    (text,) = read(config(path=str(tmp_path / "latin.txt")))
    assert text.endswith("caf\ufffd")
    (tmp_path / "bin.txt").write_bytes(bytes(range(128, 256)) * 100)
    assert "is not UTF-8 text" in refused(config(path=str(tmp_path / "bin.txt")))


def test_jsonl_json_and_gzip(
    config: Make, tmp_path: Path, jsonl: Path, documents: list[str]
) -> None:
    assert read(config(path=jsonl)) == documents
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    assert read(config(path=packed)) == documents
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"body": text} for text in documents]))
    assert read(config(path=array, text_field="body")) == documents


def test_rows_without_text_are_passed_over(config: Make, tmp_path: Path) -> None:
    path = tmp_path / "holes.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n{"text": ""}\n{"text": "b"}\n')
    assert read(config(path=path)) == ["a", "b"]


def test_parquet_files_of_a_folder(config: Make, tmp_path: Path, documents: list[str]) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    for part, texts in enumerate((documents[:30], documents[30:])):
        table = pa.table({"content": texts, "id": list(range(len(texts)))})
        pq.write_table(table, folder / f"part-{part}.parquet")
    assert read(config(path=folder, text_field="content")) == documents


def test_identity_changes_with_the_file(config: Make, jsonl: Path) -> None:
    first = open_source(config(path=jsonl)).identity
    assert open_source(config(path=jsonl)).identity == first
    stat = jsonl.stat()
    os.utime(jsonl, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    changed = open_source(config(path=jsonl)).identity
    assert changed != first
    assert open_source(config(path=jsonl, text_field="id")).identity != changed


def test_a_path_goes_before_a_name(config: Make, jsonl: Path) -> None:
    assert open_source(config(path=jsonl, name="org/name")).label == f"data.path={jsonl}"


def test_missing_and_empty_paths_are_refused(config: Make, tmp_path: Path) -> None:
    gone = tmp_path / "gone.txt"
    assert f"data.path={gone} does not exist" in refused(config(path=gone))
    assert "data.path= is empty: give a file" in refused(config(path=""))
    (tmp_path / "empty.txt").touch()
    assert "empty.txt is empty: give" in refused(config(path=tmp_path / "empty.txt"))
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "without files that can be read; known: .txt" in refused(config(path=folder))
    (folder / "empty.txt").touch()
    assert "holds only empty files" in refused(config(path=folder))


def test_unknown_and_mixed_kinds_are_refused(config: Make, tmp_path: Path, jsonl: Path) -> None:
    (tmp_path / "table.xlsx").write_text("x")
    message = refused(config(path=tmp_path / "table.xlsx"))
    assert "unknown file extension .xlsx; known: .txt" in message
    (tmp_path / "README.md").write_text("about the corpus")
    message = refused(config(path=tmp_path))
    assert "several kinds (1 json, 1 text): name one file" in message


def test_a_missing_column_names_those_there_are(config: Make, jsonl: Path) -> None:
    message = refused(config(path=jsonl, text_field="body"))
    assert message == (
        f"data.path={jsonl} has no column data.text_field=body: choose one of id, text"
    )
    assert "data.text_field=id holds int where text is needed" in refused(
        config(path=jsonl, text_field="id")
    )


def test_broken_files_are_one_line(
    config: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken.jsonl", "broken.parquet", "broken.txt.gz"):
        path = tmp_path / name
        path.write_text('{"text": "a"}\nnot json\n')
        assert f"data.path={path} can't be read" in refused(config(path=path))
    assert capfd.readouterr().err == ""


def test_a_local_path_as_a_name_is_refused(config: Make, tmp_path: Path) -> None:
    message = refused(config(name=str(tmp_path)))
    assert f"set data.path={tmp_path} for local files" in message
