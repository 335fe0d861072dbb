"""Every verb explains itself, quickly and without optional libraries."""

import errno
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollbook.cli import main as cli_main
from rollbook.cli.main import COMMANDS, LazyCommand, app
from rollbook.commands.training.demo import CONFIG
from rollbook.contracts.plugin import EXTRAS, install_command
from rollbook.run.config.run import load_config

ROOT = Path(__file__).parents[3]
# Modules that a distribution with another name provides, and those that other dependencies of the extra bring.
DISTRIBUTIONS = {"yaml": "pyyaml", "botocore": "awscli", "mcp_types": "mcp"}


def commands() -> Iterator[tuple[str, ...]]:
    yield ()
    for name, (path, summary) in COMMANDS.items():
        yield (name,)
        found = LazyCommand(name, path, summary).load()
        yield from ((name, inner) for inner in getattr(found, "commands", ()))


@pytest.mark.parametrize("verb", sorted(commands()), ids=" ".join)
def test_help_is_shown(verb: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*verb, "--help"])
    assert shown.exit_code == 0, shown.exception
    assert "Usage" in shown.output


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_line_of_a_verb_fits_the_help(verb: str) -> None:
    assert COMMANDS[verb][1] in CliRunner().invoke(app, ["--help"], terminal_width=80).output


def test_an_unknown_verb_is_answered_with_similar_ones() -> None:
    shown = CliRunner().invoke(app, ["trian"])
    assert shown.exit_code == 2
    assert "Did you mean 'train'?" in shown.output


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("train run.toml --max-steps 5", "It is a setting: --set trainer.max_steps=5\n"),
        ("demo --lr=1e-3", "It is a setting: --set trainer.lr=1e-3\n"),
        ("config check run.toml --rollout.max-turns 3", "--set rollout.max_turns=3\n"),
        ("train run.toml --learning_rate --json", "--set trainer.lr=VALUE\n"),
        ("host run.toml --batch-size 8", "--set gate.groups_per_step=VALUE. It counts the groups"),
        ("sft sft.toml --epochs 2", "It is a setting: --set sft.epochs=2\n"),
        ("replay run --seed 2", "It is a setting: --set trainer.seed=2\n"),
        ("train run.toml --output-dir runs/a", "The directory of a run is the option --run-dir"),
        ("train run.toml --jso", "Possible options: --json"),
        ("train run.toml --nonsense", "No such option: --nonsense\n"),
        ("audit run --max-steps 5", "No such option: --max-steps\n"),
    ],
)
def test_an_unknown_option_that_is_a_setting_is_answered_with_how_to_set_it(arguments: str, advice: str) -> None:
    shown = CliRunner().invoke(app, arguments.split())
    assert shown.exit_code == 2
    assert "No such option: " in shown.output
    assert advice in shown.output


def run_without(libraries: set[str], arguments: list[list[str]]) -> list[dict[str, Any]]:
    """Each command line in one process where these libraries cannot be imported: exit code, output, loaded modules."""
    code = f"""
import contextlib, io, json, sys

sys.modules.update(dict.fromkeys({sorted(libraries)!r}))  # as if they were not installed
from rollbook.cli.main import main

for arguments in {arguments!r}:
    sys.argv = ["rollbook", *arguments]
    output, status = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main()
        except SystemExit as exit:
            status = exit.code
    print(json.dumps({{"verb": arguments, "status": status or 0, "output": output.getvalue(), "loaded": list(sys.modules)}}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr

    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_verb_shows_its_help_without_optional_libraries() -> None:
    results = run_without(set(EXTRAS), [[*verb, "--help"] for verb in sorted(commands())])
    assert [result for result in results if result["status"] != 0 or "Usage" not in result["output"]] == []


def test_the_list_of_verbs_imports_no_verb_and_no_large_library() -> None:
    [result] = run_without(set(EXTRAS), [["--help"]])
    large = {"rich", "pydantic", "numpy", "aiohttp", "msgspec"}
    assert large & set(result["loaded"]) == set()
    assert {name for name in result["loaded"] if name.startswith("rollbook.")} <= {
        "rollbook.cli",
        "rollbook.cli.main",
        "rollbook.cli.translation",
        "rollbook.commands",
        "rollbook.commands.arguments",
        "rollbook.contracts",
        "rollbook.contracts.errors",
        "rollbook.contracts.plugin",
        "rollbook.contracts.user_errors",
    }


def test_the_public_functions_do_not_import_the_command_line_library() -> None:
    code = (
        "import sys; from rollbook import audit, evaluate, replay, train; "
        "print(*sorted({'typer', 'click', 'rollbook.cli'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.split() == []


def test_every_command_can_be_imported_without_the_command_line_library() -> None:
    modules = sorted({f"rollbook.commands.{path.partition(':')[0]}" for path, _ in COMMANDS.values()})
    code = f"import sys; sys.modules['typer'] = None; import {', '.join(modules)}"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_a_verb_whose_library_is_missing_says_how_to_install_it(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    results = run_without(
        set(EXTRAS),
        [
            ["demo", "--run-dir", str(tmp_path / "run")],
            ["tokens", "check", "--model", str(tmp_path)],
            ["proxy", "--policy", "http://127.0.0.1:9", "--model", str(tmp_path)],
            ["policy", "serve", "--port", "0", "--model", str(tmp_path)],
            ["env", "serve", "--port", "0", "--env", "aws"],
            ["ledger", "serve", "--port", "0", "--store", "postgresql://nobody@127.0.0.1:9/none"],
        ],
    )
    extras = {
        "demo": "train",
        "tokens": "rollout",
        "proxy": "rollout",
        "policy": "train",
        "env": "aws",
        "ledger": "postgres",
    }
    silent = [result for result in results if install_command(extras[result["verb"][0]]) not in result["output"]]
    assert silent == []
    assert {result["status"] for result in results} == {1}


def test_each_optional_library_belongs_to_the_extra_that_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        extra: {re.split(r"[\[>=<;]", requirement)[0].replace("-", "_").lower() for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    wrong = {
        library: extra
        for library, extra in EXTRAS.items()
        if DISTRIBUTIONS.get(library, library) not in declared[extra]
    }
    assert wrong == {}


def test_a_fault_of_the_machine_is_a_message_and_another_error_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_with(error: OSError) -> None:
        def fail() -> None:
            raise error

        monkeypatch.setattr(cli_main, "app", fail)

    fail_with(OSError(errno.ENOSPC, "No space left on device", "/data/run"))
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: the disk is full: free some space")
    fail_with(OSError(errno.ENOENT, "No such file or directory"))
    with pytest.raises(FileNotFoundError):
        cli_main.main()


def test_the_configuration_of_the_demo_is_part_of_the_package() -> None:
    assert load_config(CONFIG).config.run.name == "number_guessing"
