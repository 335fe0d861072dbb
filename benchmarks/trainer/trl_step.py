"""Compares our training step with TRL's on one CPU thread, in one process. Run by `.venvs/trl`; prints one JSON line.

Both train the same rows with the same loss (clipped ratio, token mean), float32 weights and AdamW. TRL pads completions to the
longest, as its own collation does. Generation and rewards are excluded on both sides.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trainer.step import CASES, PROMPT_TOKENS, OurStep, random_batch, settings
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.model_directory import build_tokenizer
from rollbook.trainer.model_config import ModelBuildConfig

REPEATS = 5


def trl_step(scratch: Path, rows: list[Any], config: Any) -> Any:
    longest = max(len(row.targets) for row in rows)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(config),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(scratch),
            use_cpu=True,
            report_to=[],
            bf16=False,
            loss_type="bnpo",
            per_device_train_batch_size=len(rows),
            num_generations=8,
            max_completion_length=longest,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rows)),
        processing_class=build_tokenizer(ModelBuildConfig(vocabulary=("a",))),
    )
    trainer.model.eval()
    completion, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for n, row in enumerate(rows):
        completion[n, : len(row.targets)], mask[n, : len(row.targets)] = row.targets, 1
    inputs = {
        "prompt_ids": torch.tensor(np.stack([row.inputs[:PROMPT_TOKENS] for row in rows]).astype(np.int64)),
        "prompt_mask": torch.ones(len(rows), PROMPT_TOKENS, dtype=torch.long),
        "completion_ids": torch.from_numpy(completion),
        "completion_mask": torch.from_numpy(mask),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(mask.sum())),
    }
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-5, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> int:
    torch.set_num_threads(1)
    case = CASES["tiny"]
    batch = random_batch(case, case.config().vocab_size)
    config = settings(case, "cpu", threads=1)
    rows = flatten(batch, config)
    tokens = sum(len(row) for row in rows)
    with tempfile.TemporaryDirectory() as scratch:
        sides = {"ours": OurStep(case, config, batch), "trl": trl_step(Path(scratch), rows, case.config())}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(REPEATS + 1):
            for name, step in sides.items():
                started = time.process_time()
                step()
                if number:  # the first is the warm-up
                    seconds[name].append(time.process_time() - started)
    best = {name: min(values) for name, values in seconds.items()}
    sys.stdout.write(json.dumps({"tokens": tokens, "cpu_seconds": best, "ratio": best["trl"] / best["ours"]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
