"""Our losses beside TRL's own trainer, in one process: the same model, the same rows. Run by `.venvs/trl`; prints one JSON line.

TRL's value and gradient come from its `GRPOTrainer._compute_loss`, ours from a whole step. Old logprobs differ from the current
ones, so that clips bite; rows have different lengths, so that reductions differ.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollbook.contracts.group import GroupId
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.rows import TrainRow
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig
from rollbook.trainer.step import TrainStep

LONGEST, PROMPT, ROWS = 9, 4, 6
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"loss": "grpo", "reduction": "sequence_mean"}),
    "grpo_token_mean": ({"loss_type": "bnpo"}, {"loss": "grpo", "reduction": "token_mean"}),
    "grpo_kl": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
        {"loss": "grpo", "reduction": "sequence_mean", "kl_coef": 0.1, "kl_estimator": "k3"},
    ),
    "grpo_kl_weighted": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
        {"loss": "grpo", "reduction": "sequence_mean", "kl_coef": 0.1, "kl_estimator": "k3_weighted"},
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss": "dr_grpo", "reduction_length": LONGEST}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.6}, {"loss": "dapo", "dual_clip": 1.6}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
        {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.08},
    ),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo", "reduction": "sequence_mean"}),
    "grpo_off_policy_mask": (
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        {"loss": "grpo", "reduction": "sequence_mean", "off_policy_mask": 0.05},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, {"loss": "cispo", "clip_high": 0.3}),
}


def problem(vocabulary: int) -> tuple[list[TrainRow], dict[str, torch.Tensor]]:
    """The same rows as our step takes them and as TRL does: prompts of one length, completions padded on the right."""
    rng = np.random.default_rng(11)
    rows = []
    completion, mask, old = (np.zeros((ROWS, LONGEST)) for _ in range(3))
    prompts = rng.integers(4, vocabulary, (ROWS, PROMPT))
    advantages = rng.normal(size=ROWS)
    for n, length in enumerate(rng.permutation(np.arange(LONGEST - ROWS + 1, LONGEST + 1))):
        ids = np.concatenate([prompts[n], rng.integers(4, vocabulary, length)]).astype(np.int32)
        logprobs = -np.log(vocabulary) + rng.normal(scale=0.4, size=length)
        completion[n, :length], mask[n, :length], old[n, :length] = ids[PROMPT:], 1, logprobs
        rows.append(
            TrainRow(
                group_id=GroupId(f"t{n}@0"),
                sample=n,
                inputs=ids[:-1],
                predicted_at=np.arange(PROMPT - 1, PROMPT + length - 1),
                targets=ids[PROMPT:],
                sampled_logprobs=logprobs.astype(np.float32),
                advantage=float(advantages[n]),
                temperature=1.0,
            )
        )
    return rows, {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.tensor(completion, dtype=torch.long),
        "completion_mask": torch.tensor(mask, dtype=torch.long),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
        "old_per_token_logps": torch.tensor(old, dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(mask.sum())),
    }


def theirs(
    model_dir: Path, out: Path, settings: dict[str, Any], inputs: dict[str, torch.Tensor], reference: Any
) -> Any:
    arguments = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=ROWS,
        num_generations=2,
        max_completion_length=LONGEST,
        bf16=False,
        **{"beta": 0.0, **settings},
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1 2"}] * ROWS),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
    )
    trainer.model.eval()  # no dropout, no scaling for accumulated passes
    given = dict(inputs)
    if settings.get("beta"):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        with torch.no_grad():
            table = torch.log_softmax(reference(input_ids=ids).logits[:, PROMPT - 1 : -1], -1)
        given["ref_per_token_logps"] = table.gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)
    loss = trainer._compute_loss(trainer.model, given)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def ours(model_dir: Path, settings: dict[str, Any], rows: list[TrainRow], reference: Any) -> Any:
    config = TrainerConfig.model_validate(
        # Old logprobs are those that came with the tokens: what TRL is handed too.
        {"lr": 1e-9, "max_grad_norm": 1e9, "old_logprobs": "engine", "max_tokens_per_microbatch": 30, **settings}
    )
    frozen = PolicyModel(copy.deepcopy(reference), config, is_reference=True) if config.kl_coef else None
    learner = TrainStep(PolicyModel.load(model_dir, config), config, reference=frozen)
    report = learner.train_rows(rows, step=1)
    means = {
        name: learner.optimizer.state[parameter]["exp_avg"] / (1 - config.betas[0])
        for name, parameter in learner.model.module.named_parameters()
    }
    return report.metrics["train/loss"], means


def main() -> int:
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        build = ModelBuildConfig(
            hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=24, max_position_embeddings=64,
            initializer_range=0.3, vocabulary=tuple(str(n) for n in range(12)),
        )  # fmt: skip
        model_dir = prepare_model_directory(ModelConfig(build=build), Path(scratch) / "model", seed=0)
        other_dir = prepare_model_directory(ModelConfig(build=build), Path(scratch) / "other", seed=1)
        reference = AutoModelForCausalLM.from_pretrained(other_dir, dtype=torch.float32).eval()
        rows, inputs = problem(16)
        for name, (trl_settings, our_settings) in CASES.items():
            their_loss, their_grad = theirs(model_dir, Path(scratch) / "out", trl_settings, inputs, reference)
            our_loss, our_grad = ours(model_dir, our_settings, rows, reference)
            largest = max(float((their_grad[n] - our_grad[n]).abs().max()) for n in their_grad)
            scale = max(float(grad.abs().max()) for grad in their_grad.values())
            found[name] = {"trl": their_loss, "ours": our_loss, "gradient_difference": largest / scale}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
