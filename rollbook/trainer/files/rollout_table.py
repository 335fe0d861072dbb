"""Writes a few rollouts of each step to `rollouts.jsonl`, with their text, reward and advantage: for people, and for the sinks."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rollbook.contracts.trajectory import RolloutSample
from rollbook.telemetry.events import FailureReport, read_json_lines
from rollbook.trainer.data.planning import ShownSample

MAX_TEXT_CHARS = 20_000

Decode = Callable[[list[int]], str]


class RolloutTable:
    """`decode` turns tokens into text; None if the model has no tokenizer. A batch that is trained again is not written again."""

    def __init__(self, path: Path, *, decode: Decode | None) -> None:
        self._path = path
        self._decode = decode
        self._failure = FailureReport("rollouts are not written")
        written = (
            [row["step"] for row in read_json_lines(path) if isinstance(row.get("step"), int)] if path.exists() else []
        )
        self._last_step = max(written, default=0)

    def add(self, step: int, shown: Sequence[ShownSample]) -> None:
        if step <= self._last_step or not shown:
            return
        self._last_step = step
        rows = [
            {
                "step": step,
                "group": one.group_id,
                "task": one.task_id,
                "sample": one.number,
                "reward": one.sample.reward,
                "advantage": round(one.advantage, 6),
                "turns": len(one.sample.turns),
                "tokens": one.sample.num_tokens,
                "end": str(one.sample.finish_reason),
                "text": self._text(one.sample)[:MAX_TEXT_CHARS],
            }
            for one in shown
        ]
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
