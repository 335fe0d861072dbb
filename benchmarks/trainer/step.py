"""Compares the training step on packed sequences with a plain padded Hugging Face loop, one after the other in one process.

    python -m benchmarks.trainer.step                      on a CPU: tiny models, and TRL's step if `.venvs/trl` exists
    python -m benchmarks.trainer.step --device cuda        a 135M and a 1.5B model with random weights

Lengths are spread evenly up to the longest, so padding to the longest wastes half of the tokens. Both train the same tokens with
the same loss, float32 weights and AdamW. The plain loop computes under autocast and pads every pass to the longest of the batch.
`sorted` is that loop with rows ordered by length, each pass padded to its own longest row. Rows of the `-groups` cases share a
prompt in groups of eight, as in GRPO; in the others nothing is shared. `fast` is our step with `trainer.exactness = "fast"`.
`--profile` prints where the packed step spends its time: its operations on the device, and how long the device waits for them.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.utils import logging as transformers_logging

from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.policy import SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import RolloutSample, TokenRow
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.flops import peak_flops, training_flops
from rollbook.trainer.model.packed_attention import HAS_VARLEN
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import digest_of
from rollbook.trainer.step import TrainStep

PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    config: Callable[[], Any]
    sequences: int
    longest: int
    tokens_per_pass: int
    shortest: int = PROMPT_TOKENS + 1
    repeats: int = 4
    shared_prompt: int = 0
    """Tokens that the rows of a group start with, in addition to their lengths."""


def llama(*, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int) -> Any:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def smollm2_135m() -> Any:
    return llama(hidden=576, layers=30, heads=9, kv_heads=3, inner=1536, vocabulary=49_152)


def qwen2_1_5b() -> Any:
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


CASES = {
    "tiny": Case(
        name="tiny",
        config=lambda: llama(hidden=128, layers=4, heads=4, kv_heads=2, inner=352, vocabulary=1024),
        sequences=16,
        longest=256,
        tokens_per_pass=2048,
        repeats=3,
    ),
    "tiny-groups": Case(
        name="tiny-groups",
        config=lambda: llama(hidden=128, layers=4, heads=4, kv_heads=2, inner=352, vocabulary=1024),
        sequences=64,
        shortest=16,
        longest=48,
        shared_prompt=256,
        tokens_per_pass=16_384,
        repeats=3,
    ),
    "135m": Case(
        name="135m",
        config=smollm2_135m,
        sequences=128,
        longest=1024,
        tokens_per_pass=16_384,
    ),
    # Like the arithmetic run: many short rows of similar length, in few large passes.
    "135m-short": Case(
        name="135m-short", config=smollm2_135m, sequences=512, shortest=100, longest=200, tokens_per_pass=65_536
    ),
    "135m-groups": Case(
        name="135m-groups",
        config=smollm2_135m,
        sequences=512,
        shortest=16,
        longest=48,
        shared_prompt=64,
        tokens_per_pass=65_536,
    ),
    # Like the runs of `benchmarks.loop.defaults`: answers of 64 to 512 tokens.
    "135m-answers": Case(
        name="135m-answers",
        config=smollm2_135m,
        sequences=128,
        shortest=64,
        longest=512,
        shared_prompt=48,
        tokens_per_pass=65_536,
    ),
    "1.5b": Case(name="1.5b", config=qwen2_1_5b, sequences=64, longest=1024, tokens_per_pass=8192, repeats=3),
}


def random_batch(case: Case, vocabulary: int) -> TrainingBatch:
    """Groups of eight, with evenly spread lengths in random order."""
    rng = np.random.default_rng(7)
    lengths = rng.permutation(np.linspace(case.shortest, case.longest, case.sequences).astype(int))
    samples = []
    prompts = rng.integers(3, vocabulary, (case.sequences // 8, case.shared_prompt))
    for number, length in enumerate(lengths):
        mask = np.arange(case.shared_prompt + length) >= case.shared_prompt + PROMPT_TOKENS
        row = TokenRow.of(
            token_ids=np.concatenate([prompts[number // 8], rng.integers(3, vocabulary, length)]),
            logprobs=np.where(mask, -np.log(vocabulary), 0.0),
            loss_mask=mask,
            versions=np.where(mask, 0, -1),
        )
        samples.append(
            RolloutSample(sequences=(row,), sampling=SamplingParams(temperature=1.0), reward=float(number % 2))
        )
    groups = tuple(
        PromptGroup(id=group_id(TaskId(f"t{n}"), 0), task_id=TaskId(f"t{n}"), draw=0, samples=tuple(samples[n : n + 8]))
        for n in range(0, case.sequences, 8)
    )
    entries = tuple(
        BatchEntry(group_id=group.id, sequence=n, payload_digest=str(n), oldest_version=0)
        for n, group in enumerate(groups)
    )
    return TrainingBatch(manifest=BatchManifest(step=1, entries=entries, digest="bench"), groups=groups)


def new_model(case: Case, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(case.config())


class PlainLoop:
    """The obvious implementation: pad to the longest, autocast, full logits, the clipped ratio, AdamW."""

    def __init__(self, case: Case, config: TrainerConfig, batch: TrainingBatch, *, is_sorted: bool = False) -> None:
        self._case, self._config = case, config
        self._model = new_model(case, config.device).float().train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=config.lr or 1e-6, fused=True)
        rows = flatten(batch, config)
        self._total = sum(row.num_trained for row in rows)
        if is_sorted:
            rows = sorted(rows, key=len, reverse=True)
        longest = max(len(row) for row in rows)
        self._passes = []
        start = 0
        while start < len(rows):
            width = len(rows[start]) if is_sorted else longest
            part = rows[start : start + max(1, case.tokens_per_pass // width)]
            start += len(part)
            ids, targets = np.zeros((len(part), width), np.int64), np.zeros((len(part), width), np.int64)
            mask, weight = np.zeros((len(part), width), np.int64), np.zeros((len(part), width), np.float32)
            for line, row in enumerate(part):
                ids[line, : len(row)], mask[line, : len(row)] = row.inputs, 1
                targets[line, row.predicted_at], weight[line, row.predicted_at] = row.targets, row.advantage
            self._passes.append(tuple(torch.from_numpy(a).to(config.device) for a in (ids, mask, targets, weight)))

    def __call__(self) -> float:
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), device=self._config.device)
        for ids, mask, targets, advantages in self._passes:
            with torch.autocast(
                self._config.device, dtype=torch.bfloat16, enabled=self._config.compute_dtype == "bfloat16"
            ):
                logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            current = torch.log_softmax(logits.float(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            ratio = torch.exp(current - current.detach())
            loss = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).sum() / self._total
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return float(loss_sum)


class OurStep:
    def __init__(self, case: Case, config: TrainerConfig, batch: TrainingBatch) -> None:
        self._batch = batch
        self.learner = TrainStep(PolicyModel(new_model(case, config.device), config), config)

    def __call__(self) -> float:
        self.learner.step = 0
        return float(self.learner.run(self._batch).metrics["train/grad_norm"] or 0.0)


def time_step(step: Callable[[], float], *, repeats: int, device: str) -> tuple[float, float | None]:
    """Seconds of the fastest repeat after two warm-up steps, and the peak device memory in GB.

    CPU seconds on a CPU, so that other processes on the machine do not count.
    """
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        started = clock()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            times.append(clock() - started)
    return min(times), torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None


def settings(case: Case, device: str, **others: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "device": device,
            "compute_dtype": "bfloat16" if device == "cuda" else "float32",
            "max_tokens_per_microbatch": case.tokens_per_pass,
            "lr": 1e-5,
            "threads": torch.get_num_threads(),
            **others,
        }
    )


def logprobs_of(
    model: PolicyModel, rows: list[Any], config: TrainerConfig, *, is_packed: bool
) -> dict[Any, torch.Tensor]:
    """Logprobs by the targets of a row, which are unique."""
    found = {}
    with torch.no_grad():
        for part in [rows] if is_packed else [[row] for row in rows]:
            for micro in plan(part, config, step=1, is_packed=is_packed)[0].microbatches:
                values = model.token_logprobs(micro)[0].double().cpu()
                for number in range(micro.num_rows):
                    at = np.flatnonzero(micro.row_of_N == number)
                    found[tuple(micro.targets_N[at].tolist())] = values[at]
    return found


def compare_logprobs(case: Case, device: str, batch: TrainingBatch) -> None:
    """Print how far the logprobs of a packed pass differ from those of each row alone in the same model.

    For comparison, print the error of bfloat16 itself: each row alone in bfloat16 and in float32.
    """
    module = new_model(case, device)
    with torch.no_grad():
        for parameter in module.parameters():
            # Larger weights than the initial ones, so that attention affects the predictions.
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    config = settings(case, device)
    rows = flatten(batch, config)[:16]
    model = PolicyModel(module, config)
    packed = logprobs_of(model, rows, config, is_packed=True)
    alone = logprobs_of(model, rows, config, is_packed=False)
    exact_config = settings(case, device, compute_dtype="float32")
    exact = logprobs_of(PolicyModel(module, exact_config), rows, exact_config, is_packed=False)
    compared = {
        "packed to alone": (packed, alone),
        "alone to float32": (alone, exact),
        "packed to float32": (packed, exact),
    }
    for name, (one, other) in compared.items():
        differences = torch.cat([(one[key] - other[key]).abs() for key in other])
        print_status(
            f"{case.name}: logprobs {name}: mean {float(differences.mean()):.2e}, at most {float(differences.max()):.2e}"
        )
    copies: list[Any] = []
    for _ in range(4):
        started = time.perf_counter()
        copies = [*copies[-1:], model.snapshot()]
        copied_at = time.perf_counter()
        digest_of(copies[-1])
        digested = time.perf_counter() - copied_at
        print_status(
            f"{case.name}: weights copied to main memory in {copied_at - started:.3f} s, digested in {digested:.3f} s"
        )
    print_status(
        f"{case.name}: packed: {model.is_packed}; attention kernel: {model.attention_kernel}; varlen available: {HAS_VARLEN}"
    )


def profile(step: Callable[[], float], device: str) -> None:
    """Print how long one step and its operations on the device take, and which take most. The profiler itself slows the step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started

    def own_us(event: Any) -> float:
        return float(event.self_device_time_total if device == "cuda" else event.self_cpu_time_total)

    events = sorted((event for event in profiler.key_averages() if own_us(event)), key=own_us, reverse=True)
    busy, count = sum(map(own_us, events)) / 1e6, sum(event.count for event in events)
    print_status(f"      {seconds:.3f} s with the profiler; {count} operations on the {device} take {busy:.3f} s")
    for event in events[:14]:
        print_status(f"      {own_us(event) / 1e3:8.1f} ms {event.count:>6} x {event.key[:90]}")


