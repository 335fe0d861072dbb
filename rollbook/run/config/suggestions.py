"""Suggests a setting for an unknown one: a misspelt name, a name of another section, or a name of TRL, verl and their relatives."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rollbook.contracts.user_errors import did_you_mean

MAX_LISTED = 12
"""Fields of a table that a message lists if no name is similar. docs/configuration.md lists those of larger tables."""
MAX_PLACES = 3
WRONG_VALUES = frozenset(
    f"{kind}_{what}" for kind in ("int", "float", "bool") for what in ("parsing", "type", "from_float")
) | {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
"""Errors of pydantic about a number or a truth value that do not show it."""


def _renamed(setting: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, setting)


RENAMED: dict[str, str] = {
    **_renamed("model.path", "model_name_or_path", "model_name", "model_path", "model.name"),
    **_renamed("tasks.epochs", "num_train_epochs", "total_epochs", "num_epochs"),
    **_renamed("rollout.completions_per_prompt", "num_generations", "group_size", "n", "n_samples", "num_samples"),
    **_renamed(
        "rollout.completions_per_prompt", "n_samples_per_prompt", "num_return_sequences", "rollouts_per_example"
    ),
    **_renamed("rollout.sampling.max_tokens", "max_completion_length", "max_new_tokens", "max_response_length"),
    **_renamed("rollout.sampling.max_tokens", "max_response_len", "response_length"),
    **_renamed("rollout.max_total_tokens", "max_seq_length", "max_seq_len", "max_length", "seq_len"),
    **_renamed("rollout.max_turns", "max_tool_calling_iterations", "max_assistant_turns", "max_iterations"),
    **_renamed("gate.max_head_offpolicy_versions", "max_staleness", "max_off_policy_steps", "max_async_level"),
    **_renamed("inference.max_model_len", "max_model_length", "context_length"),
    **_renamed("inference.max_running", "max_num_seqs"),
    **_renamed("inference.vllm.gpu_memory_share", "gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    **_renamed("trainer.lr", "learning_rate", "actor_learning_rate"),
    **_renamed("trainer.kl_coef", "beta", "kl_beta", "kl_loss_coef", "init_kl_coef", "kl_coefficient"),
    **_renamed("trainer.clip_low", "epsilon", "clip_ratio_low", "clip_ratio", "clip_range", "cliprange", "eps_clip"),
    **_renamed("trainer.clip_high", "epsilon_high", "clip_ratio_high", "eps_clip_high"),
    **_renamed("trainer.dual_clip", "clip_ratio_c"),
    **_renamed("trainer.entropy_bonus", "entropy_coeff", "entropy_coef", "ent_coef"),
    **_renamed("trainer.max_steps", "max_train_steps", "total_training_steps", "num_steps", "total_steps", "steps"),
    **_renamed("trainer.warmup_steps", "lr_warmup_steps", "num_warmup_steps"),
    **_renamed("trainer.max_grad_norm", "grad_clip", "clip_grad", "max_gradient_norm"),
    **_renamed("trainer.eps", "adam_epsilon"),
    **_renamed("trainer.mask_truncated", "mask_truncated_completions", "overlong_filtering"),
    **_renamed("trainer.gradient_checkpointing", "enable_gradient_checkpointing"),
    **_renamed("trainer.lora.rank", "lora_rank", "lora_r"),
    **_renamed("trainer.lora.alpha", "lora_alpha"),
    **_renamed("trainer.checkpoint_every", "save_steps", "save_freq", "save_interval"),
    **_renamed("trainer.keep_checkpoints", "save_total_limit", "max_actor_ckpt_to_keep"),
    **_renamed("evaluation.every_steps", "eval_steps", "test_freq", "eval_interval"),
    **_renamed("telemetry.wandb_project", "project_name"),
}
"""Names of other trainers for settings that have the same values here."""

_GROUPS = "It counts the groups (prompts) of a training step."
_MINIBATCHES = "It is the number of optimizer steps of a training step."
_PASSES = "Passes are limited by their tokens; unset, the limit is chosen by the memory of the GPU."
_RELATED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "gate.groups_per_step",
        _GROUPS,
        ("per_device_train_batch_size", "train_batch_size", "batch_size", "rollout_batch_size", "global_batch_size"),
    ),
    (
        "trainer.ppo_n_minibatches",
        _MINIBATCHES,
        ("num_iterations", "steps_per_generation", "ppo_mini_batch_size", "mini_batch_size"),
    ),
    (
        "trainer.max_tokens_per_microbatch",
        _PASSES,
        ("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size_per_gpu"),
    ),
    ("trainer.max_tokens_per_microbatch", _PASSES, ("ppo_max_token_len_per_gpu", "use_dynamic_bsz")),
    ("trainer.loss", "docs/coming-from.md compares the names.", ("loss_type",)),
    ("trainer.loss", 'The ratio of a sequence is "gspo".', ("importance_sampling_level",)),
    ("trainer.advantage", "docs/coming-from.md compares the names.", ("adv_estimator",)),
    ("trainer.advantage", '"group" divides by the standard deviation, "dr_grpo" does not.', ("scale_rewards",)),
    ("trainer.reduction", "docs/coming-from.md compares the names.", ("loss_agg_mode",)),
    (
        "trainer.correction",
        'TRL\'s is "tis".',
        ("vllm_importance_sampling_correction", "rollout_correction", "rollout_is", "use_tis"),
    ),
    ("trainer.kl_coef", "A value above 0 is enough.", ("use_kl_loss",)),
    ("trainer.kl_estimator", "docs/training.md compares the estimators.", ("kl_loss_type", "kl_penalty")),
    ("trainer.betas", "It has both: [0.9, 0.999].", ("adam_beta1", "adam_beta2")),
    ("trainer.schedule", "It is constant, linear or cosine.", ("lr_scheduler_type", "lr_scheduler", "lr_decay_style")),
    ("trainer.warmup_steps", "It is a number of steps.", ("warmup_ratio", "lr_warmup_steps_ratio")),
    ("trainer.compute_dtype", "Unset, it is chosen by the GPU.", ("bf16", "fp16", "torch_dtype", "trainer.dtype")),
    ("trainer.lora", "It has rank, alpha and targets.", ("peft_config", "use_peft", "lora", "target_modules")),
    ("trainer.packing", "Packing and chunked logits are built in.", ("use_liger_kernel", "use_remove_padding")),
    (
        "rollout.max_total_tokens",
        "It limits prompt, completions and observations together.",
        ("max_prompt_length", "max_prompt_len"),
    ),
    ("rollout.drop_constant_reward", "It is on by default.", ("filter_groups", "dynamic_sampling")),
    (
        "rollout.rewards.functions",
        "It has a table for each function (docs/writing-a-reward.md).",
        ("reward_funcs", "reward_function", "reward_fn", "custom_reward_function", "reward_manager"),
    ),
    ("rollout.function", "docs/writing-a-rollout.md shows one.", ("rollout_func", "agent_loop", "multi_turn")),
    ("env.name", "docs/writing-an-environment.md shows one.", ("environment_factory", "env_name")),
    (
        "tasks.source",
        "It is a file, module:function, or hf:NAME for a dataset of the hub.",
        ("train_files", "train_data", "train_dataset", "dataset_name", "dataset", "prompt_data"),
    ),
    ("evaluation.source", "It is written like tasks.source.", ("val_files", "eval_dataset", "test_files")),
    ("inference.engine", '"vllm" needs inference.urls or inference.vllm.python.', ("use_vllm", "vllm_mode")),
    ("inference.urls", "It is a list.", ("vllm_server_base_url",)),
    ("telemetry.sinks", "It is a list.", ("report_to", "logger")),
    (
        "resources.policy_gpus",
        "Several GPUs of a vLLM replica share its tensors.",
        ("tensor_parallel_size", "vllm_tensor_parallel_size", "tensor_model_parallel_size"),
    ),
    ("resources.gpus", "Unset, all GPUs of the machine are used.", ("n_gpus_per_node", "num_gpus")),
    ("cluster", "docs/several-machines.md explains it.", ("nnodes",)),
    ("gate.max_head_offpolicy_versions", "It is a number of versions.", ("staleness_threshold",)),
    (
        "gate.max_head_offpolicy_versions",
        "Weights are published after every step.",
        ("trigger_parameter_sync_step", "weight_sync_steps"),
    ),
    ("", "completions always continue from their tokens; remove it", ("partial_rollout",)),
    ("", "the directory of a run is the option --run-dir of `rollbook train`", ("output_dir", "default_local_dir")),
    ("", "`rollbook train RUN_DIR` resumes a run", ("resume_from_checkpoint", "resume_mode")),
)
RELATED: dict[str, tuple[str, str]] = {name: (path, note) for path, note, names in _RELATED for name in names}
"""Names of other trainers for something that has other values here: the setting (or none), and how it differs."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    text: str
    """Continues a message: `; did you mean 'trainer.lr'?`. May be empty."""
    setting: str | None = None
    """The setting of the same meaning, if there is no doubt."""


