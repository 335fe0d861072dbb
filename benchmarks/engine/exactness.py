"""Whether the logprobs of sampled tokens have the same bits in the engine and in the trainer, and what that costs. On a GPU.

`python -m benchmarks.engine.exactness [--cases 135m 1.5b …] [--tokens 100000]`. The engine samples groups of ragged answers with
shared prompts, further turns that find the ones before in the cache, a cache that is too small for all of them, and an update of
the weights while they run. The trainer computes the logprobs of the same tokens in packed passes that share prompts.
`exact_CASE`: share of the tokens with equal bits, without those that an update met (`mixed`). `cost_CASE`: speed of the default
over `fast`, for sampling and for a training pass. `135m-recompute`: an update computes the keys of running requests again, so all
tokens are compared; what that costs is its speed over that of `135m`. `135m-turns`: conversations of ten turns. `135m-32k`: prompts
of 30,000 tokens.
`--device cpu` runs the same with a tiny model in float32, where bits are not promised: tokens may differ by `CPU_ERROR` there.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.engine.models import publish
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.group import group_id
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams
from rollbook.contracts.task import TaskId
from rollbook.contracts.weights import Adapter, weights_digest
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.inference.weights.safetensors import read_weights
from rollbook.numerics.operations import set_unsplit_products
from rollbook.trainer.config import LoraSettings, TrainerConfig
from rollbook.trainer.data.minibatches import Minibatch, plan_minibatch
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.metrics import mixed_caches
from rollbook.trainer.model.policy_model import PolicyModel

GROUP, PASS_TOKENS = 8, 16_384
CHEAP = 1 / 1.15
CPU_ERROR = 1e-4
"""Largest difference of float32 passes whose sums have other orders."""
OBSERVED = 17
"""Tokens between two turns."""
LONG_SHARE = 0.03
"""Share of the answers that are longer than what one attention program reads."""
SHARED: dict[str, Any] = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: Any
    kv_mb: float
    lora: bool = False
    recomputes: bool = False
    turns: int = 2
    prompt: tuple[int, int] = (8, 400)
    first: tuple[int, int] = (64, 512)
    """Lengths of the first answers; `later`: of the others, except for `LONG_SHARE` of them, which have `long`."""
    later: tuple[int, int] = (32, 128)
    long: int = 1500
    max_len: int = 2560
    running: int = 512


Offer = tuple[Publication, Path, Adapter | None]
"""A publication, its file, and the adapter if it is one."""


OF_135M: dict[str, Any] = {
    **SHARED, "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {
    "135m": Case(config=LlamaConfig(**OF_135M), kv_mb=4000.0),
    "135m-recompute": Case(config=LlamaConfig(**OF_135M), kv_mb=4000.0, recomputes=True),
    "135m-turns": Case(
        config=LlamaConfig(**OF_135M), kv_mb=4000.0, turns=10, first=(32, 128), long=512, max_len=3500,
    ),
    "135m-32k": Case(
        config=LlamaConfig(**{**OF_135M, "max_position_embeddings": 32_768}), kv_mb=12_000.0,
        prompt=(29_000, 30_000), max_len=32_768, running=64,
    ),
    "1.5b": Case(
        config=Qwen2Config(
            vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
            num_key_value_heads=2, tie_word_embeddings=True, **SHARED,
        ),
        kv_mb=5000.0,
    ),
    "qwen3-0.6b": Case(
        config=Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **SHARED,
        ),
        kv_mb=16_000.0,
    ),
    "4b-lora": Case(
        config=Qwen3Config(
            vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **SHARED,
        ),
        kv_mb=20_000.0,
        lora=True,
    ),
}  # fmt: skip


SMALL: dict[str, Any] = {"prompt": (4, 40), "first": (8, 40), "later": (8, 24), "long": 80, "running": 32, "kv_mb": 3.0}
OF_SMALL = LlamaConfig(
    **{**OF_135M, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
       "num_attention_heads": 4, "num_key_value_heads": 2}
)  # fmt: skip


def small(name: str) -> Case:
    """A case for a CPU, with the same parts."""
    case = replace(CASES[name], config=OF_SMALL, max_len=900, **SMALL)
    return replace(case, prompt=(900, 1000), max_len=1200, kv_mb=6.0) if "32k" in name else case


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    prompt: list[int]
    completion: Completion


def dtype_of(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def make_model(case: Case, directory: Path, *, seed: int, device: str) -> None:
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, dtype_of(device)))
    try:
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(case.config)
            for name, parameter in model.named_parameters():
                # Far from uniform distributions; biases and norms that are not 0 and 1.
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)


def draw_adapters(model: PolicyModel, number: int) -> None:
    """Both factors far from zero."""
    random = torch.Generator(device=model.device).manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.02, generator=random)
    model.update_shadow()


def adapter_offers(model: PolicyModel, home: Path) -> list[Offer]:
    offers: list[Offer] = []
    kind = model.publish_adapters()
    for number in (1, 2):
        draw_adapters(model, number)
        file = home / f"adapter-{number}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in model.weights().items()}, file)
        digest = weights_digest(read_weights(file).values())
        publication = Publication(id=PublicationId(number), epoch=1, step=number, digest=digest)
        offers.append((publication, file, Adapter(name=f"policy-v{number}", settings=kind.settings)))
    return offers


def full_offers(home: Path, device: str) -> list[Offer]:
    files = [home / f"{number}.safetensors" for number in (1, 2)]
    dtype = getattr(torch, dtype_of(device))
    models = [AutoModelForCausalLM.from_pretrained(home / f"model-{number}", dtype=dtype) for number in (1, 2)]
    return [(publish(file, model, n), file, None) for n, (file, model) in enumerate(zip(files, models, strict=True), 1)]


async def sampled(
    case: Case, home: Path, offers: Sequence[Offer], *, exactness: str, tokens: int, device: str
) -> tuple[list[Answer], float]:
    """Answers of two turns, and the tokens a second that were sampled."""
    rng, vocab = random.Random(0), case.config.vocab_size
    config = InferenceConfig(
        device=device,
        dtype=dtype_of(device),
        max_running=case.running,
        max_model_len=case.max_len,
        kv_memory_mb=case.kv_mb,
        exactness=exactness,
        kv_after_update="recompute" if case.recomputes else "keep",
    )
    async with open_engine(config, home / "model-1") as engine:
        await engine.load_weights(*offers[0][:2], adapter=offers[0][2])
        print_status(f"  {'; '.join(engine.parts.choices)}")

        async def play(prompt: list[int], lengths: Sequence[int]) -> list[Answer]:
            answers: list[Answer] = []
            for length in lengths:
                if answers:
                    observed = [rng.randrange(3, vocab) for _ in range(OBSERVED)]
                    prompt = [*prompt, *answers[-1].completion.token_ids.tolist(), *observed]
                completion = await engine.generate(prompt, SamplingParams(max_tokens=length))
                answers.append(Answer(prompt=prompt, completion=completion))
            return answers

        plays, planned = [], 0
        while planned < tokens:
            prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(*case.prompt))]
            for _ in range(GROUP):
                later = [rng.randint(*case.later) for _ in range(case.turns - 1)]
                if rng.random() < LONG_SHARE:
                    later[-1] = case.long
                lengths = [rng.randint(*case.first), *later]
                planned += sum(lengths)
                plays.append(play(prompt, lengths))
        began = time.perf_counter()
        running = asyncio.gather(*plays)
        while engine.stats().tokens < planned // 3:  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0.01)
        await engine.load_weights(*offers[1][:2], adapter=offers[1][2])
        answers = [answer for pair in await running for answer in pair]
        seconds = time.perf_counter() - began
        print_status(
            f"  {engine.stats().tokens} tokens, {engine.parts.scheduler.preemptions} preemptions, {seconds:.1f} s"
        )
    return answers, sum(len(answer.completion.token_ids) for answer in answers) / seconds


def rows_of(answers: Sequence[Answer], publication: int, *, recomputes: bool) -> tuple[list[TrainRow], int]:
    """The tokens of one publication, and how many of them an update met. None if running requests are computed again."""
    rows, mixed = [], 0
    for number, answer in enumerate(answers):
        completion, start = answer.completion, len(answer.prompt)
        met = mixed_caches(completion.versions) & (not recomputes)
        mixed += int((met & (completion.versions == publication)).sum())
        chosen = np.flatnonzero((completion.versions == publication) & ~met)
        if not len(chosen):
            continue
        ids = np.array([*answer.prompt, *completion.token_ids.tolist()], dtype=np.int32)
        rows.append(
            TrainRow(
                group_id=group_id(TaskId("benchmark"), 0),
                sample=number,
                inputs=ids[: start + chosen[-1]],
                predicted_at=chosen + start - 1,
                targets=ids[start + chosen],
                sampled_logprobs=completion.logprobs[chosen],
                advantage=1.0,
                temperature=1.0,
                num_tokens=len(ids),
            )
        )
    return rows, mixed


def compared(model: PolicyModel, batch: Minibatch) -> tuple[int, int, float]:
    """Tokens, those with other bits, and the largest difference."""
    count, unequal, largest = 0, 0, 0.0
    for micro in batch.microbatches:
        with torch.no_grad():
            found, _ = model.token_logprobs(micro)
        expected = model.tensor(micro.sampled_logprobs_N)
        count += len(expected)
        unequal += int((found != expected).sum())
        largest = max(largest, float((found - expected).abs().max()))
    return count, unequal, largest


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def pass_seconds(model: PolicyModel, batch: Minibatch) -> float:
    """Forward and backward of a few passes."""
    passes = batch.microbatches[:4]
    for number in range(2):
        if number:
            synchronize(model.device)
            began = time.perf_counter()
        for micro in passes:
            logprobs, _ = model.token_logprobs(micro)
            logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            model.discard_gradients()
    synchronize(model.device)
    return (time.perf_counter() - began) / len(passes)


def measure(name: str, case: Case, home: Path, *, exactness: str, tokens: int, device: str) -> dict[str, Any]:
    config = TrainerConfig(
        device=device,
        compute_dtype=dtype_of(device),
        exactness=exactness,
        max_tokens_per_microbatch=max(PASS_TOKENS, case.max_len),
        threads=4 if device == "cuda" else 1,
        lora=LoraSettings(rank=16) if case.lora else None,
    )
    adapted = PolicyModel.load(home / "model-1", config) if case.lora else None
    offers = full_offers(home, device) if adapted is None else adapter_offers(adapted, home)
    answers, speed = asyncio.run(sampled(case, home, offers, exactness=exactness, tokens=tokens, device=device))
    if device == "cuda":
        set_unsplit_products(is_unsplit=False)
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"case": name, "exactness": exactness, "tokens_s": round(speed)}
    found |= {"tokens": 0, "unequal": 0, "largest": 0.0, "mixed": 0}
    for number in (1, 2):
        model = adapted or PolicyModel.load(home / f"model-{number}", config)
        if adapted is not None:
            draw_adapters(adapted, number)
        rows, mixed = rows_of(answers, number, recomputes=case.recomputes)
        batch = plan_minibatch(rows, config, is_packed=model.is_packed)
        count, unequal, largest = compared(model, batch)
        found["tokens"] += count
        found["unequal"] += unequal
        found["mixed"] += mixed
        found["largest"] = max(found["largest"], largest)
        if number == 1:
            found["pass_s"] = round(pass_seconds(model, batch), 4)
            found["inexact_because"] = model.inexact_because
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    print_status(json.dumps(found))
    return found


def figures_of(name: str, bitwise: dict[str, Any], fast: dict[str, Any], device: str) -> list[Figure]:
    if device == "cpu":
        error = max(bitwise["largest"], 1e-12)
        ratio = CPU_ERROR / error
        return [
            Figure(name=f"exact_{name}", ours=error, peer=CPU_ERROR, unit="nats", ratio=ratio, floor=1.0, more=bitwise)
        ]
    ours, peer = (1.0 - found["unequal"] / found["tokens"] for found in (bitwise, fast))
    sampling, training = bitwise["tokens_s"] / fast["tokens_s"], fast["pass_s"] / bitwise["pass_s"]
    return [
        Figure(name=f"exact_{name}", ours=ours, peer=peer, unit="share", ratio=ours, floor=1.0, more=bitwise),
        Figure(
            name=f"cost_sampling_{name}",
            ours=bitwise["tokens_s"],
            peer=fast["tokens_s"],
            unit="tokens/s",
            ratio=sampling,
            floor=CHEAP,
        ),
        Figure(
            name=f"cost_training_{name}",
            ours=bitwise["pass_s"],
            peer=fast["pass_s"],
            unit="s a pass",
            ratio=training,
            floor=CHEAP,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    figures = []
    for name in args.cases:
        case = CASES[name] if args.device == "cuda" else small(name)
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            for number in (1,) if case.lora else (1, 2):
                make_model(case, home / f"model-{number}", seed=number, device=args.device)
            bitwise, fast = (
                measure(name, case, home, exactness=exactness, tokens=args.tokens, device=args.device)
                for exactness in ("bitwise", "fast")
            )
        figures += figures_of(name, bitwise, fast, args.device)
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
