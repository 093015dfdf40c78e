"""What every test shares."""

from pathlib import Path

import pytest
from hypothesis import settings

REPO = Path(__file__).resolve().parent.parent

settings.register_profile("untimed", deadline=None)  # time is never an assertion
settings.load_profile("untimed")


@pytest.fixture
def repo() -> Path:
    """Root of the checkout."""
    return REPO
