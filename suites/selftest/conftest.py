"""Releases of megatron-core for the suite's own tests, fetched once through the gate's cache."""

from pathlib import Path

import pytest

from fixtures.target import default_cache, resolve

NEWEST = "0.19.2"


@pytest.fixture(scope="session")
def newest_release() -> Path:
    """The root of the newest release that the gate is tested on."""
    return resolve(NEWEST, default_cache()).root
