"""What tests of several folders share."""

from __future__ import annotations

import pytest

from hunch import hub
from hunch.errors import ModelError


@pytest.fixture(scope="session")
def default_files() -> hub.ModelFiles:
    """The default model's file: fetched once, then from the user's cache."""
    try:
        return hub.resolve("smollm2-135m", progress=False)
    except ModelError as error:
        pytest.fail(f"the default model is needed for this test: {error}")