def suggestion(path: str, root: type[BaseModel]) -> Suggestion:
    """For an unknown field such as `trainer.learning_rate`, or a field of an unknown section."""
    table, _, name = path.rpartition(".")
    known = list(settings_of(root))
    places = sorted((one for one in known if one.rpartition(".")[2] == name), key=lambda one: _distance(one, path))
    for key in (path,) if places else (path, name):
        if key in RENAMED and RENAMED[key] in known:
            return Suggestion(f"; did you mean {RENAMED[key]!r}?", RENAMED[key])
        if key in RELATED:
            setting, note = RELATED[key]
            return Suggestion(f"; did you mean {setting!r}? {note}" if setting else f"; {note}")
    keys = path.split(".")
    endings = [".".join(keys[at:]) for at in range(1, len(keys) - 1)]
    if same := next((ending for ending in endings if ending in known), None):
        return Suggestion(f"; did you mean {same!r}?", same)
    if places:
        shown = " or ".join(map(repr, places[:MAX_PLACES]))
        return Suggestion(f"; did you mean {shown}?", places[0] if len(places) == 1 else None)
    siblings = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == table]
    if close := did_you_mean(name, siblings):
        setting = next(one for one in siblings if f"{one!r}" in close)
        return Suggestion(close, f"{table}.{setting}" if table else setting)
    if longer := [one for one in siblings if {*name.split("_")} <= {*one.split("_")}]:
        return Suggestion(f"; did you mean {' or '.join(map(repr, longer[:MAX_PLACES]))}?")
    leaves = {one.rpartition(".")[2]: one for one in known} | RENAMED
    if close := did_you_mean(name, leaves):
        setting = next(leaves[one] for one in leaves if f"{one!r}" in close)
        return Suggestion(f"; did you mean {setting!r}?")
    if 0 < len(siblings) <= MAX_LISTED:
        return Suggestion(f"; {f'the fields of {table}' if table else 'known'} are {', '.join(siblings)}")
    what = f"the fields of {table}" if table else "the sections"
    return Suggestion(f"; docs/configuration.md lists {what}" if siblings else "")


