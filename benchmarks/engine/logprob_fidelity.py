"""The difference of the engine's sampling logprobs from the trainer's: one forward over the whole sequence, without a cache, and
the trainer's head.

`python -m benchmarks.engine.logprob_fidelity [--device cpu|cuda] [--full] [--logit-scale 10]`. Any difference changes the ratio of
new to old policy, which should be one. Random weights have small logits; with a scale of 10 the largest ones are about 20, like
those of trained models.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.models import ONE_MILLION, SMOLLM2_135M, Shape, make_model_dir, opened, publish
from benchmarks.report import Figure, print_figures, print_status
from rollbook.contracts.policy import Completion, SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.trainer.model.token_head import token_head

FLOORS = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest acceptable difference. bfloat16 alone rounds logits of size 8 to 1/32."""


def trainer_logprobs(model: Any, prompt: list[int], completion: Completion, *, device: str) -> np.ndarray[Any, Any]:
    tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=device)
    with torch.no_grad():
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        weight = model.get_output_embeddings().weight
        targets = tokens[0, len(prompt) :]
        logprobs, _ = token_head(hidden, weight, None, targets, None, max_bytes=1 << 28, is_entropy_trained=False)
    found: np.ndarray[Any, Any] = logprobs.float().cpu().numpy()
    return found


async def measure(
    directory: Path, shape: Shape, *, device: str, dtype: str, requests: int, logit_scale: float
) -> dict[str, float]:
    weights = directory / f"{dtype}.safetensors"
    model_dir = directory / f"model-{dtype}"
    model = make_model_dir(model_dir, shape, dtype=getattr(torch, dtype))
    if logit_scale != 1.0:
        with torch.no_grad():
            model.model.norm.weight.mul_(logit_scale)
        model.save_pretrained(model_dir)
    published = publish(weights, model, 1)
    config = InferenceConfig(device=device, dtype=dtype, max_running=64, max_model_len=min(1024, shape.max_len))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, shape.vocab) for _ in range(rng.randint(8, 120))] for _ in range(requests)]
    async with opened(config, model_dir, (published, weights)) as engine:
        choices = engine.parts.choices
        completions = await asyncio.gather(
            *(engine.generate(prompt, SamplingParams(max_tokens=40)) for prompt in prompts)
        )
        greedy = await engine.generate(prompts[0], SamplingParams(max_tokens=32, temperature=0.0))
    plain: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    plain = plain.to(device).eval()
    differences = np.concatenate(
        [
            np.abs(completion.logprobs - trainer_logprobs(plain, prompt, completion, device=device))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    )
    tokens = torch.tensor([[*prompts[0], *greedy.token_ids.tolist()]], device=device)
    with torch.inference_mode():
        most_likely = plain(input_ids=tokens, use_cache=False).logits[0, len(prompts[0]) - 1 : -1].argmax(-1)
    agreed = float((most_likely == tokens[0, len(prompts[0]) :]).float().mean())
    print_status(f"  {dtype}: {'; '.join(choices)}")
    return {
        "tokens": len(differences),
        "max": float(differences.max()),
        "mean": float(differences.mean()),
        "greedy_agreement": agreed,
    }


async def figures(device: str, shape: Shape, *, requests: int = 26, logit_scale: float = 1.0) -> list[Figure]:
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for dtype, floor in FLOORS.items():
            found = await measure(
                Path(scratch), shape, device=device, dtype=dtype, requests=requests, logit_scale=logit_scale
            )
            print_status(
                f"logprob fidelity {dtype:<9} {found['tokens']:.0f} tokens: max {found['max']:.2e}, mean {found['mean']:.2e}, "
                f"greedy tokens that are the module's most likely {found['greedy_agreement']:.0%}"
            )
            # Larger is better: the acceptable difference divided by the measured one.
            ratio = floor / max(found["max"], 1e-12)
            results.append(
                Figure(
                    name=f"logprob_{dtype}",
                    ours=found["max"],
                    peer=floor,
                    unit="max |d|",
                    ratio=ratio,
                    floor=1.0,
                    more=found,
                )
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--full", action="store_true", help="the 135M shape; the default is one million parameters")
    parser.add_argument("--logit-scale", type=float, default=1.0, help="factor of all logits")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    shape = SMOLLM2_135M if options.full else ONE_MILLION
    return print_figures(asyncio.run(figures(options.device, shape, logit_scale=options.logit_scale)))


if __name__ == "__main__":
    sys.exit(main())
