"""TRL's own GRPO on a file of tasks. Run by `.venvs/trl`; saves the model and prints the mean reward of each step as a JSON line.

Settings that are not named here are TRL's defaults.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learning.rollout import last_number


def is_right(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
    return [float(last_number(reply[0]["content"]) == right) for reply, right in zip(completions, answer, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True, help="completions of one prompt")
    parser.add_argument("--max-tokens", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.tasks.read_text(encoding="utf-8").splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=is_right,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
        ),
        args=GRPOConfig(
            output_dir=str(args.out),
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            seed=args.seed,
            max_steps=args.steps,
            per_device_train_batch_size=args.groups * args.samples,
            num_generations=args.samples,
            max_completion_length=args.max_tokens,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            loss_type="grpo",
            beta=0.0,
        ),
    )
    trainer.train()
    trainer.save_model(str(args.out))
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    sys.stdout.write(json.dumps(rewards) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
