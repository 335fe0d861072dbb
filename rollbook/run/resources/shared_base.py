"""Whether trainer and policy servers share the frozen base of adapters. On a GPU they do where they can and it saves memory."""

import sys
from pathlib import Path

from rollbook.run.config.run import RunConfig
from rollbook.run.resources.memory_plan import CONTEXT_BYTES, DTYPE_BYTES, GB, Sizes
from rollbook.run.resources.model_facts import ModelFacts, text_config

ADAPTER_FILE = "adapter_config.json"
"""Its presence marks a PEFT directory."""


def why_not_shared(config: RunConfig, sizes: Sizes, model_dir: Path | None) -> str | None:
    """Why the base cannot be shared; None if it can. The process that loads it may still refuse a model whose weights trainer and
    engine round differently."""
    trainer, inference = config.trainer, config.inference
    gpus = {number for group in sizes.policy_gpus for number in group} | set(sizes.trainer_gpus)
    devices = {trainer.device, inference.device.partition(":")[0]}
    reasons = (
        (trainer.lora is None, "only the base of adapters stays the same, and trainer.lora is not set"),
        (sizes.engine != "embedded", "the policy servers are not those of engine = 'transformers' that the run starts"),
        (inference.publish != "adapter", "whole weights are published (inference.publish)"),
        (trainer.ranks > 1, f"{trainer.ranks} trainer ranks divide it among them"),
        (
            devices not in ({"cpu"}, {"cuda"}),
            f"the trainer is on {trainer.device} and the policy on {inference.device}",
        ),
        ("cuda" in devices and len(gpus) > 1, "trainer and policy servers are on different GPUs"),
        (
            trainer.compute_dtype != inference.dtype,
            f"trainer.compute_dtype is {trainer.compute_dtype} and inference.dtype is {inference.dtype}",
        ),
        (devices == {"cpu"} and sys.platform != "linux", "main memory is shared on Linux only"),
        (
            model_dir is not None and _is_adapter(model_dir),
            "the model is an adapter, which the trainer merges into its base",
        ),
        (model_dir is not None and "quantization_config" in text_config(model_dir), "the model's files are quantised"),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def why_not_worth_it(model: ModelFacts, sizes: Sizes) -> str | None:
    """On a GPU: the process that owns the base needs a context, which may be larger than the copies that it saves."""
    base = DTYPE_BYTES[sizes.policy_dtype] * model.parameters
    saved = len(sizes.policy_gpus) * base
    if saved > CONTEXT_BYTES:
        return None
    return f"that would save {saved / GB:.1f} GB, and the process that owns it needs {CONTEXT_BYTES / GB:.1f}"


def _is_adapter(model_dir: Path) -> bool:
    return (model_dir / ADAPTER_FILE).is_file()
