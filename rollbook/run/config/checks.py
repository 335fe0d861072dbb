"""Checks across the sections of a config. Each yields (path in the file, message) and gets the sections that are valid.

They find settings with which a run could never proceed, settings that contradict each other, and fields that would not be read.
"""

from collections.abc import Callable, Iterator

from rollbook.contracts.freshness import BatchPolicy
from rollbook.contracts.user_errors import did_you_mean
from rollbook.envs.config import EnvConfig
from rollbook.inference.config import InferenceConfig, ScriptedConfig, VllmConfig
from rollbook.ledger.config import GateConfig, RunLedgerConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.settings import ROLLOUTS
from rollbook.run.config.cluster import ClusterConfig, ResourcesConfig
from rollbook.run.config.evaluation import EvaluationConfig
from rollbook.run.config.resolved_settings import Parts, resolved_max_queued
from rollbook.tasks.config import TasksConfig
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.loss_settings import OF_WHOLE_GROUPS

AUTO_TRANSFER = "remove inference.transfer: the transport is then chosen by engine, devices and machines"

Faults = Iterator[tuple[str, str]]


def _written(parts: Parts, *paths: str) -> str:
    """The first of these settings that the user wrote, so that a fault is located there."""
    fields = [(path, *path.split(".")) for path in paths]
    return next((path for path, section, name in fields if name in parts[section].model_fields_set), paths[0])


