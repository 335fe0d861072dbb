"""Teachers, hints and turn credit on small tasks: learning over ten seeds, with intervals.

python -m benchmarks.learning.teachers --out docs/results/teachers

The walk of six turns is that of `estimators.py`. Its teacher has seven times the weights and was trained with rewards of turns. The
task with a hint has twelve questions with one right word each; the policy was first trained to say the word that a hint names.
Sampling and scoring are synchronous and in this process; columns, losses and steps are those of the trainer.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.learning.estimators import (
    BOS,
    FIRST,
    GROUPS,
    SAMPLES,
    STATES,
    WORDS,
    batch_of,
    build,
    interval,
    learn,
    mean_reward,
    play,
    settings,
)
from benchmarks.report import print_status
from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.trajectory import RolloutSample, TokenRow, TurnMark
from rollbook.trainer.checkpoints.checkpoints import initial_learner
from rollbook.trainer.step import TrainStep

TOP_K = 4
TEACHER_WIDTH, TEACHER_STEPS = 64, 90
HINT_STEPS, QUESTION_STEPS = 60, 80
SAMPLED = {"loss": "distill"}
BOTH = {"advantage": "rloo", "distill_coef": 0.5, "distill_until": 30}
TAUGHT: dict[str, dict[str, Any]] = {
    "reward alone (`rloo`)": {"advantage": "rloo"},
    "teacher alone, sampled": SAMPLED,
    "teacher alone, reverse over 4 tokens": {**SAMPLED, "distill_kl": "reverse"},
    "teacher alone, forward over 4 tokens": {**SAMPLED, "distill_kl": "forward"},
    "reward, and teacher until step 30, sampled": BOTH,
    "reward, and teacher until step 30, forward over 4 tokens": {**BOTH, "distill_kl": "forward"},
}
HINTED = {name.replace("teacher", "hint"): changes for name, changes in TAUGHT.items()}
CREDIT = {"episode credit (`rloo`)": "rloo", "turn credit (`turn_rloo`)": "turn_rloo"}


@torch.no_grad()
def with_scores(batch: TrainingBatch, scorer: TrainStep, context: Callable[[TokenRow], list[int]]) -> TrainingBatch:
    """The batch with a teacher's scores. `context`: what the teacher sees after the start token, besides the sequence."""
    samples = [sample for group in batch.groups for sample in group.samples]
    hints = [context(sample.sequences[0]) for sample in samples]
    ids = [[BOS, *hint, *s.sequences[0].token_ids[1:].tolist()] for hint, s in zip(hints, samples, strict=True)]
    # All sequences of the batch have one length.
    tables = torch.log_softmax(scorer.model.module(input_ids=torch.tensor(ids), use_cache=False).logits.float(), -1)
    made = []
    for sample, hint, table in zip(samples, hints, tables, strict=True):
        (row,) = sample.sequences
        # At the position before each token.
        logprobs = table[len(hint) : -1]
        values, tops = logprobs.topk(TOP_K, dim=-1)
        own = logprobs.gather(1, torch.from_numpy(row.token_ids[1:].astype(np.int64))[:, None])[:, 0]
        mask = row.loss_mask
        taught = row.with_columns(
            teacher_logprobs=np.where(mask, [0.0, *own.tolist()], np.nan),
            teacher_top_ids=np.where(mask[:, None], np.vstack([np.zeros(TOP_K), tops.numpy()]), -1),
            teacher_top_logprobs=np.where(mask[:, None], np.vstack([np.zeros(TOP_K), values.numpy()]), np.nan),
        )
        made.append(replace(sample, sequences=(taught,)))
    size = len(batch.groups[0].samples)
    groups = tuple(
        replace(group, samples=tuple(made[n * size : (n + 1) * size])) for n, group in enumerate(batch.groups)
    )
    return replace(batch, groups=groups)


def trained_teacher(folder: Path) -> tuple[TrainStep, float]:
    """A larger model, trained with rewards of turns, and its fraction of right words."""
    learner = initial_learner(build(folder, seed=1000, width=TEACHER_WIDTH), settings(advantage="turn_rloo", lr=3e-3))
    rng = np.random.default_rng(1000)
    for step in range(1, TEACHER_STEPS + 1):
        starts = rng.integers(0, STATES, 2 * GROUPS)
        learner.run(play(learner, starts, samples=SAMPLES, step=step, seed=step))
    fresh = play(learner, np.arange(STATES), samples=32, step=1, seed=9)
    return learner, mean_reward(fresh)


def compare(cells: Mapping[str, Callable[[Path, int], Sequence[float]]], *, seeds: int) -> dict[str, Any]:
    """The mean of the last ten steps of each cell, over seeds."""
    found: dict[str, Any] = {}
    for name, run in cells.items():
        last = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                last.append(float(np.mean(run(Path(folder) / "model", seed)[-10:])))
        found[name] = interval(last)
        print_status(f"{name}: {found[name]}")
    return found


def distilled(folder: Path, seed: int, *, steps: int, teacher: TrainStep, changes: Mapping[str, Any]) -> list[float]:
    teach = partial(with_scores, scorer=teacher, context=lambda _: [])
    return learn(folder, seed=seed, steps=steps, teach=teach, **changes)


def right_word(state: int | NDArray[np.int64]) -> Any:
    return FIRST + STATES + (5 * state + 2) % WORDS