def compare(case: Case, device: str, *, is_profiled: bool) -> list[Figure]:
    config = settings(case, device)
    batch = random_batch(case, case.config().vocab_size)
    compare_logprobs(case, device, batch)
    rows = flatten(batch, config)
    tokens = sum(len(row) for row in rows)
    share = 1 - tokens / (len(rows) * max(len(row) for row in rows))
    sides: dict[str, Callable[[], Callable[[], float]]] = {
        "packed": lambda: OurStep(case, config, batch),
        "fast": lambda: OurStep(case, settings(case, device, exactness="fast"), batch),
        "plain": lambda: PlainLoop(case, config, batch),
        "sorted": lambda: PlainLoop(case, config, batch, is_sorted=True),
        "ours_padded": lambda: OurStep(case, settings(case, device, packing="padded", pass_cost_tokens=10**9), batch),
        "recomputing": lambda: OurStep(case, settings(case, device, gradient_checkpointing=True), batch),
    }
    if case.name in ("135m-short", "135m-groups", "135m-answers", "tiny-groups"):
        del sides["ours_padded"], sides["recomputing"]
    if device == "cpu":  # where `exactness` changes nothing
        del sides["fast"]
    seconds: dict[str, float] = {}
    memory: dict[str, float | None] = {}
    flops = 0.0
    for name, make in sides.items():
        try:
            step = make()
            seconds[name], memory[name] = time_step(step, repeats=case.repeats, device=device)
            if is_profiled and name == "packed":
                profile(step, device)
            if isinstance(step, OurStep) and name == "packed":
                model = step.learner.model
                (minibatch,) = plan(rows, config, step=1, is_packed=True)
                flops = training_flops(minibatch.microbatches, model.shape)
            del step
        except Exception:  # one variant may not fit into memory; the others are still measured
            print_status(f"{case.name} {name} failed:\n{traceback.format_exc()[-1500:]}")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
        if name in seconds:
            mfu = f"{100 * flops / seconds[name] / peak:5.1f} % MFU" if peak else "MFU unknown"
            used = f"{memory[name]:6.1f} GB" if memory[name] is not None else ""
            print_status(
                f"{case.name:>5} {name:<12} {seconds[name] * 1e3:8.1f} ms {tokens / seconds[name]:>10.0f} tokens/s {mfu} {used}"
            )
    if not {"packed", "plain"} <= seconds.keys():
        return []
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    return [
        Figure(
            name=f"packed_over_padded_{case.name}",
            ours=tokens / seconds["packed"],
            peer=tokens / seconds["plain"],
            unit="tokens/s",
            ratio=seconds["plain"] / seconds["packed"],
            # Short rows of similar length need little padding, so packing gains nothing there.
            floor=1.8 if device == "cuda" and share > 0.45 else None,
            more={
                "padding_share_of_peer": round(share, 3),
                "ratio_to_sorted": round(seconds["sorted"] / seconds["packed"], 3) if "sorted" in seconds else None,
                "tokens_a_step": tokens,
                "mfu": round(flops / seconds["packed"] / peak, 4) if peak else None,
                "mfu_peer": round(flops / seconds["plain"] / peak, 4) if peak else None,
                "seconds": {name: round(value, 4) for name, value in seconds.items()},
                "peak_memory_gb": {name: value and round(value, 2) for name, value in memory.items()},
            },
        )
    ]


