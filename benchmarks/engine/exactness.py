"""Whether the logprobs of sampled tokens have the same bits in the engine and in the trainer, and what that costs. On a GPU.

`python -m benchmarks.engine.exactness [--cases 135m 1.5b …] [--tokens 100000]`. The engine samples groups of ragged answers with
shared prompts, a second turn that finds its first one in the cache, a cache that is too small for all of them, and an update of the
weights while they run. The trainer computes the logprobs of the same tokens in packed passes that share prompts.
`exact_CASE`: share of the tokens with equal bits, without those that an update met. `cost_CASE`: speed of the default over `fast`,
for sampling and for a training pass.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from rollbook.trainer.data.minibatches import Minibatch, TrainRow, plan_minibatch
from rollbook.trainer.metrics import mixed_caches
from rollbook.trainer.model.policy_model import PolicyModel

GROUP, MAX_LEN, PASS_TOKENS = 8, 2560, 16_384
CHEAP = 1 / 1.15
LONG_SHARE = 0.03
"""Share of the answers that are longer than what one attention program reads."""
SHARED: dict[str, Any] = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: Any
    kv_mb: float
    lora: bool = False


Offer = tuple[Publication, Path, Adapter | None]
"""A publication, its file, and the adapter if it is one."""


CASES = {
    "135m": Case(
        config=LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True, **SHARED,
        ),
        kv_mb=4000.0,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    prompt: list[int]
    completion: Completion


def make_model(case: Case, directory: Path, *, seed: int) -> None:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(case.config)  # type: ignore[no-untyped-call]  # untyped there
            for name, parameter in model.named_parameters():
                # Far from uniform distributions; biases and norms that are not 0 and 1.
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)


def draw_adapters(model: PolicyModel, number: int) -> None:
    """Both factors far from zero."""
    random = torch.Generator(device="cuda").manual_seed(number)
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


def full_offers(home: Path) -> list[Offer]:
    files = [home / f"{number}.safetensors" for number in (1, 2)]
    models = [AutoModelForCausalLM.from_pretrained(home / f"model-{number}", dtype=torch.bfloat16) for number in (1, 2)]
    return [(publish(file, model, n), file, None) for n, (file, model) in enumerate(zip(files, models, strict=True), 1)]


async def sampled(
    case: Case, home: Path, offers: Sequence[Offer], *, exactness: str, tokens: int
) -> tuple[list[Answer], float]:
    """Answers of two turns, and the tokens a second that were sampled."""
    rng, vocab = random.Random(0), case.config.vocab_size
    config = InferenceConfig(
        device="cuda",
        dtype="bfloat16",
        max_running=512,
        max_model_len=MAX_LEN,
        kv_memory_mb=case.kv_mb,
        exactness=exactness,
    )
    async with open_engine(config, home / "model-1") as engine:
        await engine.load_weights(*offers[0][:2], adapter=offers[0][2])
        print_status(f"  {'; '.join(engine.parts.choices)}")

        async def play(prompt: list[int], lengths: tuple[int, int]) -> list[Answer]:
            first = await engine.generate(prompt, SamplingParams(max_tokens=lengths[0]))
            second = [*prompt, *first.token_ids.tolist(), *(rng.randrange(3, vocab) for _ in range(17))]
            completion = await engine.generate(second, SamplingParams(max_tokens=lengths[1]))
            return [Answer(prompt=prompt, completion=first), Answer(prompt=second, completion=completion)]

        plays, planned = [], 0
        while planned < tokens:
            prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(8, 400))]
            for _ in range(GROUP):
                lengths = rng.randint(64, 512), 1500 if rng.random() < LONG_SHARE else rng.randint(32, 128)
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


def rows_of(answers: Sequence[Answer], publication: int) -> tuple[list[TrainRow], int]:
    """The tokens of one publication, and how many of them an update met."""
    rows, mixed = [], 0
    for number, answer in enumerate(answers):
        completion, start = answer.completion, len(answer.prompt)
        met = mixed_caches(completion.versions)
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


def pass_seconds(model: PolicyModel, batch: Minibatch) -> float:
    """Forward and backward of a few passes."""
    passes = batch.microbatches[:4]
    for number in range(2):
        if number:
            torch.cuda.synchronize()
            began = time.perf_counter()
        for micro in passes:
            logprobs, _ = model.token_logprobs(micro)
            logprobs.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            model.discard_gradients()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / len(passes)


def measure(name: str, case: Case, home: Path, *, exactness: str, tokens: int) -> dict[str, Any]:
    config = TrainerConfig(
        device="cuda",
        compute_dtype="bfloat16",
        exactness=exactness,
        max_tokens_per_microbatch=PASS_TOKENS,
        threads=4,
        lora=LoraSettings(rank=16) if case.lora else None,
    )
    adapted = PolicyModel.load(home / "model-1", config) if case.lora else None
    offers = full_offers(home) if adapted is None else adapter_offers(adapted, home)
    answers, speed = asyncio.run(sampled(case, home, offers, exactness=exactness, tokens=tokens))
    set_unsplit_products(is_unsplit=False)
    torch.cuda.empty_cache()
    found: dict[str, Any] = {"case": name, "exactness": exactness, "tokens_s": round(speed)}
    found |= {"tokens": 0, "unequal": 0, "largest": 0.0, "mixed": 0}
    for number in (1, 2):
        model = adapted or PolicyModel.load(home / f"model-{number}", config)
        if adapted is not None:
            draw_adapters(adapted, number)
        rows, mixed = rows_of(answers, number)
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
        torch.cuda.empty_cache()
    print_status(json.dumps(found))
    return found


def figures_of(name: str, bitwise: dict[str, Any], fast: dict[str, Any]) -> list[Figure]:
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
    args = parser.parse_args()
    figures = []
    for name in args.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            for number in (1,) if case.lora else (1, 2):
                make_model(case, home / f"model-{number}", seed=number)
            bitwise, fast = (
                measure(name, case, home, exactness=exactness, tokens=args.tokens) for exactness in ("bitwise", "fast")
            )
        figures += figures_of(name, bitwise, fast)
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
