"""Reads LoRA adapters in PEFT's format: which matrix each pair of tensors changes, and its scale. No tensor library.

An adapter is `adapter_config.json` and tensors `base_model.model.<layer>.lora_A.weight` (rank x in), `lora_B.weight` (out x rank).
B A times alpha / rank is added to the layer's matrix. Settings with another meaning are refused.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollbook.contracts.decoding import convert, json_decoder
from rollbook.contracts.weights import WeightsError
from rollbook.inference.weights.safetensors import FileTensor, read_weights

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
KNOWN_INITIALIZERS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initializers that do not change the base. Others (PiSSA, OLoRA, LoftQ) do, so their adapters do not fit our base."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
}
"""PEFT settings that change what an adapter computes, each with the values that have no effect."""


class AdapterSettings(msgspec.Struct):
    """The part of `adapter_config.json` that affects the numbers."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str | None = True

    def scale(self, layer: str) -> tuple[int, float]:
        """Rank and scale of a layer: the first pattern that matches the end of its name is used, as in PEFT."""
        rank = int(_matching(self.rank_pattern, layer, self.r))
        alpha = _matching(self.alpha_pattern, layer, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPair:
    """B A times `scale` is added to the matrix `target`. `a` and `b` are tensor names."""

    target: str
    a: str
    b: str
    rank: int
    scale: float


def checked_settings(raw: Mapping[str, Any]) -> AdapterSettings:
    """Raises `WeightsError` for settings that cannot be read, or that this engine does not support."""
    try:
        settings = convert(dict(raw), AdapterSettings, strict=False)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{CONFIG_FILE} cannot be read: {error}; nothing was loaded") from error
    if settings.peft_type != "LORA":
        raise WeightsError(f"peft_type {settings.peft_type!r} is not LORA; nothing was loaded")
    if min(settings.r, *(settings.rank_pattern or {}).values(), settings.r) < 1:
        raise WeightsError("an adapter's rank must be at least 1; nothing was loaded")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(settings, field) or {}:
            try:
                re.compile(_anchored(pattern))
            except re.error as error:
                raise WeightsError(
                    f"{field}: {pattern!r} is not a regular expression: {error}; nothing was loaded"
                ) from error
    unsupported = [name for name, values in NEUTRAL.items() if name in raw and raw[name] not in values]
    initializer = settings.init_lora_weights
    if isinstance(initializer, str) and initializer.lower() not in KNOWN_INITIALIZERS:
        unsupported.append("init_lora_weights")
    if unsupported:
        listed = ", ".join(f"{name} = {raw[name]!r}" for name in unsupported)
        raise WeightsError(f"this engine does not support adapters with {listed}; nothing was loaded")
    return settings


def low_rank_pairs(settings: AdapterSettings, names: Iterable[str]) -> list[LowRankPair]:
    """Raises `WeightsError` for a tensor that is not part of a pair."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", name)
        if found is None:
            raise WeightsError(f"tensor {name} is not lora_A or lora_B of a linear layer; nothing was loaded")
        layers.setdefault(found[1], {})[found[2]] = name
    unpaired = sorted(layer for layer, found_names in layers.items() if len(found_names) < 2)
    if unpaired or not layers:
        cause = f"{unpaired[0]} has only one tensor of its pair" if unpaired else "it holds no tensors"
        raise WeightsError(f"the adapter is not whole: {cause}; nothing was loaded")
    pairs = []
    for layer, found_names in layers.items():
        rank, scale = settings.scale(layer)
        a, b = found_names["A"], found_names["B"]
        pairs.append(LowRankPair(target=f"{layer}.weight", a=a, b=b, rank=rank, scale=scale))
    return pairs


def read_adapter(directory: Path) -> tuple[dict[str, Any], Mapping[str, FileTensor]]:
    """Settings and tensors of a PEFT directory. Raises `FileNotFoundError` if there is none, `WeightsError` if it is invalid."""
    # Not `Path.is_file`, which raises for a name that is too long.
    if not all(os.path.isfile(directory / name) for name in (CONFIG_FILE, TENSOR_FILE)):  # noqa: PTH113
        raise FileNotFoundError(f"{directory} does not hold {CONFIG_FILE} and {TENSOR_FILE}")
    return read_settings(directory), read_weights(directory / TENSOR_FILE)


def read_settings(directory: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`. Raises `WeightsError`."""
    config = directory / CONFIG_FILE
    try:
        return json_decoder(dict[str, Any]).decode(config.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{config} cannot be read: {error}; nothing was loaded") from error


def _matching(patterns: Mapping[str, float] | None, layer: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(_anchored(pattern), layer):
            return value
    return default


def _anchored(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"