def compare_with_trl() -> list[Figure]:
    """Compare with TRL's step on one CPU thread, in TRL's virtual environment. Skipped with a message if there is none."""
    python = Path(__file__).parents[2] / ".venvs" / "trl" / "bin" / "python"
    if not python.exists():
        print_status("SKIPPED trl_step_cpu: there is no .venvs/trl; create it with sh scripts/trl_venv.sh")
        return []
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [str(python), "-m", "benchmarks.trainer.trl_step"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        print_status(f"SKIPPED trl_step_cpu: it failed\n{done.stderr[-1500:]}")
        return []
    found = json.loads(done.stdout.splitlines()[-1])
    seconds, tokens = found["cpu_seconds"], found["tokens"]
    return [
        Figure(
            name="trl_step_cpu",
            ours=tokens / seconds["ours"],
            peer=tokens / seconds["trl"],
            unit="tokens/s",
            ratio=found["ratio"],
            floor=1.0,
            more={"cpu_seconds": seconds, "tokens_a_step": tokens},
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", default=None, help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("--profile", action="store_true", help="where the packed step spends its time")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    names = (
        args.models
        or ("135m,135m-short,135m-groups,135m-answers,1.5b" if args.device == "cuda" else "tiny,tiny-groups")
    ).split(",")
    figures: list[Figure] = []
    for name in names:
        figures += compare(CASES[name], args.device, is_profiled=args.profile)
    if args.device == "cpu":
        figures += compare_with_trl()
    return print_figures(figures, device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu")


if __name__ == "__main__":
    sys.exit(main())