def hinted(folder: Path, seed: int, *, steps: int, changes: Mapping[str, Any]) -> list[float]:
    """Learn to follow hints, then answer twelve questions without one. The fraction of right words in each step."""
    torch.set_num_threads(1)
    directory, rng = build(folder, seed=seed), np.random.default_rng(seed)
    learner = initial_learner(directory, settings(loss="reinforce", advantage="producer"))
    for step in range(1, HINT_STEPS + 1):
        learner.run(hints(rng, step=step))
    policy = initial_learner(directory, settings(**changes))
    policy.model.module.load_state_dict(learner.model.module.state_dict())
    curve = []
    for step in range(1, steps + 1):
        batch = answers(policy, rng.integers(0, STATES, GROUPS), step=step, seed=seed * 100_003 + step)
        curve.append(mean_reward(batch))
        # The weights that sampled, and the word that is right.
        policy.run(with_scores(batch, policy, lambda row: [int(right_word(int(row.token_ids[1]) - FIRST))]))
    return curve


def hints(rng: np.random.Generator, *, step: int) -> TrainingBatch:
    """Demonstrations: a hint, a question, and the word of the hint."""
    made = []
    for _ in range(GROUPS * SAMPLES):
        word, state = FIRST + STATES + int(rng.integers(WORDS)), FIRST + int(rng.integers(STATES))
        row = TokenRow.of(
            token_ids=[BOS, word, state, word],
            logprobs=[0, 0, 0, -1],
            loss_mask=[0, 0, 0, 1],
            versions=[-1, -1, -1, 0],
            advantages=[0, 0, 0, 1],
        )
        made.append(RolloutSample(sequences=(row,), reward=0.0))
    return batch_of(made, samples=SAMPLES, step=step)


@torch.no_grad()
def answers(learner: TrainStep, questions: NDArray[np.int64], *, step: int, seed: int) -> TrainingBatch:
    """One group of answers to each question."""
    states = np.repeat(questions, SAMPLES)
    tokens = np.column_stack([np.full(len(states), BOS), FIRST + states])
    logits = learner.model.module(input_ids=torch.from_numpy(tokens), use_cache=False).logits[:, -1].float()
    chances = torch.log_softmax(logits, -1)
    chosen = torch.multinomial(chances.exp(), 1, generator=torch.Generator().manual_seed(seed))
    logprobs = chances.gather(1, chosen)[:, 0].tolist()
    made = []
    for state, (question, word), logprob in zip(
        states, np.column_stack([tokens[:, 1], chosen[:, 0].numpy()]), logprobs, strict=True
    ):
        row = TokenRow.of(
            token_ids=[BOS, question, word],
            logprobs=[0, 0, logprob],
            loss_mask=[0, 0, 1],
            versions=[-1, -1, step - 1],
        )
        turns = (TurnMark(sequence=0, start=2, end=3),)
        made.append(RolloutSample(sequences=(row,), reward=float(word == right_word(int(state))), turns=turns))
    return batch_of(made, samples=SAMPLES, step=step)


def report(found: Mapping[str, Any], *, seeds: int, steps: int) -> str:
    lines = [
        "# Teachers, hints and turn credit on small tasks",
        "",
        "`python -m benchmarks.learning.teachers --out docs/results/teachers` writes this page and `teachers.json` in about"
        " 15 minutes on one CPU core. The tasks are described in the module. Each figure is the fraction of right words in the"
        f" last ten steps, mean over {seeds} seeds with its 95 % interval.",
    ]
    texts = {
        "teacher": (
            f"Distillation against reward alone: the walk of six turns, {steps} steps",
            f"The teacher says {found['teacher_reward']:.0%} of the words right. Every cell has the same number of steps and"
            " episodes.",
        ),
        "hint": (
            f"The policy with a hint as its own teacher: twelve questions, {QUESTION_STEPS} steps",
            "The hint is the right word. The policy can follow hints from the start, and samples without one.",
        ),
        "early": (
            f"Turn credit where it must help: a reward in each turn, {steps} steps",
            "The walk of six turns. [Estimators on one task](../estimators/README.md) has the other advantages.",
        ),
        "late": (
            f"Turn credit where it must not hurt: the whole reward in the last turn, {steps} steps",
            "The same walk in episodes of three to six turns.",
        ),
    }
    for key, (title, text) in texts.items():
        lines += ["", f"## {title}", "", text, "", "| | right words |", "|---|---|"]
        lines += [f"| {name} | {mean:.3f} ± {half:.3f} |" for name, (mean, half) in found[key].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = args.steps
    with tempfile.TemporaryDirectory() as folder:
        teacher, reward = trained_teacher(Path(folder) / "teacher")
    print_status(f"teacher: {reward:.3f}")

    def credit(advantage: str, *, is_late: bool) -> Callable[[Path, int], list[float]]:
        return lambda folder, seed: learn(folder, seed=seed, steps=steps, advantage=advantage, is_late=is_late)

    of_teacher = {
        name: partial(distilled, steps=steps, teacher=teacher, changes=changes) for name, changes in TAUGHT.items()
    }
    of_hint = {name: partial(hinted, steps=QUESTION_STEPS, changes=changes) for name, changes in HINTED.items()}
    found: dict[str, Any] = {
        "teacher_reward": round(reward, 4),
        "hint": compare(of_hint, seeds=args.seeds),
        "teacher": compare(of_teacher, seeds=args.seeds),
    }
    episodes, turns = CREDIT
    found["early"] = {
        # The same seeds, steps and settings.
        episodes: found["teacher"]["reward alone (`rloo`)"],
        **compare({turns: credit(CREDIT[turns], is_late=False)}, seeds=args.seeds),
    }
    found["late"] = compare(
        {name: credit(advantage, is_late=True) for name, advantage in CREDIT.items()}, seeds=args.seeds
    )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "teachers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (args.out / "README.md").write_text(report(found, seeds=args.seeds, steps=steps), encoding="utf-8")


if __name__ == "__main__":
    main()
