"""Settings of all tests."""

import gc
import os
import sys
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not make a property fail: no time limit for an example, and none for drawing it.
settings.register_profile("rollbook", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollbook")

# Containers often turn the cache of compiled modules off. Then every process of every run compiles the package again, and pytest
# rewrites the assertions of every test module in every session.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The test modules and their libraries are a million objects that live to the end. A collection of garbage that searches them
    takes half a second, and each release of GPU memory begins with one: none while they are imported, and later ones skip them."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session", autouse=True)
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers without a run keep their token in the user's state directory; tests must not write there."""
    pytest.MonkeyPatch().setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
