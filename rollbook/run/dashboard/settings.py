"""The configuration of a run as the dashboard shows it: each field with its default and its meaning. Secrets are masked."""

from typing import Any

from pydantic import BaseModel

from rollbook.dashboard.run_view import ConfigField, ConfigSection
from rollbook.run.config.field_docs import field_docs
from rollbook.run.config.run import RunConfig, dump_toml


def config_view(config: RunConfig) -> tuple[list[ConfigSection], str]:
    """The sections in the order of the file, and the whole as TOML."""
    sections = []
    for name in RunConfig.model_fields:
        model = getattr(config, name)
        if isinstance(model, BaseModel):
            sections.append(ConfigSection(name=name, fields=_fields(model, name)))
    return sections, dump_toml(config, masks_secrets=True)


def _fields(model: BaseModel, path: str) -> list[ConfigField]:
    meanings = field_docs(type(model))
    values = model.model_dump(mode="json")
    found: list[ConfigField] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            found += _fields(value, f"{path}.{name}")
            continue
        default: Any = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True, validated_data={})
        found.append(
            ConfigField(
                path=f"{path}.{name}",
                value=values[name],
                default=_plain(default),
                is_default=not field.is_required() and value == default,
                meaning=meanings.get(name, ""),
            )
        )
    return found


def _plain(value: Any) -> Any:
    """A default as JSON has it."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if value is None or isinstance(value, str | int | float | bool | list | dict | tuple):
        return value
    return str(value)
