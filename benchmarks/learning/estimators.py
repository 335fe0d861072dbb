"""Advantages and losses compared on a walk of six turns: learning over ten seeds, and gradients on one recorded stream.

python -m benchmarks.learning.estimators --out docs/results/estimators

A policy of 10,000 weights sees one of twelve states, replies with one of six words, and moves to a state that depends on both. One
word is right in each state, and a reward of 1 is paid for it in its turn. For `gdpo`, the first and the last three turns are two
reward functions. Sampling is synchronous and in this process; advantages, losses and steps are those of the trainer.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import print_status
from rollbook.contracts.batch import BatchEntry, BatchManifest, TrainingBatch
from rollbook.contracts.group import PromptGroup, group_id
from rollbook.contracts.task import TaskId
from rollbook.contracts.trajectory import SCORE_PREFIX, RolloutSample, TokenRow, TurnMark
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import plan_minibatch
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.loss_settings import LOSS_DEFAULTS
from rollbook.trainer.losses.inputs import LossInputs
from rollbook.trainer.losses.pass_loss import loss_settings
from rollbook.trainer.losses.registry import LOSSES
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model_config import SPECIAL_TOKENS, ModelBuildConfig, ModelConfig
from rollbook.trainer.step import TrainStep

STATES, WORDS, TURNS = 12, 6, 6
GROUPS, SAMPLES = 4, 8
BOS, FIRST = 1, len(SPECIAL_TOKENS)
ADVANTAGES = (
    *("group", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gdpo"),
    *("turn_group", "turn_rloo", "gigpo"),
)
LEARNING = ("group", "rloo", "turn_group", "turn_rloo", "gigpo")
"""Those that are trained from the start."""
LAG = 2
"""Steps between the policy that sampled a batch and the one whose gradient is measured."""
REFERENCE_EPISODES = 4096
BATCHES = 16
RIGHT = 0.9
"""How likely the teacher of the recorded stream says the right word. All other tokens are equally likely."""
MIN_ESS = 0.5
"""A replay of recorded batches ends where they have less to say about the current policy."""
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12)
"""Quantiles of Student's distribution for a 95 % interval of the mean of 2, 3, … values; the last one for more."""


def settings(**changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"lr": 6e-3, "loss": "importance_sampling", "weight_decay": 0.0, **changes})


def build(folder: Path, *, seed: int, width: int = 24) -> Path:
    words = tuple(f"s{n}" for n in range(STATES)) + tuple(f"w{n}" for n in range(WORDS))
    shape = ModelBuildConfig(
        hidden_size=width,
        layers=2,
        heads=2,
        kv_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        vocabulary=words,
        chat_template="{% for m in messages %}{{ m.content }} {% endfor %}",
    )
    return prepare_model_directory(ModelConfig(build=shape), folder, seed=seed)


