"""Every shell and Python block of README and docs works. `tests/parts/run/doc_blocks.py` explains the markers of exceptions."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollbook.cli.main import COMMANDS, LazyCommand
from rollbook.run.config.run import RunConfig
from tests.parts.run.doc_blocks import Block, blocks_of
from tests.parts.run.small import REPOSITORY

GENERATED = {"chaos.md", "configuration.md", "failures.md", "http-api.md", "python-api.md"}
PAGES = [
    REPOSITORY / "README.md",
    *sorted(page for page in (REPOSITORY / "docs").rglob("*.md") if page.name not in GENERATED),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def execute(page: Path, directory: Path, *options: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.parts.run.doc_blocks", str(page), *options],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def pages_with(*marks: str | None) -> list[Path]:
    return [page for page in PAGES if any(b.mark in marks and b.language != "toml" for b in blocks_of(page))]


@pytest.mark.parametrize("page", pages_with(None), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    execute(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", pages_with("slow"), ids=lambda page: page.stem)
def test_the_slow_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    execute(page, tmp_path, "--slow")


def fault_of_command(words: list[str]) -> str | None:
    """An unknown verb or option in a `rollbook` command line, without running it."""
    if words[0] != "rollbook" or words[1].startswith("-"):
        return None
    if words[1] not in COMMANDS:
        return f"there is no verb {words[1]}"
    command = LazyCommand(words[1], *COMMANDS[words[1]]).load()
    if (inner := getattr(command, "commands", None)) is not None:
        if words[2] not in inner:
            return f"{words[1]} has no verb {words[2]}"
        command = inner[words[2]]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"unknown options {unknown}" if unknown else None


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_shell_blocks_use_verbs_and_options_that_exist(block: Block) -> None:
    faults = [(words, fault) for words in block.commands() if (fault := fault_of_command(words)) is not None]
    assert faults == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_blocks_are_python(block: Block) -> None:
    compile(block.code, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=str)
def test_settings_in_toml_blocks_exist(block: Block) -> None:
    unknown = []
    for section, table in tomllib.loads(block.code).items():
        if section not in RunConfig.model_fields:
            continue  # the section of another file, such as [sft]
        kind = RunConfig.model_fields[section].annotation
        assert kind is not None
        try:
            kind.model_validate(table)
        except ValidationError as error:
            unknown += [(section, *e["loc"]) for e in error.errors() if e["type"] == "extra_forbidden"]
    assert unknown == []
