"""What the test files of this folder share: see `tiny.py`."""

import pytest

from tests.train.tiny import Harness


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    """Configurations, batches and steps of the tiny models."""
    return Harness
