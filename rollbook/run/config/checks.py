"""What only makes sense together: checks across rooms. Each yields (path in the file, message), and sees only sections that parsed.

Three kinds: settings that can never move, settings that contradict each other, and fields that the chosen settings never read.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from rollbook.contracts.plugin import plugin_fault
from rollbook.envs.config import EnvConfig
from rollbook.inference.config import InferenceConfig, ScriptedConfig, VllmConfig
from rollbook.ledger.config import GateConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.run.config.evaluation import EvaluationConfig
from rollbook.tasks.config import TasksConfig
from rollbook.trainer.config import LoraSettings, TrainerConfig

Parts = Mapping[str, BaseModel]
Faults = Iterator[tuple[str, str]]


def _episodes_fit_the_lease(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("gate"):
        case RolloutConfig() as rollout, GateConfig() as gate if rollout.max_seconds >= gate.group_deadline_s:
            yield (
                "rollout.max_seconds",
                f"an episode may last {rollout.max_seconds:g} s, but the lease on its group ends after "
                f"gate.group_deadline_s = {gate.group_deadline_s:g} s; make the lease longer",
            )


def _tokens_fit_the_context(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("inference"):
        case RolloutConfig() as rollout, InferenceConfig(max_model_len=int(most)) if rollout.max_total_tokens > most:
            yield (
                "rollout.max_total_tokens",
                f"{rollout.max_total_tokens} tokens do not fit inference.max_model_len = {most}",
            )


def _a_minibatch_has_something_to_learn_from(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("gate"), parts.get("rollout"):
        case TrainerConfig() as trainer, GateConfig() as gate, RolloutConfig() as rollout:
            samples = gate.groups_per_step * rollout.completions_per_prompt
            if trainer.ppo_n_minibatches > samples:
                yield (
                    "trainer.ppo_n_minibatches",
                    f"{trainer.ppo_n_minibatches} minibatches cannot be made of {samples} samples a step "
                    "(gate.groups_per_step × rollout.completions_per_prompt)",
                )


def _the_engine_can_hold_what_is_in_flight(parts: Parts) -> Faults:
    match parts.get("inference"), parts.get("gate"), parts.get("rollout"):
        case InferenceConfig() as inference, GateConfig() as gate, RolloutConfig() as rollout:
            episodes = gate.max_groups_in_flight * rollout.episodes_per_group
            room = inference.max_queued + inference.max_running
            if episodes > room:
                yield (
                    "inference.max_queued",
                    f"{episodes} episodes may be in flight (gate.max_groups_in_flight × episodes of a group), "
                    f"but the policy server holds {room} requests at most",
                )


def _every_episode_has_an_environment(parts: Parts) -> Faults:
    match parts.get("env"), parts.get("gate"), parts.get("rollout"):
        case EnvConfig(pool_size=int(size)), GateConfig() as gate, RolloutConfig() as rollout:
            episodes = gate.max_groups_in_flight * rollout.episodes_per_group
            if episodes > size:
                yield (
                    "env.pool_size",
                    f"{episodes} episodes may be in flight (gate.max_groups_in_flight × episodes of a group), "
                    f"but the pool has {size} worlds; raise it, or play fewer at a time",
                )


def _the_run_ends(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("tasks"):
        case TrainerConfig(max_steps=None), TasksConfig(is_endless=True) as tasks:
            end = "tasks.epochs" if tasks.order == "cursor" else "tasks.curriculum.draws"
            yield ("trainer.max_steps", f"is not set and {end} is endless: this run would never end; set one of them")


def _schedules_know_their_length(parts: Parts) -> Faults:
    match parts.get("trainer"):
        case TrainerConfig(max_steps=None, schedule="linear" | "cosine" as schedule):
            yield "trainer.schedule", f"a {schedule} schedule needs trainer.max_steps to know where it ends"


def _policy_servers_are_here_or_there(parts: Parts) -> Faults:
    match parts.get("inference"):
        case InferenceConfig() as inference:
            if inference.urls and inference.replicas > 1:
                yield (
                    "inference.replicas",
                    "servers at inference.urls are used as they are; the run starts none of its own",
                )
            if inference.api_key_env is not None and not inference.urls:
                yield "inference.api_key_env", "is read with inference.urls only; servers of the run itself need no key"
            if inference.engine == "vllm":
                yield from _vllm_can_be_reached(inference)
            elif inference.transfer == "nccl":
                yield (
                    "inference.transfer",
                    "'nccl' speaks to engine = 'vllm' only; there are shared_memory, directory, gloo",
                )
            elif inference.vllm != VllmConfig():
                yield "inference.vllm", f"is read by engine = 'vllm' only; this run uses '{inference.engine}'"


def _vllm_can_be_reached(inference: InferenceConfig) -> Faults:
    if bool(inference.urls) == (inference.vllm.python is not None):
        yield (
            "inference.urls",
            "engine = 'vllm' needs servers: either their urls, or inference.vllm.python to start them",
        )
    if inference.transfer in ("gloo", "cuda_ipc"):
        yield (
            "inference.transfer",
            f"vLLM does not take weights by '{inference.transfer}'; there are directory, shared_memory and nccl",
        )


def what_is_published(parts: Parts) -> str | None:
    """What `inference.publish = "auto"` means in this run; None where adapters are not trained, so that nothing is to be said."""
    match parts.get("inference"), parts.get("trainer"):
        case InferenceConfig() as inference, TrainerConfig(lora=LoraSettings()):
            if inference.publish != "auto":
                return inference.publish
            return "full" if _no_adapter_can_be_taken(inference) else "adapter"
    return None


def _no_adapter_can_be_taken(inference: InferenceConfig) -> str | None:
    """Why the adapter alone would not do."""
    if inference.transfer == "nccl":
        return "'nccl' moves whole weights into vLLM; adapters are read from a directory that both sides see"
    if inference.engine == "vllm" and inference.vllm.python is None:
        # Whether servers that others started take adapters, nobody here can know: who sets "adapter" says that they do.
        return "vLLM servers that run elsewhere may not take adapters"
    return None


def _what_is_published_can_be_taken(parts: Parts) -> Faults:
    match parts.get("inference"), parts.get("trainer"):
        case InferenceConfig(publish="adapter") as inference, TrainerConfig() as trainer:
            if trainer.lora is None:
                yield "inference.publish", "'adapter' needs trainer.lora: without it all weights learn"
            elif inference.transfer == "nccl":
                yield "inference.publish", str(_no_adapter_can_be_taken(inference))


def _evaluation_finds_a_policy(parts: Parts) -> Faults:
    match parts.get("evaluation"), parts.get("inference"):
        case EvaluationConfig(every_steps=int(), policy="own"), InferenceConfig(engine="vllm"):
            yield "evaluation.policy", "with engine = 'vllm' the run's own servers are measured: set it to 'shared'"


def _no_field_goes_unread(parts: Parts) -> Faults:
    match parts.get("inference"):
        case InferenceConfig() as inference if (
            inference.engine != "scripted" and inference.scripted != ScriptedConfig()
        ):
            yield (
                "inference.scripted",
                f"is read by the scripted engine only; this run uses engine = '{inference.engine}'",
            )


def _checkpoints_come_as_often_as_measurements(parts: Parts) -> Faults:
    match parts.get("evaluation"), parts.get("trainer"):
        case EvaluationConfig(every_steps=int(every), policy="own"), TrainerConfig() as trainer if (
            trainer.checkpoint_every > every
        ):
            yield (
                "evaluation.every_steps",
                f"a checkpoint is measured (evaluation.policy = 'own'), and one is written every {trainer.checkpoint_every} steps "
                f"(trainer.checkpoint_every), not every {every}; write them as often, or set evaluation.policy = 'shared'",
            )


def _posted_groups_are_played_elsewhere(parts: Parts) -> Faults:
    match parts.get("tasks"):
        case TasksConfig(is_posted=True):
            for name, plain in (("rollout", RolloutConfig()), ("env", EnvConfig())):
                if parts.get(name, plain) != plain:
                    yield (
                        name,
                        'is not read with tasks.source = "atropos": environments play elsewhere and post; remove it',
                    )


CROSS_CHECKS: tuple[Callable[[Parts], Faults], ...] = (
    _episodes_fit_the_lease,
    _tokens_fit_the_context,
    _a_minibatch_has_something_to_learn_from,
    _the_engine_can_hold_what_is_in_flight,
    _every_episode_has_an_environment,
    _the_run_ends,
    _schedules_know_their_length,
    _no_field_goes_unread,
    _posted_groups_are_played_elsewhere,
    _policy_servers_are_here_or_there,
    _what_is_published_can_be_taken,
    _evaluation_finds_a_policy,
    _checkpoints_come_as_often_as_measurements,
)


AGENT_ROLLOUT = "rollbook.rollout.agents.rollout"
AGENT_SETTINGS = ("agent", "reward", "tool_parser")


def missing_files(parts: Parts, source_dir: Path) -> Faults:
    """Task files and user code that do not exist. Imports nothing: a check must not execute user code or load torch."""
    for path, source in _task_sources(parts):
        if source.endswith(".jsonl") and not (source_dir / source).exists():
            yield path, f"no such file: {source_dir / source}"
    for path, plugin, default in _plugins(parts):
        fault = plugin_fault(plugin, setting=path, search_path=[source_dir], default=default)
        if fault is not None:
            yield path, fault.removeprefix(f"{path} = ")


def _task_sources(parts: Parts) -> Faults:
    match parts.get("tasks"):
        case TasksConfig(is_posted=False, source=str(source)):
            yield "tasks.source", source
    match parts.get("evaluation"):
        case EvaluationConfig(source=str(source)):
            yield "evaluation.source", source


def _plugins(parts: Parts) -> Iterator[tuple[str, str, str | None]]:
    """Path in the file, `module:attribute`, attribute where the value names a module only."""
    yield from ((path, source, None) for path, source in _task_sources(parts) if not source.endswith(".jsonl"))
    match parts.get("rollout"):
        case RolloutConfig() as rollout:
            yield "rollout.function", rollout.function, "make_rollout"
            if rollout.filter is not None:
                yield "rollout.filter", rollout.filter, None
            for name, function in rollout.rewards.functions.items():
                yield f"rollout.rewards.functions.{name}.path", function.path, None
            if rollout.function.partition(":")[0] == AGENT_ROLLOUT:
                for name in AGENT_SETTINGS:
                    if ":" in (value := str(rollout.settings.get(name, ""))):
                        yield f"rollout.settings.{name}", value, None
    match parts.get("env"):
        case EnvConfig(name=str(name)) if ":" in name:
            yield "env.name", name, None
    match parts.get("inference"):
        case InferenceConfig(scripted=ScriptedConfig(script=str(script))):
            yield "inference.scripted.script", script, None
    match parts.get("trainer"):
        case TrainerConfig(loss=str(loss)) if ":" in loss:
            yield "trainer.loss", loss, None