def _episodes_fit_the_lease(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("gate"):
        case RolloutConfig() as rollout, GateConfig() as gate if rollout.max_seconds >= gate.group_deadline_s:
            yield (
                _written(parts, "rollout.max_seconds", "gate.group_deadline_s"),
                f"an episode may take rollout.max_seconds = {rollout.max_seconds:g} s, but the lease of its group expires after "
                f"gate.group_deadline_s = {gate.group_deadline_s:g} s; make the lease longer",
            )


def _tokens_fit_the_context(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("inference"):
        case RolloutConfig() as rollout, InferenceConfig(max_model_len=int(most)) if rollout.max_total_tokens > most:
            yield (
                _written(parts, "rollout.max_total_tokens", "inference.max_model_len"),
                f"rollout.max_total_tokens = {rollout.max_total_tokens} tokens do not fit inference.max_model_len = {most}; lower "
                "the first or raise the second",
            )


def _single_samples_have_a_baseline(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("trainer"):
        case RolloutConfig(completions_per_prompt=1), TrainerConfig() as trainer:
            if trainer.recipe.advantage not in ("reinforce_pp", "none"):
                yield (
                    "rollout.completions_per_prompt",
                    f"a group of one sample has no group to be compared with, and trainer.advantage = {trainer.recipe.advantage!r} "
                    'needs one; use trainer.advantage = "reinforce_pp", which compares over the batch',
                )


def _minibatches_are_not_empty(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("gate"), parts.get("rollout"):
        case TrainerConfig() as trainer, GateConfig() as gate, RolloutConfig() as rollout:
            samples = gate.groups_per_step * rollout.completions_per_prompt
            if trainer.ppo_n_minibatches > samples:
                yield (
                    "trainer.ppo_n_minibatches",
                    f"{trainer.ppo_n_minibatches} minibatches need more than the {samples} samples of a step "
                    "(gate.groups_per_step × rollout.completions_per_prompt)",
                )


def _parts_have_a_quorum(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("gate"):
        case RolloutConfig() as rollout, GateConfig(batch_policy=BatchPolicy.PARTS):
            if rollout.oversample:
                yield (
                    "rollout.oversample",
                    "works with whole groups only, and with gate.batch_policy = 'parts' no sample waits for a slow one; "
                    "remove it, or set gate.batch_policy to 'wait'",
                )
            if rollout.min_samples > rollout.quorum_size:
                yield (
                    "rollout.min_samples",
                    f"is {rollout.min_samples}, but the first part of a group is submitted with rollout.quorum = "
                    f"{rollout.quorum_size} samples; lower it or raise the quorum",
                )
        case RolloutConfig(quorum=int()) as rollout, GateConfig() as gate:
            why = " (the default with rollout.oversample)" if rollout.oversample else ""
            yield (
                "rollout.quorum",
                f"is read with gate.batch_policy = 'parts' only; this run uses '{gate.batch_policy}'{why}; remove rollout.quorum",
            )


def _parts_can_be_compared(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("gate"):
        case TrainerConfig() as trainer, GateConfig(batch_policy=BatchPolicy.PARTS):
            if trainer.recipe.advantage in OF_WHOLE_GROUPS:
                yield (
                    "trainer.advantage",
                    f"{trainer.recipe.advantage!r} compares the samples of whole groups, and gate.batch_policy = 'parts' trains "
                    "samples before their group is complete; use 'wait' or 'trim', or another advantage",
                )


def _teachers_give_what_is_trained(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("rollout"):
        case TrainerConfig() as trainer, RolloutConfig() as rollout if trainer.recipe.distill_coef:
            # Other rollout functions may record the scores themselves.
            if not rollout.teacher and rollout.function in ROLLOUTS and rollout.function != "remote":
                yield "rollout.teacher", "a divergence from a teacher is trained, and there is none: set url and model"
            if rollout.teacher and trainer.distill_kl != "sampled" and not any(t.top_k for t in rollout.teacher):
                yield (
                    "trainer.distill_kl",
                    f"{trainer.distill_kl!r} needs the likeliest tokens of a teacher: set rollout.teacher.top_k, such as 16",
                )


def _teachers_are_learned_from(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("rollout"):
        case TrainerConfig(distill_coef=None) as trainer, RolloutConfig() as rollout if rollout.teacher:
            # A user's own loss or advantage may read the scores.
            is_own = ":" in trainer.loss or trainer.recipe.has_own_advantage
            if not is_own and not trainer.recipe.distill_coef:
                yield (
                    "rollout.teacher",
                    "nothing is trained on its scores: set trainer.distill_coef, such as 0.5 (0: only record them), or trainer.loss"
                    ' = "distill"',
                )


def _the_policy_can_teach(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("inference"):
        case RolloutConfig() as rollout, InferenceConfig(engine=("vllm" | "sglang") as engine):
            if any(teacher.policy for teacher in rollout.teacher):
                yield (
                    "rollout.teacher.policy",
                    f"engine = '{engine}' does not report the version that scored a prompt, and gaps between versions must not be"
                    " trained; set inference.engine = 'transformers', or url and model of another teacher",
                )


def _parts_can_be_ranked(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("gate"):
        case RolloutConfig() as rollout, GateConfig(batch_policy=BatchPolicy.PARTS):
            for name, function in rollout.rewards.functions.items():
                if function.whole_group:
                    yield (
                        f"rollout.rewards.functions.{name}.whole_group",
                        "the function needs whole groups, and gate.batch_policy = 'parts' stores samples before their group is "
                        "complete; use 'wait' or 'trim', or set group = true if the function can compare a late sample with the "
                        "quorum",
                    )


def reward_weights_have_functions(parts: Parts) -> Faults:
    match parts.get("rollout"), parts.get("trainer"):
        case RolloutConfig(rewards=rewards) as rollout, TrainerConfig(reward_weights=dict(weights)) if (
            rewards.functions
        ):
            # Other rollout functions may record scores of their own.
            known = [*rewards.functions, "environment", *(weights if rollout.function not in ROLLOUTS else ())]
            for name in sorted(weights.keys() - set(known)):
                yield (
                    "trainer.reward_weights",
                    f"{name!r} is no reward function: the run has {', '.join(known)}{did_you_mean(name, known)}",
                )


def _the_engine_can_queue_all_episodes(parts: Parts) -> Faults:
    match parts.get("inference"), parts.get("gate"), parts.get("rollout"):
        case InferenceConfig() as inference, GateConfig() as gate, RolloutConfig() as rollout:
            episodes = gate.max_groups_in_flight * rollout.episodes_per_group
            capacity = inference.max_queued + inference.max_running
            if episodes > capacity and resolved_max_queued(parts) is None:
                yield (
                    "inference.max_queued",
                    f"{episodes} episodes may be in flight (gate.max_groups_in_flight × episodes per group), "
                    f"but the policy server accepts at most {capacity} requests; remove inference.max_queued, or raise it",
                )


def _every_episode_has_an_environment(parts: Parts) -> Faults:
    match parts.get("env"), parts.get("gate"), parts.get("rollout"):
        case EnvConfig(pool_size=int(size)), GateConfig() as gate, RolloutConfig() as rollout:
            episodes = gate.max_groups_in_flight * rollout.episodes_per_group
            if episodes > size:
                yield (
                    "env.pool_size",
                    f"{episodes} episodes may be in flight (gate.max_groups_in_flight × episodes per group), "
                    f"but the pool has {size} environments; raise it, or lower gate.max_groups_in_flight",
                )


def _the_run_ends(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("tasks"):
        case TrainerConfig(max_steps=None), TasksConfig(is_endless=True) as tasks:
            end = "tasks.epochs" if tasks.order == "cursor" else "tasks.curriculum.draws"
            yield ("trainer.max_steps", f"is not set and {end} is endless: this run would never end; set one of them")


def _policy_servers_are_internal_or_external(parts: Parts) -> Faults:
    match parts.get("inference"):
        case InferenceConfig() as inference:
            if inference.urls and inference.replicas > 1:
                yield (
                    "inference.replicas",
                    "is not read with inference.urls: the run then starts no servers of its own; remove it",
                )
            if inference.api_key_env is not None and not inference.urls:
                yield "inference.api_key_env", "is read with inference.urls only; the run's own servers need no key"
            if inference.engine == "sglang":
                yield from _sglang_faults(inference)
            if inference.engine == "vllm":
                yield from _vllm_faults(inference)
            elif inference.transfer == "nccl":
                yield (
                    "inference.transfer",
                    f"'nccl' works with engine = 'vllm' only; this run uses '{inference.engine}'; {AUTO_TRANSFER}",
                )
            elif inference.vllm != VllmConfig():
                yield "inference.vllm", f"is read by engine = 'vllm' only; this run uses '{inference.engine}'"


def _sglang_faults(inference: InferenceConfig) -> Faults:
    if not inference.urls:
        yield "inference.urls", "engine = 'sglang' needs the urls of running servers; the run starts none"
    if inference.transfer not in ("auto", "directory", "nccl"):
        yield (
            "inference.transfer",
            f"SGLang loads weights from a directory, not by '{inference.transfer}'; {AUTO_TRANSFER}",
        )
    if inference.publish == "adapter":
        yield "inference.publish", "adapters are not published to SGLang servers: set 'full'"


def _vllm_faults(inference: InferenceConfig) -> Faults:
    if bool(inference.urls) == (inference.vllm.python is not None):
        yield (
            "inference.urls",
            "engine = 'vllm' needs either the urls of running servers, or inference.vllm.python to start them",
        )
    if inference.transfer in ("cuda_ipc", "pull"):
        yield (
            "inference.transfer",
            f"vLLM does not support '{inference.transfer}'; {AUTO_TRANSFER}",
        )


def _routes_are_recorded_and_used(parts: Parts) -> Faults:
    match parts.get("trainer"), parts.get("inference"), parts.get("tasks"):
        case TrainerConfig(router_replay=True), InferenceConfig(engine=engine), _ if engine != "transformers":
            yield (
                "trainer.router_replay",
                f"needs the experts that the sampler chose, and engine = '{engine}' does not report them; set inference.engine = "
                "'transformers', or remove trainer.router_replay",
            )
        case TrainerConfig(router_replay=True), _, TasksConfig(is_posted=True):
            yield "trainer.router_replay", "posted groups do not have the experts that the sampler chose; remove it"
        case TrainerConfig(router_replay=False), InferenceConfig(record_routes=True), _:
            yield (
                "inference.record_routes",
                "nothing reads the routes without trainer.router_replay = true; set it, or remove inference.record_routes",
            )


def _adapters_can_be_published(parts: Parts) -> Faults:
    match parts.get("inference"), parts.get("trainer"):
        case InferenceConfig(publish="adapter") as inference, TrainerConfig() as trainer:
            if trainer.lora is None:
                yield "inference.publish", "'adapter' needs trainer.lora"
            elif inference.transfer == "nccl":
                yield "inference.publish", "'adapter' does not work with transfer = 'nccl', which moves full weights"
            elif trainer.lora.experts and inference.engine == "transformers":
                yield "inference.publish", "the embedded engine cannot adapt experts (trainer.lora.experts): set 'full'"


def _evaluation_has_a_policy(parts: Parts) -> Faults:
    match parts.get("evaluation"), parts.get("inference"):
        case EvaluationConfig(every_steps=int(), policy="own"), InferenceConfig(engine=("vllm" | "sglang") as engine):
            yield (
                "evaluation.policy",
                f"engine = '{engine}' evaluates with the run's own servers: set evaluation.policy = 'shared'",
            )


def _the_split_field_is_read(parts: Parts) -> Faults:
    match parts.get("tasks"), parts.get("evaluation"):
        case TasksConfig(split=None, split_field=str(name)), EvaluationConfig(split=None) if name != "split":
            yield (
                "tasks.split_field",
                "is read only when tasks.split or evaluation.split is set; set one or remove this",
            )


def _scripted_settings_are_read(parts: Parts) -> Faults:
    match parts.get("inference"):
        case InferenceConfig() as inference if (
            inference.engine != "scripted" and inference.scripted != ScriptedConfig()
        ):
            yield (
                "inference.scripted",
                f"is read by the scripted engine only; this run uses engine = '{inference.engine}'",
            )


def _checkpoints_are_as_frequent_as_evaluations(parts: Parts) -> Faults:
    match parts.get("evaluation"), parts.get("trainer"):
        case EvaluationConfig(every_steps=int(every), policy="own"), TrainerConfig() as trainer if (
            trainer.checkpoint_every > every
        ):
            yield (
                "evaluation.every_steps",
                f"evaluation.policy = 'own' evaluates checkpoints, which are written every {trainer.checkpoint_every} steps "
                f"(trainer.checkpoint_every), not every {every}; lower checkpoint_every, or set evaluation.policy = 'shared'",
            )


def _atropos_source_needs_no_rollout(parts: Parts) -> Faults:
    match parts.get("tasks"):
        case TasksConfig(is_posted=True):
            for name, plain in (("rollout", RolloutConfig()), ("env", EnvConfig())):
                if parts.get(name, plain) != plain:
                    yield (
                        name,
                        'is not read with tasks.source = "atropos", where external environments post groups; remove it',
                    )


def _posted_groups_are_whole(parts: Parts) -> Faults:
    match parts.get("tasks"), parts.get("gate"):
        case TasksConfig(is_posted=True), GateConfig(batch_policy=BatchPolicy.PARTS):
            yield (
                "gate.batch_policy",
                "'parts' is not possible: environments post whole groups; use 'wait', 'trim' or 'drop'",
            )


def _posts_reach_the_ledger(parts: Parts) -> Faults:
    match parts.get("tasks"), parts.get("ledger"):
        case TasksConfig(is_posted=True) as tasks, RunLedgerConfig(url=str()) if tasks.atropos.url is None:
            yield (
                "tasks.atropos.url",
                "with ledger.url the run serves no Atropos API; set this to the server that environments post to",
            )


def _gpus_fit_replicas_and_ranks(parts: Parts) -> Faults:
    cluster = parts.get("cluster")
    remote = cluster.ranks if isinstance(cluster, ClusterConfig) else 0
    match parts.get("resources"), parts.get("inference"), parts.get("trainer"):
        case ResourcesConfig() as resources, InferenceConfig() as inference, TrainerConfig() as trainer:
            policy, ranks = resources.policy_gpus, resources.trainer_gpus
            is_on_cpu = trainer.device != "cuda" and "device" in trainer.model_fields_set
            if ranks and (is_on_cpu or len(ranks) != trainer.ranks - remote):
                yield (
                    "resources.trainer_gpus",
                    f"names {len(ranks)} GPUs; it needs trainer.device = 'cuda' and one GPU for each of the "
                    f"{trainer.ranks - remote} trainer.ranks on this machine",
                )
            if policy and inference.urls:
                yield "resources.policy_gpus", "is not read with inference.urls: the run then starts no policy servers"
            elif policy and len(policy) % inference.replicas:
                yield (
                    "resources.policy_gpus",
                    f"{len(policy)} GPUs cannot be divided evenly among {inference.replicas} inference.replicas",
                )
            elif policy and inference.engine != "vllm" and len(policy) > inference.replicas:
                yield (
                    "resources.policy_gpus",
                    f"engine = '{inference.engine}' uses one GPU for each of the {inference.replicas} inference.replicas; "
                    f"remove {len(policy) - inference.replicas} GPUs, or add replicas",
                )
            is_set = "device" in inference.model_fields_set
            if policy and inference.engine != "vllm" and inference.device != "cuda" and is_set:
                yield (
                    "inference.device",
                    f"is '{inference.device}'; with resources.policy_gpus each replica sees only its own GPU: set it to 'cuda'",
                )
            if resources.are_separate and inference.transfer == "cuda_ipc":
                yield (
                    "inference.transfer",
                    "'cuda_ipc' needs the trainer and the policy on one GPU, and [resources] separates them; "
                    + AUTO_TRANSFER,
                )


def _ranks_of_other_machines_are_ranks(parts: Parts) -> Faults:
    match parts.get("cluster"), parts.get("trainer"):
        case ClusterConfig(ranks=remote), TrainerConfig(ranks=ranks) if remote >= ranks and remote > 0:
            yield (
                "cluster.ranks",
                f"rank 0 is on this machine, so {remote} ranks on other machines need trainer.ranks = {remote + 1} or more",
            )


CROSS_CHECKS: tuple[Callable[[Parts], Faults], ...] = (
    _episodes_fit_the_lease,
    _tokens_fit_the_context,
    _minibatches_are_not_empty,
    _parts_have_a_quorum,
    _parts_can_be_compared,
    _teachers_give_what_is_trained,
    _teachers_are_learned_from,
    _the_policy_can_teach,
    _parts_can_be_ranked,
    reward_weights_have_functions,
    _single_samples_have_a_baseline,
    _the_engine_can_queue_all_episodes,
    _every_episode_has_an_environment,
    _the_run_ends,
    _scripted_settings_are_read,
    _the_split_field_is_read,
    _atropos_source_needs_no_rollout,
    _policy_servers_are_internal_or_external,
    _adapters_can_be_published,
    _routes_are_recorded_and_used,
    _evaluation_has_a_policy,
    _checkpoints_are_as_frequent_as_evaluations,
    _posted_groups_are_whole,
    _posts_reach_the_ledger,
    _gpus_fit_replicas_and_ranks,
    _ranks_of_other_machines_are_ranks,
)
