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
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.trajectory import CHAT_FACT, RolloutSample
from rollbook.rollout.agents.lineage import CONTINUES, LINEAGE_FACT, SequenceRole
from rollbook.rollout.agents.messages import BadChatError, normalised
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
    as_tokens: bool = False
    """Write the tokens of each sequence, with their mask, instead of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    file: str
    written: int
    tasks: int
    samples: int
    """Scored samples whose payload is stored."""
    duplicates: int
    left_out: int
    """By the filters, because they or one of their turns were cut at a limit, or because chats cannot show them: without messages,
    with an empty answer, or with text that a thinking budget wrote."""
    deleted_groups: int
    """Groups without a payload: it was deleted, or a filter dropped the group."""


def export(run: str | Path, out: str | Path, *, chosen: Chosen = Chosen()) -> Exported:  # noqa: B008  # frozen
    """Write each rollout once, one line per chat or sequence, in the order of the record. Raises `RunError` if there is none."""
    path = Path(out)
    with open_run(Path(run)) as record:
        reader = _Reader(record, chosen)
        found = list(reader.rollouts())
    by_task: dict[str, list[_Rollout]] = defaultdict(list)
    for rollout in found:
        by_task[rollout.task].append(rollout)
    kept = {id(one) for same in by_task.values() for one in sorted(same, key=lambda r: -r.reward)[: chosen.per_task]}
    written = [line for rollout in found if id(rollout) in kept for line in rollout.lines]
    if not written:
        raise RunError(
            f"{run}: no rollout to write: {reader.samples} scored samples are stored, {reader.left_out} were left out by the"
            " filters, have no messages, an empty answer, a cut turn, or text that a thinking budget wrote (--tokens writes those"
            f" too), and {reader.deleted} groups have no payload: a filter dropped them, or it was deleted"
            " (ledger.keep_payloads = true keeps payloads)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in written), encoding="utf-8")
    return Exported(
        file=str(path),
        written=len(written),
        tasks=len(by_task),
        samples=reader.samples,
        duplicates=reader.duplicates,
        left_out=reader.left_out + len(found) - len(kept),
        deleted_groups=reader.deleted,
    )


@dataclass(frozen=True, slots=True)
class _Rollout:
    task: str
    reward: float
    lines: list[str]


class _Reader:
    """Reads the payloads of a run one after the other and counts what it leaves out."""

    def __init__(self, record: RecordedRun, chosen: Chosen) -> None:
        self._record = record
        self._chosen = chosen
        self._seen: set[bytes] = set()
        self.samples = self.duplicates = self.left_out = self.deleted = 0
        self._vocabulary = ""
        if chosen.as_tokens:
            tokenizer = load_on_demand("rollbook.rollout.chat.tokenizer:ModelTokenizer")
            self._vocabulary = tokenizer.from_directory(record.directory.initial_model).vocabulary_digest

    def rollouts(self) -> Iterator[_Rollout]:
        """The rollouts that pass the filters."""
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
                content = list(self._token_lines(sample) if self._chosen.as_tokens else _chat(sample))
                if not content:
                    self.left_out += 1
                    continue
                key = hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8", "surrogatepass")).digest()
                if key in self._seen:
                    self.duplicates += 1
                    continue
                self._seen.add(key)
                where = {"task": row.task_id, "group": row.group_id, "reward": sample.reward}
                yield _Rollout(row.task_id, sample.reward, [json.dumps({**line, **where}) for line in content])

    def _token_lines(self, sample: RolloutSample) -> Iterator[dict[str, Any]]:
        for row in sample.sequences:
            if row.num_trained:
                yield {
                    "token_ids": row.token_ids.tolist(),
                    "loss_mask": row.loss_mask.astype(int).tolist(),
                    "vocabulary": self._vocabulary,
                }

    def _is_chosen(self, sample: RolloutSample) -> bool:
        chosen = self._chosen
        # A cut answer would teach to stop anywhere.
        if sample.reward is None or sample.finish_reason.is_truncated:
            return False
        if not (chosen.as_tokens or _is_chat_of_the_policy(sample)):
            return False
        if chosen.min_reward is not None and sample.reward < chosen.min_reward:
            return False
        return chosen.max_tokens is None or sample.num_trained <= chosen.max_tokens


def _chat(sample: RolloutSample) -> Iterator[dict[str, Any]]:
    """The conversation, unless a message of it is no text, or an answer is empty.

    Arguments of tool calls are objects, as chat templates write them. Answers that the policy did not give, examples of the prompt,
    have the weight 0.
    """
    messages = list(sample.messages or ())
    try:
        found = [{**raw, **message} for raw, message in zip(messages, normalised(messages), strict=True)]
    except BadChatError:
        return
    answers = [message for message in found if message["role"] == "assistant"]
    num_turns = _num_turns_shown(sample) or len(answers)
    for message in answers[: max(0, len(answers) - num_turns)]:
        message["weight"] = 0
    said = [message for message in answers if "weight" not in message]
    if all(message["content"].strip() or message.get("tool_calls") for message in said) and said:
        fact = sample.facts.get(CHAT_FACT)
        more = {name: fact[name] for name in ("tools", "template") if name in fact} if isinstance(fact, dict) else {}
        yield {"messages": found, **more}


def _num_turns_shown(sample: RolloutSample) -> int:
    """The turns of the conversation in `messages`: not those of sub-agents and side requests. 0: turns are not marked."""
    owners: dict[Any, Any] = {}
    lineage = sample.facts.get(LINEAGE_FACT)
    for one in lineage if isinstance(lineage, list) else ():
        if isinstance(one, dict):
            main = SequenceRole.MAIN
            role, parent = one.get("role"), one.get("parent")
            owners[one.get("sequence")] = owners.get(parent, main) if role in CONTINUES else role
    return sum(owners.get(turn.sequence, SequenceRole.MAIN) == SequenceRole.MAIN for turn in sample.turns)


def _is_chat_of_the_policy(sample: RolloutSample) -> bool:
    """The policy sampled all that its messages say, and ended each of its turns."""
    # The chat template would write the end of a turn that was cut.
    if sample.metrics.get("cut_turns"):
        return False
    return not any(sample.written_mask(number).any() for number in range(len(sample.sequences)))


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
    tokens: Annotated[
        bool, Option("--tokens", help="Write the sampled tokens instead of chats, for models with the same tokenizer.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Write demonstrations from the best rollouts of a run. Each rollout is written once; the record is only read."""
    if sft is None:
        raise UsageError("--sft FILE.jsonl is required: the file to write")
    chosen = Chosen(min_reward=min_reward, max_tokens=max_tokens, tasks=tasks, per_task=per_task, as_tokens=tokens)
    found = export(run, sft, chosen=chosen)
    if as_json:
        row: dict[str, Any] = asdict(found)
        result_json(row)
    say(
        f"{found.written} {'sequences' if tokens else 'chats'} of {found.tasks} tasks: {found.file} ({found.samples} scored"
        f" samples, {found.duplicates} duplicates, {found.left_out} left out)"
    )
    return 0