def option_advice(option: str, root: type[BaseModel], *, flag: str, section: str, value: str) -> str:
    """How an unknown option such as `--max-steps` is passed, if it is the name of a setting, here or in another trainer.

    `flag`: the option that overrides settings, of `section` only if it is not empty.
    """
    name = option.lstrip("-").replace("-", "_")
    known = [one for one in settings_of(root) if "." in one and one.startswith(section)]
    found = sorted((one for one in known if f".{one}".endswith(f".{name}")), key=lambda one: one.count("."))
    note = ""
    if not found and RENAMED.get(name) in known:
        found = [RENAMED[name]]
    elif not found and name in RELATED:
        setting, note = RELATED[name]
        found, value = [setting] if setting in known else [], ""
        if not setting:
            return f"{note[0].upper()}{note[1:]}."
    if not found:
        return ""
    # The next argument may be another option.
    value = "VALUE" if not value or value.startswith("--") else value
    shown = found if len(found) <= MAX_PLACES + 1 else found[:MAX_PLACES]
    ways = [f"{flag} {shlex.quote(f'{one}={value}')}" for one in shown]
    more = f" or one of {len(found) - len(shown)} others" if len(found) > len(shown) else ""
    return f"It is a setting: {' or '.join(ways)}{more}{f'. {note}' if note else ''}"


def _distance(setting: str, path: str) -> tuple[bool, int]:
    """Settings of the same section come first, then those that are nested least."""
    return setting.partition(".")[0] != path.partition(".")[0], setting.count(".")


def settings_of(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The path of every setting and every table. A dictionary has no paths of its own: its keys are the user's."""
    for name, field in root.model_fields.items():
        yield prefix + name
        inner = _model_in(field.annotation)
        if inner is not None and "dict" not in str(field.annotation):
            yield from settings_of(inner, f"{prefix}{name}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a table, also if it is optional, in a list or in a dictionary."""
    options = (annotation, *getattr(annotation, "__args__", ()))
    return next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)


def plain_message(error: ErrorDetails, path: Sequence[int | str], root: type[BaseModel]) -> str:
    """The message of a fault at `path`, with the known name or value that is most similar to a wrong one."""
    if error["type"] == "extra_forbidden":
        return f"unknown field{_in_table(path, root) or suggestion('.'.join(map(str, path)), root).text}"
    if error["type"] in ("literal_error", "enum"):
        known = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{error['msg']}, not {error['input']!r}{did_you_mean(str(error['input']), known)}"
    if error["type"] == "missing":
        return "this section is missing" if len(path) == 1 else "is not set"
    if error["type"] in ("tuple_type", "list_type"):
        return f"Input should be a list, not {error['input']!r}"
    if error["type"] in ("model_type", "dict_type"):
        return "Input should be a table"
    if error["type"] in WRONG_VALUES:
        return f"{error['msg'].partition(', ')[0]}, not {error['input']!r}"
    return error["msg"].removeprefix("Value error, ")


def _in_table(path: Sequence[int | str], root: type[BaseModel]) -> str:
    """A suggestion for a field of a table with a name of the user's choice, such as `rollout.rewards.functions.NAME`."""
    kind: Any = root
    is_own = False
    for key in path[:-1]:
        fields = getattr(kind, "model_fields", {})
        is_own = is_own or key not in fields
        kind = _model_in(fields[key].annotation) if key in fields else kind
    return did_you_mean(str(path[-1]), getattr(kind, "model_fields", ())) if is_own else ""
