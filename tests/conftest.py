"""Settings of all tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers without a run keep their token in the user's state directory; tests must not write there."""
    pytest.MonkeyPatch().setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
