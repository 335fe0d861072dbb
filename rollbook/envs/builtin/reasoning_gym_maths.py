"""Problems of reasoning-gym with its scorers: `--env reasoning_gym`. The only module that imports the package."""

from collections.abc import Mapping
from typing import Any

from reasoning_gym import create_dataset, get_score_answer_fn

from rollbook.envs.builtin.maths import Maths


class ReasoningGymMaths(Maths):
    """Like `maths`, but the answer is scored by the dataset of the row (`metadata.source_dataset`).

    Some scorers give partial credit for close answers; it is paid at the last try.
    """

    def score(self, given: str, task: Mapping[str, Any]) -> float:
        metadata = task.get("metadata")
        source = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
        if not isinstance(source, str):
            raise ValueError(
                "the row has no metadata.source_dataset; create it with reasoning_gym, or use the environment 'maths'"
            )
        return float(get_score_answer_fn(source)(given, dict(task)))


def reasoning_gym_tasks(dataset: str, count: int, *, seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    """Rows of one of its datasets, with unique ids; the same seed gives the same rows."""
    rows = create_dataset(dataset, size=count, seed=seed, **settings)
    return [{"id": f"{dataset}-{seed}-{index}", **row} for index, row in enumerate(rows)]
