"""The conversations of one episode: which is the main one, and how the others came from it.

An episode of a coding agent has several conversations: sub-agents, compactions of a long history, retries, side requests such as a
title. Each is one or more sequences of the sample. Headers say what a request is where the agent sends them (Codex does). Otherwise
it follows from the texts: a summary that the policy wrote and that starts a new conversation, a task that it passed to a tool.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rollbook.contracts.decoding import load_json
from rollbook.rollout.agents.tool_calls import ParsedText
from rollbook.rollout.contract import Message

LINEAGE_FACT = "lineage"
"""Fact of a sample: how each of its sequences began."""
TAG = re.compile(r"</?[A-Za-z_][\w-]{0,40}>")
MIN_QUOTED_CHARS = 12
"""A shorter text occurs in other conversations by chance."""


class SequenceRole(StrEnum):
    """Why a sequence exists."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    """A request for a summary of the history, or the conversation that continues from the summary."""
    REWRITE = "rewrite"
    """The agent or the chat template changed the history."""
    RETRY = "retry"
    """The same prompt again."""
    TURN = "turn"
    """The next turn, with the assembler `per_turn`."""
    SIDE = "side"
    """A request besides the conversation, without tools: a title, a topic, a check of the connection."""


CONTINUES = frozenset({SequenceRole.COMPACTION, SequenceRole.REWRITE, SequenceRole.RETRY, SequenceRole.TURN})
"""Roles of sequences that belong to the same agent as their parent."""


class _Quote(NamedTuple):
    """What the policy wrote, and another conversation may begin with: a reply, which may be a summary, or a text that it passed
    to a tool, which may be the task of a sub-agent."""

    sequence: int
    words: str
    is_reply: bool


class TrainOnly(StrEnum):
    ALL = "all"
    AGENTS = "agents"
    """Without side requests."""
    MAIN = "main"
    """Without side requests and sub-agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOrigin:
    """What a request says about its sender. None: nothing."""

    agent: str | None = None
    """The agent's own id of its thread."""
    parent: str | None = None
    """The thread that started it."""
    role: SequenceRole | None = None
    model: str | None = None
    """The name of the model that it asks for. All are the policy; a program may have another one for small requests."""


@dataclass(slots=True, kw_only=True)
class Branch:
    """How one sequence began."""

    role: SequenceRole | None
    """None: decided at the end, by the other sequences."""
    parent: int | None
    agent: str | None
    model: str | None
    has_tools: bool
    first_user: str
    head: str
    """The words before the first reply."""
    num_turns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOrigin:
    """How one sequence of a sample began, and why it is not trained, if so."""

    role: SequenceRole
    owner: SequenceRole
    """Main, sub-agent or side: whose sequence it is, or whose history it continues."""
    parent: int | None
    agent: str | None
    left_out: str | None = None

    def to_fact(self, sequence: int) -> dict[str, Any]:
        found = {"sequence": sequence, "role": self.role, "parent": self.parent, "agent": self.agent}
        return {**found, **({"left_out": self.left_out} if self.left_out else {})}


def read_origin(headers: Mapping[str, str], model: object = None) -> RequestOrigin:
    """Codex names thread, parent thread and kind of a request. Claude Code names its session and, in newer versions, its agent."""
    agent = headers.get("thread-id") or headers.get("x-claude-code-agent-id")
    parent = headers.get("x-codex-parent-thread-id") or headers.get("x-claude-code-parent-agent-id")
    try:
        about = load_json(headers.get("x-codex-turn-metadata", "{}"))
    except ValueError:
        about = {}
    about = about if isinstance(about, dict) else {}
    role = None
    if about.get("request_kind") == "compaction" or _is_positive(about.get("window_number")):
        role = SequenceRole.COMPACTION
    elif parent is not None:
        role = SequenceRole.SUBAGENT
    return RequestOrigin(agent=agent, parent=parent, role=role, model=model if isinstance(model, str) else None)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and value > 0


