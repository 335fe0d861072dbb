"""Settings of a run that were left open and follow from other sections. Each function gets the sections that are valid and returns
None if there is nothing to set."""

from collections.abc import Mapping

from pydantic import BaseModel

from rollbook.inference.config import InferenceConfig
from rollbook.ledger.config import GateConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.loss_settings import TURN_ADVANTAGES

Parts = Mapping[str, BaseModel]
"""The sections of a config, by name."""


def resolved_turn_credit(parts: Parts) -> str | None:
    """What the advantage compares in groups with equal rewards, in a run that does not set it."""
    match parts.get("rollout"), parts.get("trainer"):
        case RolloutConfig(turn_credit=None), TrainerConfig(recipe=recipe) if recipe.advantage in TURN_ADVANTAGES:
            if recipe.advantage == "gigpo":
                return "states"
            return "rewards" if recipe.turn_discount == 1.0 else "lengths"
    return None


def resolved_reward_weights(parts: Parts) -> dict[str, float] | None:
    """The weights of all reward functions, for an advantage that reads them."""
    match parts.get("rollout"), parts.get("trainer"):
        case RolloutConfig(rewards=rewards), TrainerConfig() as trainer if rewards.functions:
            if trainer.recipe.advantage == "gdpo":
                named = {name: function.weight for name, function in rewards.functions.items()}
                return {**named, "environment": rewards.environment_weight, **(trainer.reward_weights or {})}
    return None


def resolved_score_credit(parts: Parts) -> tuple[str, ...] | None:
    """The reward functions that are compared one by one, in a run that does not set them."""
    match parts.get("rollout"):
        case RolloutConfig(score_credit=None):
            weights = resolved_reward_weights(parts) or {}
            return tuple(name for name, weight in weights.items() if weight) or None
    return None


def resolved_max_queued(parts: Parts) -> int | None:
    """The limit of a run that does not set `inference.max_queued`: all episodes may send a request at the same moment."""
    match parts.get("inference"), parts.get("gate"), parts.get("rollout"):
        case InferenceConfig() as inference, GateConfig() as gate, RolloutConfig() as rollout:
            if "max_queued" not in inference.model_fields_set:
                return max(inference.max_queued, gate.max_groups_in_flight * rollout.episodes_per_group)
    return None


def resolved_publish(parts: Parts) -> str | None:
    """What `inference.publish = "auto"` means in this run; None without LoRA, where the setting has no effect."""
    match parts.get("inference"), parts.get("trainer"):
        case InferenceConfig() as inference, TrainerConfig(lora=LoraSettings() as lora):
            if inference.publish != "auto":
                return inference.publish
            # Whether external vLLM servers accept adapters is unknown here; the user may set "adapter" explicitly.
            is_external = inference.engine == "sglang" or (inference.engine == "vllm" and inference.vllm.python is None)
            return "full" if inference.transfer == "nccl" or is_external or lora.experts else "adapter"
    return None


def resolved_record_routes(parts: Parts) -> bool | None:
    """Router replay needs the choices of the sampler."""
    match parts.get("trainer"):
        case TrainerConfig(router_replay=True):
            return True
    return None


def resolved_exactness(parts: Parts) -> str | None:
    """Engine and trainer have equal bits only if both are told to, and compute the same operations."""
    match parts.get("inference"), parts.get("trainer"):
        case InferenceConfig() as inference, TrainerConfig() as trainer:
            is_merged = trainer.lora is not None and resolved_publish(parts) == "full"
            can_be = inference.engine == "transformers" and inference.forward == "auto" and not is_merged
            return "bitwise" if can_be and inference.exactness == trainer.exactness == "bitwise" else "fast"
    return None
