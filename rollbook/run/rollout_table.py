"""Writes a few rollouts of each step to `rollouts.jsonl`, with their text, reward and advantage: for people, and for the sinks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollbook.contracts.batch import TrainingBatch
from rollbook.contracts.trajectory import RolloutSample
from rollbook.telemetry.events import FailureReport, read_json_lines
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import sample_advantages

MAX_TEXT_CHARS = 20_000

Decode = Callable[[list[int]], str]


class RolloutTable:
    """`decode` turns tokens into text; None if the model has no tokenizer. A batch that is trained again is not written again."""

    def __init__(self, path: Path, config: TrainerConfig, *, per_step: int, decode: Decode | None) -> None:
        self._path = path
        self._config = config
        self._per_step = per_step
        self._decode = decode
        self._failure = FailureReport("rollouts are not written")
        written = (
            [row["step"] for row in read_json_lines(path) if isinstance(row.get("step"), int)] if path.exists() else []
        )
        self._last_step = max(written, default=0)

    def add(self, batch: TrainingBatch) -> None:
        """Write samples spread over the batch, so that several groups are shown."""
        if batch.step <= self._last_step or not self._per_step:
            return
        self._last_step = batch.step
        samples = [(group, number, sample) for group in batch.groups for number, sample in enumerate(group.samples)]
        advantages = sample_advantages(batch, self._config).tolist()
        count = min(self._per_step, len(samples))
        rows: list[dict[str, Any]] = []
        for at in (index * len(samples) // count for index in range(count)):
            group, number, sample = samples[at]
            rows.append(
                {
                    "step": batch.step,
                    "group": group.id,
                    "task": group.task_id,
                    "sample": number,
                    "reward": sample.reward,
                    "advantage": round(advantages[at], 6),
                    "turns": len(sample.turns),
                    "tokens": sample.num_tokens,
                    "end": str(sample.finish_reason),
                    "text": self._text(sample)[:MAX_TEXT_CHARS],
                }
            )
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except OSError as error:
            self._failure.report(error)

    def _text(self, sample: RolloutSample) -> str:
        """The exact text that was trained; without a tokenizer the messages, or the token ids."""
        if self._decode is not None:
            return "\n\n".join(self._decode(row.token_ids.tolist()) for row in sample.sequences)
        if sample.messages is not None:
            return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in sample.messages)
        return " ".join(str(token) for row in sample.sequences for token in row.token_ids.tolist())