class Lineage:
    """Collects the turns of an episode in their order."""

    def __init__(self) -> None:
        self._branches: list[Branch] = []
        self._prompts: dict[bytes, int] = {}
        """Sequence by digest of the prompt's text."""
        self._written: list[_Quote] = []

    def add(
        self,
        sequence: int,
        messages: Sequence[Message],
        reply: ParsedText,
        *,
        origin: RequestOrigin,
        has_tools: bool,
        rendered: str,
        is_continued: bool,
    ) -> None:
        """A turn that was added to `sequence`. `messages` are those before the reply, `rendered` is their text."""
        prompt = hashlib.blake2b(rendered.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if sequence == len(self._branches):
            users = [message["content"] for message in messages if message["role"] == "user"]
            new = Branch(
                role=None,
                parent=None,
                agent=origin.agent,
                model=origin.model,
                has_tools=has_tools,
                first_user=users[0].strip() if users else "",
                head=_head(messages),
            )
            if self._branches:
                self._classify(new, origin, prompt, is_continued=is_continued)
            self._branches.append(new)
        self._branches[sequence].num_turns += 1
        self._prompts[prompt] = sequence
        said = [] if reply.calls else _parts(reply.content)
        passed = [text for call in reply.calls for text in _texts(call.arguments)]
        for text, is_reply in (*((text, True) for text in said), *((text, False) for text in passed)):
            words = _words(text)
            # What repeats the task is in every conversation about it.
            if len(words) >= MIN_QUOTED_CHARS and not any(words in branch.head for branch in self._branches):
                self._written.append(_Quote(sequence, words, is_reply))

    def _classify(self, new: Branch, origin: RequestOrigin, prompt: bytes, *, is_continued: bool) -> None:
        same = self._last(lambda branch: branch.agent == origin.agent) if origin.agent is not None else None
        # A task may quote an answer, and a summary what was passed to a tool: the longest text is the whole. An agent with a new id
        # continues no other, and one without tools none that has some.
        is_agent = new.has_tools or not any(branch.has_tools for branch in self._branches)
        may_continue = is_agent and (origin.agent is None or same is not None)
        found = (one for one in self._written if one.words in new.head and (may_continue or not one.is_reply))
        quoted = max(found, key=lambda one: len(one.words), default=None)
        if prompt in self._prompts:
            new.role, new.parent = SequenceRole.RETRY, self._prompts[prompt]
        elif origin.role is not None:
            new.role, new.parent = origin.role, same
            if origin.role is SequenceRole.SUBAGENT and same is None:
                new.parent = self._last(lambda branch: branch.agent == origin.parent)
            elif origin.role is SequenceRole.SUBAGENT:
                new.role = SequenceRole.REWRITE
        elif quoted is not None and quoted.is_reply:
            self._continue_from_summary(new, quoted.sequence)
        elif same is not None:
            new.role, new.parent = SequenceRole.TURN if is_continued else SequenceRole.REWRITE, same
        elif (before := self._last(lambda branch: _is_same_task(branch, new))) is not None:
            new.role, new.parent = SequenceRole.TURN if is_continued else SequenceRole.REWRITE, before
        elif quoted is not None and (new.has_tools or new.model == self._branches[quoted.sequence].model):
            new.role, new.parent = SequenceRole.SUBAGENT, quoted.sequence

    def _continue_from_summary(self, new: Branch, summary: int) -> None:
        """A request for the summary that is a sequence of its own is part of the compaction."""
        source = self._branches[summary]
        if source.role is None and not source.has_tools and new.has_tools:
            source.role = SequenceRole.COMPACTION
            source.parent = self._last(lambda branch: branch.has_tools, below=summary)
        elif source.role in (SequenceRole.TURN, SequenceRole.REWRITE) and source.num_turns == 1:
            source.role = SequenceRole.COMPACTION
        new.role, new.parent = SequenceRole.COMPACTION, summary

    def _last(self, matches: Callable[[Branch], bool], *, below: int | None = None) -> int | None:
        end = len(self._branches) if below is None else below
        return next((at for at in range(end - 1, -1, -1) if matches(self._branches[at])), None)

    def origins(self, train_only: TrainOnly = TrainOnly.ALL) -> list[SequenceOrigin]:
        """One per sequence, in their order. The main conversation is the first with tools, or the first if none has tools."""
        undecided = [at for at, branch in enumerate(self._branches) if branch.role is None]
        main = next((at for at in undecided if self._branches[at].has_tools), 0)
        found: list[SequenceOrigin] = []
        for at, branch in enumerate(self._branches):
            role, parent = branch.role, branch.parent
            if role is None and at != main:
                is_side = self._branches[main].has_tools and not branch.has_tools
                role, parent = SequenceRole.SIDE if is_side else SequenceRole.SUBAGENT, main
            role = role or SequenceRole.MAIN
            owner = role if role not in CONTINUES else SequenceRole.MAIN if parent is None else found[parent].owner
            left_out = _reason(owner, train_only)
            found.append(SequenceOrigin(role=role, owner=owner, parent=parent, agent=branch.agent, left_out=left_out))
        return found


def _reason(owner: SequenceRole, train_only: TrainOnly) -> str | None:
    left = {
        TrainOnly.ALL: (),
        TrainOnly.AGENTS: (SequenceRole.SIDE,),
        TrainOnly.MAIN: (SequenceRole.SIDE, SequenceRole.SUBAGENT),
    }[train_only]
    return f'{owner} with train_only = "{train_only}"' if owner in left else None


def _is_same_task(branch: Branch, new: Branch) -> bool:
    return (branch.agent, branch.has_tools, branch.first_user) == (new.agent, new.has_tools, new.first_user)


def _head(messages: Sequence[Message]) -> str:
    before = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    return "\n".join(_words(message["content"]) for message in before)


def _words(text: str) -> str:
    """Programs change the white space of what they quote."""
    return " ".join(text.split())


def _parts(reply: str) -> list[str]:
    """The reply, and its longest part between tags: programs quote a summary without its tags and without what precedes it."""
    return [reply, max(TAG.split(reply), key=len)]


def _texts(arguments: str) -> Iterator[str]:
    """The strings in the arguments of a call."""
    try:
        left: list[Any] = [load_json(arguments)]
    except ValueError:
        return
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
