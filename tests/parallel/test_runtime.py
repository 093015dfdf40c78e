"""Who a process is, and which device it takes."""

import pytest
import torch

from fp8train.config import ConfigError
from fp8train.parallel.runtime import Ranks, choose_device


def test_ranks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.from_environment() == Ranks(0, 1, 0, 1)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Ranks.from_environment() == Ranks(5, 8, 1, 4)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, 4, 2, 4)
    assert choose_device("cpu", ranks) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto", ranks) == torch.device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 processes on this machine and 2 GPUs"):
        choose_device("auto", ranks)
