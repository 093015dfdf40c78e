"""The Hugging Face hub, asked only when a name points there."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request

PROBE_SECONDS = 5.0


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message, for a one-line report."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def use_cache_if_unreachable() -> None:
    """Switch the hub's client to its local cache when the hub does not answer.

    Without this a name that isn't cached costs half a minute of retries, and minutes where
    packets are dropped. The client reads the variable when it is first imported, so call this
    before importing `datasets` or `huggingface_hub`.
    """
    if "HF_HUB_OFFLINE" not in os.environ and not _reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"


def _reachable() -> bool:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(endpoint, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
        except urllib.error.HTTPError:  # an answer, if an unfriendly one
            pass
        except Exception:  # whatever it is, this is no hub
            return
        answered.set()

    # A thread, because no timeout bounds the look-up of the host's name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answered.is_set()
