"""Reads what an adapter is made of: which matrix each pair of tensors belongs to, and how much it counts. No tensor library.

PEFT's format: `adapter_config.json`, tensors `base_model.model.<layer>.lora_A.weight` (rank x in), `lora_B.weight` (out x rank).
What is added to the layer's matrix is B A, times alpha / rank. What would mean something else is refused by its name.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollbook.inference.engine import WeightsError
from rollbook.inference.weights.safetensors import FileTensor, read_weights

PREFIX = "base_model.model."
CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to begin that leave the base as it is. Others (PiSSA, OLoRA, LoftQ) change it, and mean something else beside ours."""
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
"""Settings of PEFT that change what an adapter computes, and the values that do not."""


class AdapterSettings(msgspec.Struct):
    """The part of `adapter_config.json` that decides the numbers. Others are checked by name or have no say here."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str | None = True

    def scale(self, layer: str) -> tuple[int, float]:
        """Rank and scale of a layer: the first pattern that ends its name wins, as in PEFT."""
        rank = int(_matching(self.rank_pattern, layer, self.r))
        alpha = _matching(self.alpha_pattern, layer, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPair:
    """B A times `scale` is added to the matrix `target`. `a` and `b` are names of tensors."""

    target: str
    a: str
    b: str
    rank: int
    scale: float


def checked_settings(raw: Mapping[str, Any]) -> AdapterSettings:
    """Raises `WeightsError` for settings that cannot be read, or that mean something this engine does not compute."""
    try:
        settings = msgspec.convert(dict(raw), AdapterSettings, strict=False)
    except msgspec.ValidationError as error:
        raise WeightsError(f"{CONFIG_FILE} cannot be read: {error}; nothing was loaded") from error
    if settings.peft_type != "LORA":
        raise WeightsError(f"peft_type {settings.peft_type!r} is not LORA; nothing was loaded")
    if min(settings.r, *(settings.rank_pattern or {}).values(), settings.r) < 1:
        raise WeightsError("an adapter's rank must be at least 1; nothing was loaded")
    odd = [name for name, values in NEUTRAL.items() if name in raw and raw[name] not in values]
    start = settings.init_lora_weights
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        odd.append("init_lora_weights")
    if odd:
        told = ", ".join(f"{name} = {raw[name]!r}" for name in odd)
        raise WeightsError(f"this engine does not know adapters with {told}; nothing was loaded")
    return settings


def low_rank_pairs(settings: AdapterSettings, names: Iterable[str]) -> list[LowRankPair]:
    """Every tensor is half of a pair, or `WeightsError`."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", name)
        if found is None:
            raise WeightsError(
                f"tensor {name} is no lora_A or lora_B of a linear layer, which is all this engine knows; nothing was loaded"
            )
        layers.setdefault(found[1], {})[found[2]] = name
    lonely = sorted(layer for layer, halves in layers.items() if len(halves) < 2)
    if lonely or not layers:
        what = f"{lonely[0]} has one half of its pair only" if lonely else "it holds no tensors"
        raise WeightsError(f"the adapter is not whole: {what}; nothing was loaded")
    pairs = []
    for layer, halves in layers.items():
        rank, scale = settings.scale(layer)
        pairs.append(LowRankPair(target=f"{layer}.weight", a=halves["A"], b=halves["B"], rank=rank, scale=scale))
    return pairs


def read_adapter(directory: Path) -> tuple[dict[str, Any], Mapping[str, FileTensor]]:
    """Settings and tensors of a PEFT directory. Raises `FileNotFoundError` where there is none, `WeightsError` for a bad one."""
    config = directory / CONFIG_FILE
    if not config.is_file() or not (directory / TENSOR_FILE).is_file():
        raise FileNotFoundError(f"{directory} holds no {CONFIG_FILE} with {TENSOR_FILE} beside it")
    try:
        settings = msgspec.json.decode(config.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{config} cannot be read: {error}; nothing was loaded") from error
    return settings, read_weights(directory / TENSOR_FILE)


def _matching(patterns: Mapping[str, float] | None, layer: str, otherwise: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise
