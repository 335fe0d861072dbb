"""Every verb explains itself."""

from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from rollbook.cli.main import app


def verbs(group: typer.Typer, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield before
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*before, command.name or command.callback.__name__)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        assert inner.name is not None
        yield from verbs(inner.typer_instance, (*before, str(inner.name)))


@pytest.mark.parametrize("verb", sorted(verbs(app)), ids=" ".join)
def test_help_is_shown(verb: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, [*verb, "--help"])
    assert told.exit_code == 0, told.exception
    assert "Usage" in told.output
