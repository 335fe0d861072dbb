"""Reads the Dockerfiles that a sandbox can build: one `FROM`, then `RUN`, `COPY`, `WORKDIR`, `ENV` and `ARG`. Pure.

What needs a network, another user or a second image is refused with the line, because the image would differ from the author's.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rollbook.contracts.errors import RunError
from rollbook.sandbox.sandbox import SYSTEM_PATH

IGNORED = frozenset({"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "MAINTAINER"})
"""They describe the process or the metadata of a container; a sandbox starts no process of the image."""
NETWORK = re.compile(
    r"(?:^|[\s;&|(])(?:sudo\s+)?((?:/[\w./-]*bin/)?(?:apt-get|apt|apk|yum|dnf|microdnf|pacman|curl|wget|conda|mamba|brew"
    r"|pip3? (?:install|download)|python3? -m pip|uv (?:pip|tool|add|sync|venv)|uvx|npm|npx|yarn|pnpm|bun"
    r"|git (?:clone|fetch|pull|submodule)|cargo (?:install|fetch)|go (?:get|install|mod download)|gem install|opam"
    r"|add-apt-repository|ssh|scp|rsync|ftp|nc))(?=$|[\s;&|)])"
)
HERE_DOCUMENT = re.compile(r"(?:^|\s)\d*<<-?[\"']?[A-Za-z_]")
VARIABLE = re.compile(r"\\\$|\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")


class DockerfileError(RunError):
    """A Dockerfile that a sandbox cannot build."""


@dataclass(frozen=True, slots=True)
class Run:
    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class Copy:
    sources: tuple[str, ...]
    """Relative to the directory of the Dockerfile."""
    target: str
    """Absolute. Ends with `/` if it is a directory."""
    line: int


@dataclass(slots=True)
class ImageRecipe:
    """What a Dockerfile describes."""

    base: str = ""
    steps: list[Run | Copy] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"


def read_dockerfile(text: str, *, name: str = "Dockerfile") -> ImageRecipe:
    """Raises `DockerfileError` with the line of what cannot be built."""
    recipe = ImageRecipe()
    arguments: dict[str, str] = {}
    for line, word, rest in _instructions(text.removeprefix("\ufeff")):
        where = f"{name}, line {line}: {word} {rest}".strip()
        try:
            if not rest and word not in IGNORED:
                raise DockerfileError(f"{where}: its arguments are missing")
            if word == "FROM":
                _read_from(recipe, rest, arguments, where)
            elif word == "ARG":
                key, _, value = rest.partition("=")
                arguments.setdefault(key.strip(), _expand(_unquoted(value), {**arguments, **recipe.env}))
            elif not recipe.base:
                raise DockerfileError(f"{where}: the first instruction must be FROM")
            elif word not in IGNORED:
                _read_step(recipe, (line, word, rest), {"PATH": SYSTEM_PATH, **arguments, **recipe.env}, where)
        except ValueError as error:  # of a quote, for example
            raise DockerfileError(f"{where}: {error}") from error
    if not recipe.base:
        raise DockerfileError(f"{name} has no FROM")
    return recipe


def _read_from(recipe: ImageRecipe, rest: str, arguments: Mapping[str, str], where: str) -> None:
    words = [word for word in rest.split() if not word.startswith("--platform=")]
    if recipe.base:
        raise DockerfileError(f"{where}: a sandbox builds one stage; images of several stages need a container engine")
    if not words:
        raise DockerfileError(f"{where}: the image is missing")
    recipe.base = _expand(words[0], arguments)


def _read_step(
    recipe: ImageRecipe, instruction: tuple[int, str, str], variables: Mapping[str, str], where: str
) -> None:
    line, word, rest = instruction
    match word:
        case "RUN":
            if rest.startswith("--") or HERE_DOCUMENT.search(rest):
                raise DockerfileError(
                    f"{where}: options and here-documents of RUN are not supported; write plain commands"
                )
            found = NETWORK.search(rest)
            if found is not None:
                raise DockerfileError(
                    f"{where}: {found[1]!r} needs a network, and a sandbox is built without one. Install it in the base image "
                    "(a local root, see docs/your-tasks.md) and remove the line, or build the image with a container engine"
                )
            command = _json_list(rest) or ("/bin/sh", "-c", rest)
            declared = {key: value for key, value in variables.items() if key != "PATH" or key in recipe.env}
            recipe.steps.append(Run(command, recipe.workdir, declared, line))
        case "COPY" | "ADD":
            words = _json_list(rest) or tuple(shlex.split(rest))
            options = [one for one in words if one.startswith("--")]
            paths = [_expand(one, variables) for one in words if not one.startswith("--")]
            if options or HERE_DOCUMENT.search(rest) or len(paths) < 2 or any("://" in path for path in paths):
                raise DockerfileError(
                    f"{where}: only files of the directory of the Dockerfile can be copied, without options or here-documents"
                )
            target = posixpath.join(recipe.workdir, paths[-1])
            if len(paths) > 2 or paths[-1] in (".", "..") or paths[-1].endswith("/."):
                target = target.rstrip("/") + "/"
            # A path that begins with / is one in the directory, too.
            sources = tuple(path.lstrip("/") or "." for path in paths[:-1])
            recipe.steps.append(Copy(sources, posixpath.normpath(target) + "/" * target.endswith("/"), line))
        case "WORKDIR":
            recipe.workdir = posixpath.normpath(posixpath.join(recipe.workdir, _expand(_unquoted(rest), variables)))
            recipe.steps.append(Run(("mkdir", "-p", recipe.workdir), "/", {}, line))
        case "ENV":
            recipe.env.update(_assignments(rest, variables, where))
        case "USER" if rest.split(":")[0] in ("root", "0"):
            pass
        case "USER":
            raise DockerfileError(
                f"{where}: a sandbox has no user but root, who has no privileges in it; remove the line"
            )
        case _:
            raise DockerfileError(
                f"{where}: {word} is not supported; a sandbox builds FROM, RUN, COPY, WORKDIR, ENV and ARG"
            )


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """The number of the first line, the instruction and the rest of each, with continued lines joined."""
    collected, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        # Docker skips empty lines within an instruction, too.
        if line.lstrip().startswith("#") or not line.strip():
            continue
        if not collected:
            first = number
        if line.rstrip().endswith("\\"):
            collected += line.rstrip()[:-1] + " "
            continue
        yield _instruction(first, collected + line)
        collected = ""
    if collected.strip():
        yield _instruction(first, collected)


def _instruction(number: int, text: str) -> tuple[int, str, str]:
    word, *rest = text.split(maxsplit=1)
    return number, word.upper(), rest[0].strip() if rest else ""


def _assignments(rest: str, variables: Mapping[str, str], where: str) -> dict[str, str]:
    if "=" not in rest.split(maxsplit=1)[0]:  # the old form: ENV NAME value
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), variables)}
    pairs = [word.partition("=") for word in shlex.split(rest)]
    if not all(name and equals for name, equals, _ in pairs):
        raise DockerfileError(f"{where}: each variable must be NAME=value")
    return {name: _expand(value, variables) for name, _, value in pairs}


def _json_list(rest: str) -> tuple[str, ...]:
    """The words of the JSON form, or none."""
    if not rest.startswith("["):
        return ()
    try:
        words = json.loads(rest)
    except ValueError:
        return ()
    return tuple(map(str, words)) if isinstance(words, list) else ()


def _unquoted(value: str) -> str:
    words = shlex.split(value)
    return words[0] if len(words) == 1 else value


def _expand(value: str, variables: Mapping[str, str]) -> str:
    def replacement(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return "$" if name is None else variables.get(name) or found[2] or ""

    return VARIABLE.sub(replacement, value)