@torch.no_grad()
def play(
    learner: TrainStep, starts: NDArray[np.int64], *, samples: int, step: int, seed: int, is_late: bool = False
) -> TrainingBatch:
    """One group for each start, sampled with the current weights.

    `is_late`: episodes have three to six turns, whatever their words, and the whole reward is paid in the last one.
    """
    generator = torch.Generator().manual_seed(seed)
    states = np.repeat(starts, samples)
    count = len(states)
    tokens = np.full((count, 1), BOS, dtype=np.int64)
    logprobs, rewards, visited = [], [], []
    for _ in range(TURNS):
        tokens = np.concatenate([tokens, FIRST + states[:, None]], axis=1)
        logits = learner.model.module(input_ids=torch.from_numpy(tokens), use_cache=False).logits[:, -1].float()
        chances = torch.log_softmax(logits, dim=-1)
        chosen = torch.multinomial(chances.exp(), 1, generator=generator)
        logprobs.append(chances.gather(1, chosen)[:, 0].numpy())
        word = chosen[:, 0].numpy() - FIRST - STATES
        rewards.append((word == (5 * states + 2) % WORDS).astype(np.float64))
        visited.append(states)
        tokens = np.concatenate([tokens, chosen.numpy()], axis=1)
        states = (states + word % WORDS + 1) % STATES
    mask = np.zeros(tokens.shape[1], dtype=np.bool_)
    mask[2::2] = True
    marks = tuple(TurnMark(sequence=0, start=2 * turn + 2, end=2 * turn + 3) for turn in range(TURNS))
    lengths = np.random.default_rng(seed).integers(TURNS // 2, TURNS + 1, count) if is_late else [TURNS] * count
    made = []
    for number, turns in enumerate(lengths):
        end = 1 + 2 * int(turns)
        sampled = np.zeros(tokens.shape[1], dtype=np.float32)
        sampled[mask] = [turn[number] for turn in logprobs]
        row = TokenRow.of(
            token_ids=tokens[number, :end],
            logprobs=sampled[:end],
            loss_mask=mask[:end],
            versions=np.where(mask, step - 1, -1)[:end],
        )
        earned = [float(turn[number]) for turn in rewards[:turns]]
        paid = [*[0.0] * (len(earned) - 1), sum(earned)] if is_late else earned
        scores = {f"{SCORE_PREFIX}first": sum(earned[: TURNS // 2]), f"{SCORE_PREFIX}last": sum(earned[TURNS // 2 :])}
        sample = RolloutSample(sequences=(row,), reward=sum(earned), turns=marks[:turns], metrics=scores)
        made.append(sample.with_turns(rewards=paid, states=[str(turn[number]) for turn in visited[:turns]]))
    return batch_of(made, samples=samples, step=step)


def taught(batch: TrainingBatch) -> TrainingBatch:
    """The batch with the scores of a teacher that knows the right words."""
    wrong = np.log((1 - RIGHT) / (FIRST + STATES + WORDS - 1))
    groups = []
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            (row,) = sample.sequences
            right = FIRST + STATES + (5 * (np.roll(row.token_ids, 1) - FIRST) + 2) % WORDS
            scores = np.where(row.token_ids == right, np.log(RIGHT), wrong)
            scored = row.with_columns(teacher_logprobs=np.where(row.loss_mask, scores, np.nan))
            samples.append(replace(sample, sequences=(scored,)))
        groups.append(replace(group, samples=tuple(samples)))
    return replace(batch, groups=tuple(groups))


def batch_of(made: Sequence[RolloutSample], *, samples: int, step: int) -> TrainingBatch:
    """Groups of `samples` samples each."""
    groups = tuple(
        PromptGroup(
            id=group_id(TaskId(f"t{number}"), step),
            task_id=TaskId(f"t{number}"),
            draw=step,
            samples=tuple(made[number * samples : (number + 1) * samples]),
        )
        for number in range(len(made) // samples)
    )
    entries = tuple(
        BatchEntry(group_id=group.id, sequence=n, payload_digest="", oldest_version=step - 1)
        for n, group in enumerate(groups)
    )
    return TrainingBatch(manifest=BatchManifest(step=step, entries=entries, digest=""), groups=groups)


def mean_reward(batch: TrainingBatch) -> float:
    """Right words as a fraction of all."""
    samples = [sample for group in batch.groups for sample in group.samples]
    return sum(sample.reward or 0.0 for sample in samples) / sum(sample.num_trained for sample in samples)


def learn(
    folder: Path,
    *,
    seed: int,
    steps: int,
    is_late: bool = False,
    teach: Callable[[TrainingBatch], TrainingBatch] = lambda batch: batch,
    **changes: Any,
) -> list[float]:
    """The fraction of right words in each step. `teach`: adds the scores of a teacher to a batch."""
    torch.set_num_threads(1)
    learner = initial_learner(build(folder, seed=seed), settings(**changes))
    rng = np.random.default_rng(seed)
    curve = []
    for step in range(1, steps + 1):
        starts = rng.integers(0, STATES, GROUPS)
        batch = play(learner, starts, samples=SAMPLES, step=step, seed=seed * 100_003 + step, is_late=is_late)
        curve.append(mean_reward(batch))
        learner.run(teach(batch))
    return curve


def interval(values: Sequence[float]) -> list[float]:
    """Mean and half the width of its 95 % interval."""
    quantile = T_975[min(len(values) - 2, len(T_975) - 1)]
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return [round(float(np.mean(values)), 4), round(half, 4)]


def compare_learning(*, seeds: int, steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for advantage in LEARNING:
        last = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                curve = learn(Path(folder) / "model", seed=seed, steps=steps, advantage=advantage)
            last.append(float(np.mean(curve[-10:])))
        found[advantage] = interval(last)
        print_status(f"{advantage}: {found[advantage]}")
    return found


def gradient(learner: TrainStep, batch: TrainingBatch, config: TrainerConfig) -> tuple[Tensor, float, float]:
    """The gradient of a batch under the current weights, the share of clipped tokens, and the effective sample size."""
    rows = flatten(batch, config)
    clipped, weights = [], []
    learner.model.module.zero_grad(set_to_none=True)
    for micro in plan_minibatch(rows, config, is_packed=learner.model.is_packed).microbatches:
        current = learner.model.token_logprobs(micro)[0]
        sampled = torch.from_numpy(micro.sampled_logprobs_N)
        inputs = LossInputs(
            current_N=current,
            old_N=sampled if config.recipe.old_logprobs == "engine" else current.detach(),
            sampled_N=sampled,
            advantages_N=torch.from_numpy(micro.advantages_N),
            row_of_N=torch.from_numpy(micro.row_of_N),
            num_rows=micro.num_rows,
        )
        terms = LOSSES[config.loss](inputs, loss_settings(config.recipe))
        (terms.loss_N * torch.from_numpy(micro.weights_N)).sum().backward()  # type: ignore[no-untyped-call]
        clipped.append(terms.is_clipped_N.double())
        weights.append(torch.exp(current.detach() - sampled))
    joined = torch.cat(weights)
    flat = torch.cat([p.grad.flatten() for p in learner.trained if p.grad is not None])
    return flat, float(torch.cat(clipped).mean()), float(joined.sum() ** 2 / (len(joined) * joined.square().sum()))


def compare_gradients(*, checkpoints: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """One recorded stream, trained with `rloo`. At each checkpoint the estimators get the same batches, which are `LAG` old."""
    torch.set_num_threads(1)
    recipe = settings(advantage="rloo")
    losses = [name for name in LOSS_DEFAULTS if name not in ("dr_grpo", "distill")]  # dr_grpo is an advantage
    cells = {name: settings(advantage=name) for name in ADVANTAGES}
    cells |= {f"loss {name}": settings(loss=name, advantage="turn_rloo", reduction="token_mean") for name in losses}
    cells["loss distill"] = settings(loss="distill", reduction="token_mean")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        learner = initial_learner(build(Path(folder) / "model", seed=seed), recipe)
        rng = np.random.default_rng(seed)
        recorded: list[TrainingBatch] = []
        for step in range(1, max(checkpoints) + 1):
            if step + LAG in checkpoints:
                seeds = [10_000_019 + 1000 * step + n for n in range(BATCHES)]
                recorded = [
                    taught(play(learner, rng.integers(0, STATES, GROUPS), samples=SAMPLES, step=step, seed=one))
                    for one in seeds
                ]
            learner.run(play(learner, rng.integers(0, STATES, GROUPS), samples=SAMPLES, step=step, seed=step))
            if step in checkpoints:
                starts = rng.integers(0, STATES, REFERENCE_EPISODES // SAMPLES)
                fresh = play(learner, starts, samples=SAMPLES, step=step, seed=77 + step)
                reference, _, _ = gradient(learner, fresh, settings(advantage="turn_rloo"))
                found[str(step)] = {
                    "reward": round(mean_reward(fresh), 4),
                    "episodes": REFERENCE_EPISODES,
                    "cells": {
                        name: {
                            **measured(learner, recorded, config, reference),
                            "replay": replayed(Path(folder) / "model", learner, recorded, config),
                        }
                        for name, config in cells.items()
                    },
                }
                print_status(f"gradients at step {step}: reward {found[str(step)]['reward']}")
    return found


def measured(
    learner: TrainStep, batches: Sequence[TrainingBatch], config: TrainerConfig, reference: Tensor
) -> Mapping[str, Any]:
    gradients, clipped, sizes = zip(*(gradient(learner, batch, config) for batch in batches), strict=True)
    stacked = torch.stack(gradients).double()
    mean, target = stacked.mean(0), reference.double()
    cosines = [float(torch.cosine_similarity(one, target, dim=0)) for one in stacked]
    return {
        "cosine": interval(cosines),
        "cosine_of_mean": round(float(torch.cosine_similarity(mean, target, dim=0)), 4),
        "noise": round(float((stacked - mean).square().sum(1).mean() / mean.square().sum()), 3),
        "clipped": round(float(np.mean(clipped)), 4),
        "ess": round(float(np.mean(sizes)), 3),
        "by_turn": advantage_by_turn(batches, config),
    }


def advantage_by_turn(batches: Sequence[TrainingBatch], config: TrainerConfig) -> list[float]:
    """Mean absolute advantage in each turn."""
    rows = [row for batch in batches for row in flatten(batch, config)]
    given = [np.broadcast_to(r.advantage if r.token_advantages is None else r.token_advantages, TURNS) for r in rows]
    return [round(float(value), 3) for value in np.abs(np.stack(given)).mean(0)]


def replayed(
    model: Path, learner: TrainStep, batches: Sequence[TrainingBatch], config: TrainerConfig
) -> Mapping[str, Any]:
    """Train the recorded batches from the recorded weights, until the effective sample size of the next one is below the bound."""
    again = initial_learner(model, config)
    again.model.module.load_state_dict(learner.model.module.state_dict())
    steps = 0
    for step, batch in enumerate(batches, start=1):
        if gradient(again, batch, config)[2] < MIN_ESS:
            break
        again.train_rows(flatten(batch, config), step=step)
        steps = step
    fresh = play(again, np.arange(STATES).repeat(4), samples=SAMPLES, step=1, seed=5)
    return {"steps": steps, "reward": round(mean_reward(fresh), 4)}


def report(learning: Mapping[str, Any], gradients: Mapping[str, Any], *, seeds: int, steps: int) -> str:
    lines = [
        "# Estimators on one task",
        "",
        "`python -m benchmarks.learning.estimators --out docs/results/estimators` writes this page and `estimators.json`"
        " in about 15 minutes on one CPU core.",
        "The task is described in the module: a walk of six turns with one right word in each state.",
        "",
        f"## Learning: fraction of right words in the last ten of {steps} steps, {seeds} seeds, 95 % intervals",
        "",
        "| `trainer.advantage` | right words |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {mean:.3f} ± {half:.3f} |" for name, (mean, half) in learning.items()]
    lines += [
        "",
        "Where the whole reward is paid at the end of episodes with equally many turns, `turn_rloo` equals `rloo` number by number"
        " (`test_without_rewards_of_turns_turn_credit_is_episode_credit`). The learning rate, 6e-3, was chosen so that 40 steps"
        " tell the advantages apart: at 2e-3, one seed gave .31 for `rloo` and .36 for `turn_rloo` after 57 steps.",
    ]
    for step, at in gradients.items():
        lines += [
            "",
            f"## Gradients at step {step} of one recorded run (fraction of right words {at['reward']:.2f})",
            "",
            f"{BATCHES} batches of {GROUPS * SAMPLES} episodes, sampled {LAG} steps earlier; reference from {at['episodes']} fresh"
            " episodes with `turn_rloo`. Losses have the advantage `turn_rloo`. `distill` reads no rewards, but the scores of a"
            f" teacher that says the right word with probability {RIGHT}: they credit a word for itself, not for the states it"
            " leads to. *Noise*: variance of the gradient, divided by the square of its mean. *Replay*: the same batches are"
            " trained from these weights, until the effective sample size of the next one is below"
            f" {MIN_ESS}: steps until then, and the fraction of right words in fresh episodes.",
            "",
            "| estimator | cosine to the reference | of the mean gradient | noise | clipped | effective sample size | replay |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, cell in at["cells"].items():
            mean, half = cell["cosine"]
            lines.append(
                f"| `{name}` | {mean:.3f} ± {half:.3f} | {cell['cosine_of_mean']:.3f} | {cell['noise']:.1f} |"
                f" {cell['clipped']:.1%} | {cell['ess']:.2f} | {cell['replay']['steps']}: {cell['replay']['reward']:.2f} |"
            )
        lines += ["", "Mean absolute advantage by turn:", "", _row("`trainer.advantage`", range(1, TURNS + 1))]
        lines.append(_row("---", ["---"] * TURNS))
        lines += [_row(f"`{name}`", at["cells"][name]["by_turn"]) for name in ADVANTAGES]
    return "\n".join(lines) + "\n"


def _row(first: str, values: Iterable[object]) -> str:
    return f"| {' | '.join([first, *map(str, values)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[8, 20, 34])
    args = parser.parse_args()
    gradients = compare_gradients(checkpoints=args.checkpoints)
    learning = compare_learning(seeds=args.seeds, steps=args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"learning": learning, "gradients": gradients, "seeds": args.seeds, "steps": args.steps}
    (args.out / "estimators.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = report(learning, gradients, seeds=args.seeds, steps=args.steps)
    (args.out / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
