"""`rollbook export`: writes demonstrations from the best rollouts of a run, for `rollbook sft`."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from rollbook.commands.arguments import Argument, AsJson, Option
from rollbook.commands.output import result_json, say
from rollbook.contracts.errors import RunError, UsageError
from rollbook.contracts.group import GroupId
from rollbook.contracts.trajectory import RolloutSample
from rollbook.run.reader import RecordedRun, open_run

ALL = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which rollouts are written."""

    min_reward: float | None = None
    max_tokens: int | None = None
    """Of the sampled tokens."""
    tasks: str = "*"
    """Pattern of task ids."""
    per_task: int | None = None
    """The best of each task; equal rewards in the order of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    file: str
    written: int
    tasks: int
    samples: int
    """Scored samples whose payload is stored."""
    duplicates: int
    left_out: int
    """By the filters, or because they have no messages or were cut at a limit."""
    deleted_groups: int
    """Groups whose payload is deleted."""


def export(run: str | Path, out: str | Path, *, chosen: Chosen = Chosen()) -> Exported:  # noqa: B008  # frozen
    """Write one chat per line, each conversation once, in the order of the record. Raises `RunError` if there is none."""
    path = Path(out)
    with open_run(Path(run)) as record:
        reader = _Reader(record, chosen)
        found = list(reader.chats())
    lines: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for task, reward, line in found:
        lines[task].append((reward, line))
    kept = {id(line) for chats in lines.values() for _, line in _best(chats, chosen.per_task)}
    written = [line for _, _, line in found if id(line) in kept]
    if not written:
        raise RunError(
            f"{run}: no rollout to write: {reader.samples} scored samples are stored, {reader.left_out} were left out by the"
            f" filters, or have no messages, and {reader.deleted} groups have no payload any more (ledger.keep_payloads = true"
            " keeps them)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
    return Exported(
        file=str(path),
        written=len(written),
        tasks=len(lines),
        samples=reader.samples,
        duplicates=reader.duplicates,
        left_out=reader.left_out + len(found) - len(written),
        deleted_groups=reader.deleted,
    )


class _Reader:
    """Reads the payloads of a run one after the other and counts what it leaves out."""

    def __init__(self, record: RecordedRun, chosen: Chosen) -> None:
        self._record = record
        self._chosen = chosen
        self._seen: set[bytes] = set()
        self.samples = self.duplicates = self.left_out = self.deleted = 0

    def chats(self) -> Iterator[tuple[str, float, str]]:
        """Task, reward and line of each chat that passes the filters."""
        for row in self._record.groups(limit=ALL):
            if not fnmatchcase(row.task_id, self._chosen.tasks) or row.outcome_json is None:
                continue
            group = self._record.samples(GroupId(row.group_id)) if row.has_payload else None
            if group is None:
                self.deleted += 1
                continue
            for sample in group.samples:
                if sample.reward is None:
                    continue
                self.samples += 1
                if not self._is_chosen(sample):
                    self.left_out += 1
                    continue
                messages = [dict(message) for message in sample.messages or ()]
                key = hashlib.sha256(json.dumps(messages, sort_keys=True).encode("utf-8", "surrogatepass")).digest()
                if key in self._seen:
                    self.duplicates += 1
                    continue
                self._seen.add(key)
                line = {"messages": messages, "task": row.task_id, "group": row.group_id, "reward": sample.reward}
                yield row.task_id, sample.reward, json.dumps(line)

    def _is_chosen(self, sample: RolloutSample) -> bool:
        chosen = self._chosen
        has_answer = any(message.get("role") == "assistant" for message in sample.messages or ())
        # A cut answer would teach to stop anywhere.
        if sample.reward is None or not has_answer or sample.finish_reason.is_truncated:
            return False
        if chosen.min_reward is not None and sample.reward < chosen.min_reward:
            return False
        return chosen.max_tokens is None or sample.num_trained <= chosen.max_tokens


def _best(chats: list[tuple[float, str]], most: int | None) -> list[tuple[float, str]]:
    return sorted(chats, key=lambda chat: -chat[0])[:most]


def export_command(
    run: Annotated[Path, Argument(help="The run directory.")],
    *,
    sft: Annotated[
        Path | None, Option("--sft", metavar="FILE.jsonl", help="Write chats for `rollbook sft` to this file.")
    ] = None,
    min_reward: Annotated[float | None, Option("--min-reward", help="Leave out rollouts with a lower reward.")] = None,
    max_tokens: Annotated[
        int | None, Option("--max-tokens", min=1, help="Leave out rollouts with more sampled tokens.")
    ] = None,
    tasks: Annotated[str, Option("--tasks", metavar="PATTERN", help="Only tasks whose id matches.")] = "*",
    per_task: Annotated[int | None, Option("--per-task", min=1, help="Only the best rollouts of each task.")] = None,
    as_json: AsJson = False,
) -> int:
    """Write demonstrations from the best rollouts of a run. Each conversation is written once; the record is only read."""
    if sft is None:
        raise UsageError("--sft FILE.jsonl is required: the file to write")
    chosen = Chosen(min_reward=min_reward, max_tokens=max_tokens, tasks=tasks, per_task=per_task)
    found = export(run, sft, chosen=chosen)
    if as_json:
        row: dict[str, Any] = asdict(found)
        result_json(row)
    say(
        f"{found.written} chats of {found.tasks} tasks: {found.file} ({found.samples} scored samples, {found.duplicates}"
        f" duplicates, {found.left_out} left out)"
    )
    return 0
