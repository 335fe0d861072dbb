"""Prints docs/python-api.md from the docstrings of the public names: `python -m scripts.docs.python_api`."""

import dataclasses
import enum
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import BaseModel

import rollbook
from rollbook.run.config.field_docs import field_docs

HEAD = """# Python API

```python
from rollbook import Observation, RewardCase, train
```

These are all public names. Modules below `rollbook` may move. A name is imported when it is first used, so `import rollbook` loads
no other library. The package is typed. This page is generated from the docstrings (`make docs`).

The README has a complete script. `train` takes functions and classes as objects. They reach the processes of the run in these ways:

| object | how it is passed |
|---|---|
| of a module that the processes can import | by name, as `module:attribute` |
| of the script, of a notebook cell, inside another function; a lambda | by value: pickled into `objects/` of the run directory |
| tasks: rows, or a function that the processes cannot import | as rows, in `objects/` |

An object that is passed by value may use numbers, strings, functions and classes, but no connections, locks or open files. If a
part cannot be pickled, the error names it. The object is copied when `train` is called: later changes of a global variable do not
reach the run, and changes made by the run do not come back. Modules that the object imports are found in the installed packages and
in the directories from which the script itself imports.
"""
MAX_LINE = 110
GROUPS: dict[str, tuple[str, ...]] = {
    "Runs": ("train", "TrainReport", "evaluate", "EvaluationReport", "replay", "audit", "RunConfig"),
    "Errors": ("RollbookError", "ConfigError", "RunFailedError", "EpisodeError"),
    "What you write": (
        "Environment",
        "Observation",
        "RewardCase",
        "pass_at",
        "RolloutSetup",
        "RolloutFn",
        "TO_BE_SCORED",
        "parse_tool_calls",
        "ParsedText",
        "ToolCall",
        "ModelTokenizer",
    ),
    "Trajectories": (
        "TrajectoryAssembler",
        "MessageTrajectoryAssembler",
        "SamplingParams",
        "Completion",
        "TokenRow",
        "RolloutSample",
        "PromptGroup",
        "EndReason",
        "FinishReason",
    ),
    "Losses and sinks": ("LossInputs", "LossSettings", "LossTerms", "Sink"),
    "The ledger": (
        "open_ledger_client",
        "LedgerClient",
        "open_sync_ledger_client",
        "SyncLedgerClient",
        "RunSettings",
        "FreshnessRule",
        "encode_group",
    ),
    "Tasks": ("Task", "CursorDataLoader", "Curriculum"),
    "The asynchronous recipe": (
        "run_async_rl_loop",
        "RowRequest",
        "GroupAssembler",
        "RowResolution",
        "Rollout",
        "rollout_to_prompt_group",
    ),
    "Rollouts": (
        "StalenessController",
        "RolloutService",
        "RolloutRequest",
        "FunctionService",
        "serve_rollouts",
    ),
    "Another trainer": ("open_host", "AsyncRolloutWorker"),
    "Weights": ("WeightTransferClient", "SyncWeightTransferClient"),
    "Environments": (
        "EnvConfig",
        "EnvironmentSource",
        "serve_environments",
        "create_app",
        "EnvSession",
        "GrpoPool",
        "MultiTurnEnvPool",
        "MiniStackPool",
    ),
    "Untrusted code": ("run_code", "open_sandbox", "Sandbox", "SandboxImage", "SandboxLimits"),
}


def reference() -> str:
    """The page. Every public name is in one group."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *("\n".join(_entry(name, getattr(rollbook, name))) for name in names)]
    return "\n".join(parts)


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if not isinstance(value, type) and not inspect.isfunction(value):
        yield f"```python\n{name} = {json.dumps(value) if isinstance(value, str) else _short(str(value))}\n```\n"
        return
    if isinstance(value, type) and issubclass(value, BaseModel):
        yield f"{_text(value) or 'The sections of a run file.'} Fields: [configuration](configuration.md).\n"
        return
    is_called = not isinstance(value, type) or not issubclass(value, enum.Enum | Exception)
    if is_called and not getattr(value, "_is_protocol", False):
        yield f"```python\n{_signature(name, value)}\n```\n"
    if (text := _text(value)) is not None:
        yield f"{text}\n"
    if isinstance(value, type):
        yield from _members(value)


def _members(kind: type) -> Iterator[str]:
    rows = []
    if issubclass(kind, enum.Enum):
        rows += [(member.name, str(member.value)) for member in kind]
    documented = field_docs(kind)
    fields: list[str] = []
    if dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
    elif issubclass(kind, msgspec.Struct):
        fields = list(kind.__struct_fields__)
    rows += [(name, documented[name]) for name in fields if name in documented]
    for name, member in inspect.getmembers_static(kind):
        if name.startswith("_") or not _is_ours(kind, name):
            continue
        if isinstance(member, property):
            rows.append((name, _first_paragraph(member)))
        elif isinstance(member, staticmethod | classmethod) or inspect.isfunction(member):
            function = member if inspect.isfunction(member) else member.__func__
            prefix = "await " if inspect.iscoroutinefunction(function) else ""
            rows.append((prefix + _signature(name, function), _first_paragraph(function)))
    if rows:
        yield "| member | meaning |\n|---|---|"
        yield from (f"| `{_cell(name)}` | {_cell(meaning)} |" for name, meaning in rows)
        yield ""


def _is_ours(kind: type, name: str) -> bool:
    """Whether a class of this package defines the member. Members of `Exception` and `str` are not listed."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner.__module__.startswith("rollbook.")


def _signature(name: str, value: Any) -> str:
    found = inspect.signature(value)
    parameters = [parameter for key, parameter in found.parameters.items() if key != "self"]
    text = _short(f"{name}{found.replace(parameters=parameters)}".replace(" -> None", ""))
    if len(text) <= MAX_LINE:
        return text
    lines = [_short(str(part)) for part in parameters]
    by_name = [number for number, part in enumerate(parameters) if part.kind is part.KEYWORD_ONLY]
    if by_name:
        lines.insert(by_name[0], "*")
    result = text.rpartition(") -> ")[2] if ") -> " in text else None
    return "\n".join([f"{name}(", *(f"    {line}," for line in lines), ")" if result is None else f") -> {result}"])


def _short(text: str) -> str:
    """Without module paths: `Path` for `pathlib.Path`."""
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = re.sub(r"<factory>|<function [^>]+>|<[\w.]+ object at [^>]+>", "...", text).replace("~", "")
    text = re.sub(r"<(\w+\.\w+): [^>]+>", r"\1", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z]\w*)", "", text)


def _text(value: Any) -> str | None:
    # A dataclass without a docstring gets its signature as one.
    text = inspect.cleandoc(value.__doc__) if value.__doc__ else None
    return None if text is None or text.startswith(f"{value.__name__}(") else text


def _first_paragraph(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
