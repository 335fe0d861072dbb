"""What a configuration asks for that this machine does not have, or that cannot work."""

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollbook.inference.config import InferenceConfig
from rollbook.run.config.run import ConfigFault, LoadedConfig, RunConfig
from rollbook.run.directory import model_directory
from rollbook.run.resources.machine import Machine
from rollbook.run.resources.memory_plan import MB, Sizes
from rollbook.run.resources.model_facts import ModelFacts
from rollbook.run.resources.mps import HOW_TO_INSTALL, PROGRAM, program, why_no_sockets
from rollbook.run.resources.run_sizes import engine_of, gpus_of, longest_sequence
from rollbook.run.resources.shared_base import why_not_shared

TOKEN_BYTES = 8
"""In a payload: the id and the logprob of a token."""


def base_faults(loaded: LoadedConfig, sizes: Sizes) -> Iterator[ConfigFault]:
    config = loaded.config
    if config.resources.shared_base:
        reason = why_not_shared(config, sizes, model_directory(config.model, loaded.source_dir))
        if reason is not None:
            yield ConfigFault("resources.shared_base", f"the base cannot be shared: {reason}; remove it")


def mps_faults(config: RunConfig, machine: Machine, sizes: Sizes, *, needs_machine: bool) -> Iterator[ConfigFault]:
    if config.resources.mps is True:
        reason = why_no_mps(config, sizes) or (why_no_mps_here(machine) if needs_machine else None)
        if reason is not None:
            yield ConfigFault("resources.mps", f"is true, but {reason}, or remove resources.mps")


def why_no_mps(config: RunConfig, sizes: Sizes) -> str | None:
    trainer, policy = config.trainer.device == "cuda", config.inference.device.startswith("cuda")
    used = [*(sizes.trainer_gpus if trainer else ())]
    if policy and sizes.engine != "none":
        used += [number for group in sizes.policy_gpus for number in group]
    if not used:
        return "no process of this run uses an NVIDIA GPU. Set trainer.device and inference.device to 'cuda'"
    if len(set(used)) == len(used):
        return "no two processes of this run share a GPU, so there is nothing to gain"
    if config.cluster.has_members:
        return (
            "processes that join the run ([cluster]) cannot use its MPS server, and take turns with those that do."
            " Remove the settings of [cluster]"
        )
    return None


def why_no_mps_here(machine: Machine) -> str | None:
    if not machine.gpus:
        return f"{machine.unusable_because or 'this machine has no NVIDIA GPU'}. Run on another machine"
    if program() is None:
        return f"{PROGRAM} is not on the PATH. {HOW_TO_INSTALL}. Install it"
    return why_no_sockets()


def route_faults(config: RunConfig, model: ModelFacts) -> Iterator[ConfigFault]:
    """With router replay, a group must fit into a request to the ledger."""
    if not config.trainer.router_replay or not model.route_bytes_per_token:
        return
    rollout, limit = config.rollout, config.ledger.max_body_mb
    of_token, longest = model.route_bytes_per_token, longest_sequence(config, model)
    needed = rollout.completions_per_prompt * longest * (of_token + TOKEN_BYTES) / MB
    if needed > limit:
        fitting = int(limit * MB / rollout.completions_per_prompt / (of_token + TOKEN_BYTES))
        yield ConfigFault(
            "trainer.router_replay",
            f"a group may have {rollout.completions_per_prompt} samples × {longest:,} tokens × {of_token + TOKEN_BYTES} bytes "
            f"({model.expert_layers} layers × {model.experts_per_token} experts = {of_token}, and {TOKEN_BYTES} of the token) = "
            f"{needed:,.0f} MB, but ledger.max_body_mb = {limit:g}. Set ledger.max_body_mb = {math.ceil(needed)} and "
            f"ledger.max_receiving_mb to several times that, or rollout.max_total_tokens = {fitting}, or remove "
            "trainer.router_replay",
        )


def machine_faults(config: RunConfig, machine: Machine, *, is_resumed: bool) -> Sequence[ConfigFault]:
    """Devices and programs of the configuration that this machine does not have."""
    if config.cluster.ray.address is not None:
        return []
    return [*_missing_programs(config.inference), *_missing_devices(config, machine, is_resumed=is_resumed)]


def _missing_programs(inference: InferenceConfig) -> Sequence[ConfigFault]:
    python = inference.vllm.python
    if inference.engine != "vllm" or inference.urls or python is None or shutil.which(python) is not None:
        return []
    what = "is not executable" if Path(python).exists() else "does not exist"
    advice = "Set it to the Python interpreter of an environment in which vLLM is installed, as an absolute path."
    return [ConfigFault("inference.vllm.python", f"{python} {what}. {advice}")]


def _missing_devices(config: RunConfig, machine: Machine, *, is_resumed: bool) -> Sequence[ConfigFault]:
    if config.inference.device == "mps" and sys.platform != "darwin" and engine_of(config.inference) == "embedded":
        return [ConfigFault("inference.device", "is 'mps', but this machine is no Mac. Use 'cpu', 'cuda' or 'auto'.")]
    if machine.gpus:
        missing = sorted(gpus_of(config) - {device.number for device in machine.gpus})
        have = f"this machine has {len(machine.gpus)}"
        return [ConfigFault("resources", f"GPU {number} is used, but {have}") for number in missing]
    faults = []
    if config.trainer.device == "cuda":
        faults.append(no_gpu("trainer.device", "cuda", machine, is_resumed=is_resumed))
    if config.inference.device.startswith("cuda") and engine_of(config.inference) == "embedded":
        faults.append(no_gpu("inference.device", config.inference.device, machine, is_resumed=is_resumed))
    return faults


def no_gpu(path: str, device: str, machine: Machine, *, is_resumed: bool) -> ConfigFault:
    why = machine.unusable_because or "this machine has no NVIDIA GPU"
    advice = "The run began on a machine with a GPU: resume it on one." if is_resumed else "Use 'cpu', or 'auto'."
    return ConfigFault(path, f"is '{device}', but {why}. {advice}")
