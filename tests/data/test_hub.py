"""A hub that does not answer costs seconds, not minutes, and one line."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fp8train.data import hub

ROOT = Path(__file__).resolve().parents[2]


def test_reachable_is_whatever_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub._reachable()
        server.shutdown()


def test_a_silent_host_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never says a word
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        assert not hub._reachable()
        assert time.monotonic() - started < 3


def test_names_that_cannot_be_fetched_are_one_line_and_quick(tmp_path: Path) -> None:
    # A process of its own: the hub's client reads its environment once, when it is imported.
    script = f"""
import time
from fp8train.config import ConfigError, DataConfig
from fp8train.data.dataset import prepare
for keys in ({{"tokenizer": "org/model"}}, {{"name": "org/corpus", "subset": "small"}}):
    started = time.monotonic()
    try:
        prepare(DataConfig(cache_dir={str(tmp_path)!r}, **keys), 128)
    except ConfigError as error:
        print(error)
    assert time.monotonic() - started < 15
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",  # nobody listens there any more
        "HF_HOME": str(tmp_path / "hub"),
        "PYTHONPATH": str(ROOT),
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    tokenizer, corpus = done.stdout.splitlines()
    assert "data.tokenizer=org/model can't be loaded: no such path here" in tokenizer
    assert "use bytes, bpe, or the path of a tokenizer.json" in tokenizer
    assert "data.name=org/corpus can't be read" in corpus
    assert "or set data.path=FILE_OR_FOLDER" in corpus
