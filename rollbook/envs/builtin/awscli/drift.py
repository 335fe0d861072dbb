"""Drift: an environment that starts out wrong. The seed chooses which faults, and in which order they are applied. Pure."""

import random
from collections.abc import Sequence

from rollbook.envs.builtin.awscli.task_bank import AwsTask, Fault


def seeded(task_id: str, seed: int, purpose: str) -> random.Random:
    """A generator of its own for each purpose: chaos drawing once more does not change what drift draws."""
    return random.Random(f"{task_id}/{seed}/{purpose}")


def chosen_variant(task: AwsTask, seed: int) -> dict[str, str]:
    """The names of this episode."""
    variant = seeded(task.id, seed, "variant").choice(task.variants)
    return {name: str(value) for name, value in variant.items()}


def chosen_faults(task: AwsTask, seed: int) -> Sequence[Fault]:
    """The faults of this episode; none for a task without drift."""
    if not task.drift:
        return ()
    rng = seeded(task.id, seed, "drift")
    low, high = task.drift_count
    return rng.sample(task.drift, rng.randint(low, high))
