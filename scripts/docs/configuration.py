"""Prints docs/configuration.md from the config classes: `python -m scripts.docs.configuration`."""

import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollbook.run.config.field_docs import field_docs
from rollbook.run.config.run import AUTO_SETTINGS, RunConfig

HEAD = """# Configuration

One TOML file describes a run. `rollbook config check run.toml` reports every fault at once and prints what differs from the
defaults (`--full`: every setting). This page is generated from the config classes (`make docs`).

Settings with the default `auto` are chosen at the start of a run, from its machine and its model, if they are left out or set to
"auto". The run prints and records them, so that a resumed run has the same ones. [GPUs](gpu.md) explains how they are chosen.
"""


def reference() -> str:
    """The page, with the sections in the order of the file."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        parts.append("\n".join(_section(name, _model(field))))
    return "\n".join(parts)


def _section(path: str, model: type[BaseModel]) -> Iterator[str]:
    yield f"## `[{path}]`\n"
    if model.__doc__ and not model.__doc__.startswith("!"):
        yield f"{' '.join(model.__doc__.split())}\n"
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    meanings = field_docs(model)
    nested = []
    for name, field in model.model_fields.items():
        inner = _model_or_none(field)
        if inner is not None:
            nested.append((f"{path}.{name}", inner))
            yield f"| `{name}` | table | | see `[{path}.{name}]` |"
        else:
            default = "`auto`" if f"{path}.{name}" in AUTO_SETTINGS else _default(field)
            yield f"| `{name}` | {_type(field)} | {default} | {meanings.get(name, '')} |"
    yield ""
    for inner_path, inner in nested:
        yield from _section(inner_path, inner)


def _model_or_none(field: FieldInfo) -> type[BaseModel] | None:
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _model(field: FieldInfo) -> type[BaseModel]:
    model = _model_or_none(field)
    assert model is not None
    return model


def _type(field: FieldInfo) -> str:
    kind = field.annotation
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    for noise in ("typing.", "<class '", "'>"):
        text = text.replace(noise, "")
    values = getattr(kind, "__members__", None)
    if values:
        text = " or ".join(f'"{member.value}"' for member in values.values())
    bounds = [str(m) for m in field.metadata if any(hasattr(m, side) for side in ("ge", "gt", "le", "lt"))]
    symbols = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}
    limits = ", ".join(f"{symbols[b.split('(')[0]]} {b.split('=')[-1].rstrip(')')}" for b in bounds)
    return f"`{text}`".replace("|", "\\|") + (f" ({limits})" if limits else "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    return f"`{value}`" if not hasattr(value, "value") else f"`{value.value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
