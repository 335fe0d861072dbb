"""What speculative decoding brings, and whether it changes a bit.

`python -m benchmarks.engine.drafts [--device cuda --dtype bfloat16]`. A random model with greedy answers soon repeats itself:
nearly all drafts are right, the most that drafts can bring. Sampled at temperature 1 it never repeats: what drafts cost where they
do not help. `drafts_KIND_N`: tokens/s with drafts over without, N requests at once; on a CPU, seconds of the process. On a GPU the
same tokens and logprobs are required to the bit (`unequal` counts answers that are not); a CPU has other last bits for other
numbers of rows, so there only their number is reported.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.models import ONE_MILLION, SMOLLM2_135M, Shape, make_model_dir, publish
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.engine import open_engine

SHAPES = {"1m": ONE_MILLION, "135m": SMOLLM2_135M}
KINDS = {"repeating": 0.0, "random": 1.0}
"""Temperatures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    answers: list[Completion]
    tokens_per_s: float
    accepted: float
    """Share of the drafted tokens that were sampled."""


async def played(
    config: InferenceConfig, home: Path, model: Any, args: argparse.Namespace, *, kind: str, number: int
) -> Played:
    # Of a CPU that others use, too, the seconds of this process count.
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    rng = random.Random(number)
    prompts = [[rng.randrange(3, SHAPES[args.shape].vocab) for _ in range(64)] for _ in range(number)]
    ways = [SamplingParams(max_tokens=args.tokens, temperature=KINDS[kind], seed=seed) for seed in range(len(prompts))]
    async with open_engine(config, home / "model") as engine:
        await engine.load_weights(publish(home / "1.safetensors", model, 1), home / "1.safetensors")
        speeds, answers = list[float](), list[Completion]()
        for _ in range(args.rounds + 1):
            began = clock()
            answers = list(await asyncio.gather(*map(engine.generate, prompts, ways)))
            speeds.append(sum(len(answer.token_ids) for answer in answers) / (clock() - began))
        stats = engine.stats()
    # The first round captures graphs.
    return Played(
        answers=answers,
        tokens_per_s=statistics.median(speeds[1:]),
        accepted=stats.accepted_tokens / max(1, stats.drafted_tokens),
    )


def unequal(found: Played, expected: Played) -> int:
    """Answers with another token or another bit of a logprob."""
    return sum(
        one.token_ids.tobytes() != other.token_ids.tobytes() or one.logprobs.tobytes() != other.logprobs.tobytes()
        for one, other in zip(found.answers, expected.answers, strict=True)
    )


def measure(args: argparse.Namespace, kind: str, number: int, home: Path, model: Any) -> Figure:
    settings: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "threads": 1, "max_running": number}
    settings["max_model_len"] = 64 + args.tokens
    plain, drafted = (
        asyncio.run(played(InferenceConfig(**settings, draft_tokens=most), home, model, args, kind=kind, number=number))
        for most in (0, args.drafts)
    )
    different = unequal(drafted, plain)
    ratio = drafted.tokens_per_s / plain.tokens_per_s
    print_status(
        f"  {kind}, {number} at once: {drafted.tokens_per_s:,.0f} tokens/s with drafts, {plain.tokens_per_s:,.0f} without; "
        f"{drafted.accepted:.2f} of the drafted tokens accepted, {different} answers with other bits"
    )
    return Figure(
        name=f"drafts_{kind}_{number}",
        ours=drafted.tokens_per_s,
        peer=plain.tokens_per_s,
        unit="tokens/s",
        ratio=ratio if args.device == "cpu" or not different else 0.0,
        more={"accepted": round(drafted.accepted, 3), "unequal": different, "shape": args.shape, "device": args.device},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1m", choices=list(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=200, help="Of each answer.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 8, 64])
    args = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        shape: Shape = SHAPES[args.shape]
        model = make_model_dir(home / "model", shape)
        for kind in KINDS:
            figures += [measure(args, kind, number, home, model) for number in args.at_once]
    return print_figures(figures)


if __name__ == "__main__":
    sys.exit(main())
