"""Large models with random weights through engine and trainer.

    python -m benchmarks.engine.families [--only NAME ...] [--within SECONDS]
    python -m benchmarks.engine.families --module        the modules of two small models against their fast forwards
    python -m benchmarks.engine.families --tiny          small models on a CPU, to test the script

Models of the shapes of Qwen3.5-4B (all weights trained), gpt-oss-20B and Qwen3-30B-A3B (LoRA). A process makes the weights on the
device from a seed and shares them; no file of weights is written. For each model, one process samples with the embedded engine, and
then one trains on the samples. Measured: tokens a second and milliseconds a decode step of the engine; seconds and tokens a second
of a training step; memory; the difference of the logprobs of sampled tokens between engine and trainer (mean and largest); and, for
mixtures of experts, the same without router replay, which is the peer.

`--module`: tokens a second of the engine if it calls the module of transformers, as it does for any model without a fast forward;
the peer is the fast forward of the same model.

`--within` starts no part after so many seconds, and ends the running one then; what was measured before is printed.
`--dtype float32` is without the noise of rounding.
"""

import argparse
import asyncio
import json
import math
import pickle
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.engine.models import QWEN_1_5B, SMOLLM2_135M, llama_config
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams, with_length
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.shared_weights.base import BaseOwner, map_base
from rollbook.shared_weights.modules import empty_model, named_weights
from rollbook.shared_weights.packing import DTYPES
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.frozen_base import module_of
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.step import TrainStep

SIBLINGS = 8
STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model_type: str
    shape: Mapping[str, Any]
    tiny: Mapping[str, Any]
    is_lora: bool
    has_experts: bool
    has_centred_norms: bool = False
    """Norms multiply by 1 + weight, but those of gated layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    groups: int = 16
    prompt: int = 512
    answer: int = 512
    pass_tokens: int = 16_384
    steps: int = 4


SMALL_SIZES = Sizes(groups=1, prompt=24, answer=16, pass_tokens=1024, steps=2)
TINY: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
OF_ROUTERS = ("router_mismatch", "router_replayed", "own_routes_kl", "replayed_kl", "expert_load_max")
"""Metrics of mixtures of experts."""
CASES = {
    "Qwen3.5-4B": Case(
        model_type="qwen3_5_text",
        shape={
            "vocab_size": 248_320,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": MIXED * 8,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32_768,
        },
        tiny={
            "layer_types": MIXED,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "tie_word_embeddings": True,
        },
        is_lora=False,
        has_experts=False,
        has_centred_norms=True,
    ),
    "gpt-oss-20B": Case(
        model_type="gpt_oss",
        shape={"num_hidden_layers": 24, "num_local_experts": 32, "max_position_embeddings": 32_768},
        tiny={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "rope_scaling": None},
        is_lora=True,
        has_experts=True,
    ),
    "Qwen3-30B-A3B": Case(
        model_type="qwen3_moe",
        shape={
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "max_position_embeddings": 32_768,
        },
        tiny={"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
        is_lora=True,
        has_experts=True,
    ),
}
OF_MODULE = {"SmolLM2-135M": SMOLLM2_135M, "Qwen2.5-1.5B": QWEN_1_5B}
"""With `--module`."""
MODULE_FLOOR = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all processes of a case know. They get it as JSON."""

    name: str
    directory: str
    device: str
    dtype: str
    is_tiny: bool
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def case(self) -> Case:
        if self.name not in OF_MODULE:
            return CASES[self.name]
        known = llama_config(OF_MODULE[self.name]).to_diff_dict()
        shape = {name: value for name, value in known.items() if name not in ("model_type", "transformers_version")}
        return Case(model_type="llama", shape=shape, tiny={}, is_lora=False, has_experts=False)

    @property
    def home(self) -> Path:
        return Path(self.directory)

    @property
    def base_file(self) -> Path:
        return self.home / "base.json"

    @classmethod
    def read(cls, text: str) -> "Setting":
        found = json.loads(text)
        return cls(**found | {"sizes": Sizes(**found["sizes"])})

    def written(self) -> str:
        named = {name: getattr(self, name) for name in ("name", "directory", "device", "dtype", "is_tiny")}
        sizes = {name: getattr(self.sizes, name) for name in Sizes.__slots__}
        return json.dumps({**named, "sizes": sizes})


