"""NVIDIA's apex is told from the other package of that name, and used on a GPU alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fp8train.precision.backends import nvidia

FUSED = """
from torch import nn
class FusedRMSNorm(nn.RMSNorm):
    pass
"""


def package(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "apex" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def fresh_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("apex", "apex.normalization"):
        monkeypatch.delitem(nvidia.importlib.sys.modules, name, raising=False)


def test_without_apex() -> None:
    assert nvidia.fused_rms_norm() is None
    assert "apex: not installed; norms are torch's own" in nvidia.notices()


def test_the_pyramid_toolkit_is_not_taken_for_nvidia_s(tmp_path: Path) -> None:
    package(tmp_path, {"__init__.py": ""})
    assert nvidia.fused_rms_norm() is None
    assert "apex: the installed one is not NVIDIA's; norms are torch's own" in nvidia.notices()


def test_fused_norms_share_the_weight_on_a_gpu_alone(tmp_path: Path) -> None:
    package(tmp_path, {"__init__.py": "", "normalization.py": FUSED})
    model = nn.Sequential(nn.RMSNorm(8, 1e-3), nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)))
    weight = model[0].weight
    assert nvidia.fuse_norms(model, torch.device("cpu")) == 0
    assert nvidia.fuse_norms(model, torch.device("cuda", 0)) == 2
    assert type(model[0]).__name__ == "FusedRMSNorm"
    assert model[0].weight is weight and model[0].eps == 1e-3
    assert not any("apex" in line for line in nvidia.notices())
