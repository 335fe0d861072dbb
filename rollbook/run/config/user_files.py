"""The files and the code of the user that a config names. Nothing is imported: a check must not execute user code or load torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollbook.contracts.plugin import NO_SHORT_NAMES, plugin_fault
from rollbook.envs.config import ENVIRONMENTS, EnvConfig
from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.settings import REWARDS, ROLLOUTS
from rollbook.run.config.checks import Faults
from rollbook.run.config.evaluation import EvaluationConfig
from rollbook.run.config.resolved_settings import Parts
from rollbook.tasks.config import HARBOR_PREFIX, TasksConfig, is_file, is_harbor, is_hub
from rollbook.telemetry.config import TelemetryConfig
from rollbook.trainer.config import TrainerConfig

PLUGIN_SETTINGS = {"agent": ("agent", "reward", "tool_parser"), "tools": ("tools", "tool_parser")}


def missing_files(parts: Parts, source_dir: Path, search_path: Sequence[Path]) -> Faults:
    """Task files and user code that do not exist."""
    for path, source in _task_sources(parts):
        if is_file(source) and not (source_dir / source).exists():
            yield path, f"no such file: {source_dir / source}"
        if is_harbor(source) and not (source_dir / source.removeprefix(HARBOR_PREFIX)).is_dir():
            yield path, f"no such directory: {source_dir / source.removeprefix(HARBOR_PREFIX)}"
    match parts.get("rollout"):
        case RolloutConfig() as rollout:
            for name, function in rollout.rewards.functions.items():
                for judge in function.judge:
                    if judge.prompt_file is not None and not (source_dir / judge.prompt_file).is_file():
                        path = f"rollout.rewards.functions.{name}.judge"
                        yield path, f"prompt_file: no such file: {source_dir / judge.prompt_file}"
    for path, plugin, default, builtin in _plugins(parts):
        fault = plugin_fault(plugin, setting=path, search_path=search_path, default=default, builtin=builtin)
        if fault is not None:
            yield path, fault.removeprefix(f"{path} = ")


def _task_sources(parts: Parts) -> Faults:
    match parts.get("tasks"):
        case TasksConfig(is_posted=False, source=str(source)):
            yield "tasks.source", source
    match parts.get("evaluation"):
        case EvaluationConfig(source=str(source)):
            yield "evaluation.source", source


def _plugins(parts: Parts) -> Iterator[tuple[str, str, str | None, Mapping[str, str]]]:
    """Path in the file, value, attribute where the value names a module only, built-in names."""
    yield from (
        (path, source, None, NO_SHORT_NAMES)
        for path, source in _task_sources(parts)
        if not (is_file(source) or is_hub(source) or is_harbor(source))
    )
    match parts.get("rollout"):
        case RolloutConfig() as rollout:
            yield "rollout.function", rollout.function, "make_rollout", ROLLOUTS
            if rollout.filter is not None:
                yield "rollout.filter", rollout.filter, None, NO_SHORT_NAMES
            for name, function in rollout.rewards.functions.items():
                if function.path is not None:
                    yield f"rollout.rewards.functions.{name}.path", function.path, None, REWARDS
            for name in PLUGIN_SETTINGS.get(rollout.function, ()):
                found = rollout.settings.get(name, ())
                for value in [found] if isinstance(found, str) else found:
                    if ":" in str(value):
                        yield f"rollout.settings.{name}", str(value), None, NO_SHORT_NAMES
    match parts.get("env"):
        case EnvConfig(name=str(name), url=None):
            yield "env.name", name, None, ENVIRONMENTS
    match parts.get("inference"):
        case InferenceConfig(scripted=ScriptedConfig(script=str(script))):
            yield "inference.scripted.script", script, None, NO_SHORT_NAMES
    yield from ((setting, path, None, NO_SHORT_NAMES) for setting, path in _optional_plugins(parts) if ":" in path)


def _optional_plugins(parts: Parts) -> Iterator[tuple[str, str]]:
    """Settings with a name of ours or `module:attribute`. Their own sections check the names."""
    match parts.get("telemetry"):
        case TelemetryConfig(sinks=sinks):
            yield from (("telemetry.sinks", sink) for sink in sinks)
    match parts.get("trainer"):
        case TrainerConfig(loss=loss, advantage=advantage):
            yield "trainer.loss", loss
            yield "trainer.advantage", advantage or ""