@dataclass(frozen=True, slots=True)
class Sampled:
    prompt: list[int]
    completion: Completion


# --- the process that owns the weights ---


def own(setting: Setting) -> None:
    """Make the weights, and hold them until standard input ends."""
    empty = empty_model(setting.home, dtype=getattr(torch, setting.dtype))
    names = {dtype: name for name, dtype in DTYPES.items()}
    weights = named_weights(empty)
    headers = [(name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in weights.items()]
    generator = torch.Generator(setting.device).manual_seed(0)
    case = setting.case
    owner = BaseOwner(headers, lambda name: _random(name, weights[name], generator, case), device=setting.device)
    owner.offer(setting.base_file, digest="random")
    print(owner.num_bytes, flush=True)
    sys.stdin.read()


def _random(name: str, like: Tensor, generator: torch.Generator, case: Case) -> Tensor:
    """Outputs of matrices are about as large as their inputs, and norms change nothing."""
    made = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
    if like.ndim == 1:
        if "norm" in name:
            return made.fill_(0.0 if case.has_centred_norms and "linear_attn" not in name else 1.0)
        if name.endswith("A_log"):
            return made.uniform_(1.0, 16.0, generator=generator).log_()
        return made.fill_(1.0) if name.endswith("dt_bias") else made.normal_(0.0, 0.02, generator=generator)
    inputs = (
        like.shape[-2] if name.endswith("experts.gate_up_proj") and like.shape[-2] < like.shape[-1] else like.shape[-1]
    )
    scale = 2.0 if "embed" in name or "lm_head" in name else 0.7
    return made.normal_(0.0, scale / math.sqrt(inputs), generator=generator)


# --- the parts, each a process ---


async def sample(setting: Setting, forward: Literal["auto", "module"] = "auto") -> dict[str, Any]:
    sizes, case = setting.sizes, setting.case
    count = sizes.groups * SIBLINGS
    config = InferenceConfig(
        device=setting.device,
        dtype=setting.dtype,
        max_running=count,
        max_model_len=sizes.prompt + sizes.answer + 1,
        kv_memory_mb=200 if setting.is_tiny else "auto",
        record_routes=case.has_experts,
        forward=forward,
    )
    async with open_engine(config, setting.home, shared_base=setting.base_file) as engine:
        await engine.adopt(Publication(id=PublicationId(0), epoch=0, step=0, digest="random"))
        rng = np.random.default_rng(0)
        vocabulary = engine.vocab_size
        of_groups = [rng.integers(3, vocabulary, sizes.prompt).tolist() for _ in range(sizes.groups)]
        prompts = [prompt for prompt in of_groups for _ in range(SIBLINGS)]

        async def answers(seed: int) -> list[Completion]:
            sampling = [SamplingParams(max_tokens=sizes.answer, seed=seed + number) for number in range(count)]
            return await asyncio.gather(*map(engine.generate, prompts, sampling))

        # Captures the shapes.
        await answers(10_000)
        steps, started = engine.stats().steps, time.perf_counter()
        completions = await answers(0)
        seconds = time.perf_counter() - started
        figures = {
            "opened_s": round(engine.opening_s, 2),
            "engine_tokens_per_s": round(sum(len(c.token_ids) for c in completions) / seconds, 1),
            "engine_step_ms": round(1000 * seconds / (engine.stats().steps - steps), 2),
            "engine_memory_gb": _memory_gb(setting),
            "engine": list(engine.parts.choices),
        }
    if forward == "module":
        return {f"module_{name}": value for name, value in figures.items()}
    samples = [Sampled(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    (setting.home / "samples").write_bytes(pickle.dumps(samples))
    return figures


def train(setting: Setting) -> Iterator[dict[str, Any]]:
    """Figures as soon as they are known."""
    sizes, case = setting.sizes, setting.case
    # Written by `sample`, in a folder of this benchmark.
    samples: list[Sampled] = pickle.loads((setting.home / "samples").read_bytes())
    config = TrainerConfig.model_validate(
        {
            "device": setting.device,
            "compute_dtype": setting.dtype,
            "lr": 1e-6,
            "lora": {"rank": 16} if case.is_lora else None,
            "router_replay": case.has_experts,
            "max_tokens_per_microbatch": sizes.pass_tokens,
            "gradient_checkpointing": not setting.is_tiny,
            "exactness": "fast",
        }
    )
    if case.is_lora:
        model = PolicyModel.load(setting.home, config, shared_base=setting.base_file)
    else:
        base = map_base(setting.base_file, device=setting.device)
        assert base is not None
        module = module_of(setting.home, base).float().requires_grad_(True)
        model = PolicyModel(module, config)
    batch = _batch(samples)
    yield {"packed": model.is_packed, **_parity(model, batch, config)}
    learner = TrainStep(model, config)
    tokens = sum(len(row) for row in flatten(batch, config))
    times: list[float] = []
    for _ in range(sizes.steps):
        learner.step = 0
        started = time.perf_counter()
        metrics = learner.run(batch).metrics
        times.append(time.perf_counter() - started)
        figures = {"step_s": round(min(times), 3), "first_step_s": round(times[0], 3)}
        figures |= {"trained_tokens_per_s": round(tokens / min(times), 1), "trainer_memory_gb": _memory_gb(setting)}
        for name in ("shared_token_share", *OF_ROUTERS):
            if (value := metrics.get(f"train/{name}")) is not None:
                figures[name] = round(float(value), 6)
        yield figures


def _batch(samples: list[Sampled]) -> TrainingBatch:
    made = []
    for number, one in enumerate(samples):
        prompt, completion = one.prompt, one.completion
        tokens = [*prompt, *completion.token_ids.tolist()]
        mask = np.arange(len(tokens)) >= len(prompt)
        row = TokenRow.of(
            token_ids=tokens,
            logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
            loss_mask=mask,
            versions=np.where(mask, 0, -1),
        )
        if completion.routes is not None:
            row = row.with_columns(routes=with_length(completion.routes, len(tokens)))
        made.append(RolloutSample(sequences=(row,), sampling=SamplingParams(), reward=float(number % 2)))
    groups = tuple(
        PromptGroup(
            id=group_id(TaskId(f"t{n}"), 0), task_id=TaskId(f"t{n}"), draw=0, samples=tuple(made[n : n + SIBLINGS])
        )
        for n in range(0, len(made), SIBLINGS)
    )
    entries = tuple(
        BatchEntry(group_id=group.id, sequence=n, payload_digest=str(n), oldest_version=0)
        for n, group in enumerate(groups)
    )
    return TrainingBatch(manifest=BatchManifest(step=1, entries=entries, digest="families"), groups=groups)


def _parity(model: PolicyModel, batch: TrainingBatch, config: TrainerConfig) -> dict[str, float]:
    """Differences of the logprobs of sampled tokens between engine and trainer."""
    (minibatch, *_) = plan(flatten(batch, config), config, step=1, is_packed=model.is_packed)
    ways = {"": True, "own_routes_": False} if model.replay is not None else {"": True}
    figures = {}
    with torch.no_grad():
        for prefix, is_replayed in ways.items():
            found = [
                np.abs(model.token_logprobs(m, is_replayed=is_replayed)[0].float().cpu().numpy() - m.sampled_logprobs_N)
                for m in minibatch.microbatches
            ]
            differences = np.concatenate(found)
            figures[f"{prefix}logprobs_mean"] = float(differences.mean())
            figures[f"{prefix}logprobs_largest"] = float(differences.max())
    return figures


def _memory_gb(setting: Setting) -> float:
    """Of this process at most, without the shared base; on a CPU, of the whole process."""
    if setting.device == "cpu":
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    return round(torch.cuda.max_memory_allocated() / 1e9, 2)


# --- the process that starts the others ---


def run(setting: Setting, deadline: float) -> dict[str, Any]:
    case = setting.case
    shape = {**TINY, **case.tiny} if setting.is_tiny else case.shape
    config: Any = AutoConfig.for_model(case.model_type, **shape, architectures=None)
    config.save_pretrained(setting.home)
    figures: dict[str, Any] = {"name": setting.name, "lora": case.is_lora}
    arguments = [sys.executable, "-m", "benchmarks.engine.families", "--setting", setting.written(), "--part"]
    owner = subprocess.Popen([*arguments, "own"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    too_late = threading.Timer(max(0.0, deadline - time.monotonic()), owner.kill)
    too_late.start()
    try:
        first = owner.stdout.readline()
        if not first:
            return figures | {"failed": "the process that owns the weights ended, or had no time left"}
        figures["base_gb"] = round(int(first) / 1e9, 2)
        for part in ("sample", "module" if setting.name in OF_MODULE else "train"):
            left = deadline - time.monotonic()
            if left <= 0:
                return figures | {"failed": f"no time was left for {part}"}
            print_status(f"{setting.name}: {part}")
            failure = _run_part([*arguments, part], setting.home / part, left)
            for line in (setting.home / part).read_text(encoding="utf-8").splitlines():
                if line.startswith("{"):  # libraries print, too
                    figures |= json.loads(line)
            if failure is not None:
                return figures | {"failed": f"{part} {failure}"}
    finally:
        too_late.cancel()
        owner.stdin.close()
        try:
            owner.wait(STOP_S)
        except subprocess.TimeoutExpired:
            owner.kill()
            owner.wait()
    return figures


def _run_part(arguments: list[str], output: Path, seconds: float) -> str | None:
    """Why it failed; None if it did not. What it measured before is in its output."""
    with output.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(arguments, stdout=file, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"was ended after {seconds:.0f} s"
    return None if done.returncode == 0 else f"ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--module", action="store_true", help="modules of transformers against fast forwards, instead")
    parser.add_argument("--within", type=float, default=3600.0, metavar="SECONDS")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU; the speeds mean nothing")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("own", "sample", "module", "train"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part is not None:
        setting = Setting.read(chosen.setting)
        if chosen.part == "own":
            own(setting)
        elif chosen.part == "train":
            for measured in train(setting):
                print(json.dumps(measured), flush=True)
        else:
            print(json.dumps(asyncio.run(sample(setting, "module" if chosen.part == "module" else "auto"))))
        return 0
    deadline = time.monotonic() + chosen.within
    figures: list[Figure] = []
    failed: list[dict[str, Any]] = []
    for name in OF_MODULE if chosen.module else chosen.only:
        with tempfile.TemporaryDirectory() as home:
            setting = Setting(
                name=name,
                directory=home,
                device="cpu" if chosen.tiny else "cuda",
                dtype=chosen.dtype,
                is_tiny=chosen.tiny,
                sizes=SMALL_SIZES if chosen.tiny else Sizes(),
            )
            found = run(setting, deadline)
        print_status(json.dumps(found, indent=2))
        if "failed" in found:
            failed.append(found)
        else:
            figures.append(_figure(found))
    code = print_figures(figures, failed=failed)
    return 1 if failed else code


def _figure(found: dict[str, Any]) -> Figure:
    more = {name: value for name, value in found.items() if name != "name"}
    if found["name"] in OF_MODULE:
        ours, peer = found["module_engine_tokens_per_s"], found["engine_tokens_per_s"]
        name = f"module_{found['name']}"
        return Figure(
            name=name, ours=ours, peer=peer, unit="tokens/s", ratio=ours / peer, floor=MODULE_FLOOR, more=more
        )
    ours = found["logprobs_mean"]
    peer = found.get("own_routes_logprobs_mean", ours)
    return Figure(name=found["name"], ours=ours, peer=peer, unit="nats", ratio=peer / max(ours, 1e-12), more=more)


if __name__ == "__main__":
    sys.exit(main())
