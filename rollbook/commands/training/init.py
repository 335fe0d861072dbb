"""`rollbook init`: creates a project from a template, a folder of readable files in `rollbook/templates`.

A template trains as it is, with a small model that is built for the run. For a real model two things change in its run file: the
section `[model.build]` becomes `[model]` with a path, and each line with a comment `# real model: VALUE` gets that value, or is
removed if the comment says so.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rollbook.commands.arguments import Argument, Option
from rollbook.commands.output import result, say
from rollbook.contracts.errors import UsageError

TEMPLATES_DIR = Path(__file__).parents[2] / "templates"
RUN_FILE = "run.toml"
PLACEHOLDER = "my_project"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUILD_SECTION = re.compile(r"(?:^#.*\n)*^\[model\.build\]\n(?:(?!\[).*\n|\[(?![a-z]).*\n)*", re.MULTILINE)
_REAL_MODEL = re.compile(r"^(\w+) = .*  # real model: (.+)$", re.MULTILINE)
_REMOVED = re.compile(r"^\w+ = .*  # real model: remove this line\n", re.MULTILINE)


def template_names() -> list[str]:
    return sorted(path.name for path in TEMPLATES_DIR.iterdir() if (path / RUN_FILE).is_file())


def init_project(directory: Path, *, template: str, model: str | None) -> Sequence[Path]:
    """Write the files of a template to a new or empty directory. Returns their paths."""
    names = template_names()
    if template not in names:
        raise UsageError(f"there is no template {template!r}; the templates are {', '.join(names)}")
    name = directory.resolve().name
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run: use letters, digits, dots, underscores and dashes; "
            "the first character must be a letter or a digit"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory} already exists and is not an empty directory: choose another name")
    path = None if model is None else _model_path(model)
    contents = {file.name: _text(file, name=name, model=path) for file in _files(template)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            (directory / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror or error}") from error
    return [directory / file for file in contents]


def with_real_model(run_file: str, model: str) -> str:
    """The run file of a template, changed for an existing model."""
    section = f"[model]\npath = {json.dumps(model)}\n\n"
    return _REAL_MODEL.sub(r"\1 = \2", _REMOVED.sub("", _BUILD_SECTION.sub(lambda _: section, run_file)))


def _files(template: str) -> list[Path]:
    return sorted(path for path in (TEMPLATES_DIR / template).iterdir() if path.is_file())


def _text(file: Path, *, name: str, model: str | None) -> str:
    text = file.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
    return with_real_model(text, model) if model is not None and file.name == RUN_FILE else text


def _model_path(model: str) -> str:
    """An absolute path, because relative ones in a run file are relative to it. A name on the hub stays as it is."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise UsageError(f"--model {model}: this directory has no config.json, so it is not a model")
        return str(directory.resolve())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    raise UsageError(
        f"--model {model}: no such directory; give a Hugging Face model directory, or ORGANISATION/NAME on the hub"
    )


def init_command(
    name: Annotated[Path, Argument(metavar="NAME", help="The new directory. Its last part is the name of the run.")],
    template: Annotated[str, Option("--template", help=f"One of: {', '.join(template_names())}.")] = "single_turn",
    model: Annotated[
        str | None,
        Option(
            "--model",
            help="Train this Hugging Face model directory instead of a small model that is built for the run.",
        ),
    ] = None,
) -> None:
    """Create a project that trains as it is: environment or tasks, reward, run file, test and README.

    single_turn: a question, an answer, a reward. multi_turn: an environment. tools: a model that calls tools. agent_proxy: an agent
    that uses OpenAI's API. atropos: an environment that posts groups to the run.
    """
    for path in init_project(name, template=template, model=model):
        result(str(path))
    say(f"\nNext: cd {name}, then rollbook train run.toml. README.md explains the files.")
