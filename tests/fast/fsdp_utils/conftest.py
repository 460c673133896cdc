"""One world of two gloo ranks, and one of a single rank, for all tests here; tiny models written once."""

import pytest

from tests.helpers.gloo_world import World
from tests.helpers.tiny_models import FAMILIES, make_tiny_model


@pytest.fixture(scope="session")
def world():
    with World(2) as running:
        yield running


@pytest.fixture(scope="session")
def solo():
    with World(1) as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Model directories by family, as strings."""
    root = tmp_path_factory.mktemp("models")
    return {family: str(make_tiny_model(root / family, family)) for family in FAMILIES}
