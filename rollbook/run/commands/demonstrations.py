"""Demonstrations: chats in a JSONL file become token rows in which exactly the assistant's tokens are trained.

The rows are what a rollout would have recorded if the policy had said the same: each prompt is the template's rendering of the
history up to the assistant's turn, encoded by itself, and the turn is the text that the template adds for it, up to and including
the token that ends it. What the template puts between turns is read and never trained.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.policy import NOT_SAMPLED
from rollbook.contracts.trajectory import TokenRow
from rollbook.rollout.contract import Message, Tokenizer

SHOWN_BAD_LINES = 20
"""Bad lines that are named one by one; the rest is counted."""
EXCERPT = 30


class DemonstrationError(RunError):
    """The file of demonstrations cannot be used as it is."""


class ChatError(EpisodeError):
    """This chat cannot be trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    number: int
    cause: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    path: Path
    rows: tuple[TokenRow, ...]
    keys: tuple[str, ...]
    """A digest of each chat's messages: what a split is made by, whatever the order of the file."""
    bad: tuple[BadLine, ...]

    def split(self, share: float) -> tuple[tuple[TokenRow, ...], tuple[TokenRow, ...]]:
        """The rows to train, and about `share` of them kept aside. A chat stays on its side when the file changes around it."""
        is_kept = [int(key[:8], 16) / 2**32 < share for key in self.keys]
        train = tuple(row for row, kept in zip(self.rows, is_kept, strict=True) if not kept)
        aside = tuple(row for row, kept in zip(self.rows, is_kept, strict=True) if kept)
        if not train or (share > 0 and not aside):
            raise DemonstrationError(
                f"{self.path}: validation_share = {share:g} of {len(self.rows)} demonstrations leaves {len(train)} to train and "
                f"{len(aside)} to validate with; name a validation file, or choose another share"
            )
        return train, aside


def read_demonstrations(path: Path, tokenizer: Tokenizer, *, max_tokens: int, is_strict: bool) -> Demonstrations:
    """Every line of the file. Bad ones are named with their number and cause: all of them in one error, or in `bad`."""
    rows: list[TokenRow] = []
    keys: list[str] = []
    bad: list[BadLine] = []
    for number, line in _lines(path):
        try:
            messages = _messages(line)
            row = chat_row(messages, tokenizer)
            if len(row) > max_tokens:
                raise ChatError(f"has {len(row)} tokens, and sft.max_tokens is {max_tokens}")
        except EpisodeError as error:
            bad.append(BadLine(number=number, cause=str(error)))
            continue
        rows.append(row)
        keys.append(hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=8).hexdigest())
    if bad and is_strict:
        raise DemonstrationError(f"{path}: {_told(bad)}\nMend them, or set sft.bad_lines = 'skip' to leave them out.")
    if not rows:
        raise DemonstrationError(
            f"{path} has no demonstration that can be trained" + (f"; {_told(bad)}" if bad else "")
        )
    return Demonstrations(path=path, rows=tuple(rows), keys=tuple(keys), bad=tuple(bad))


def digest_of_rows(rows: Sequence[TokenRow]) -> str:
    """Of the tokens and masks, in order."""
    whole = hashlib.blake2b(digest_size=16)
    for row in rows:
        whole.update(row.token_ids.tobytes() + row.loss_mask.tobytes())
    return whole.hexdigest()


def chat_row(messages: Sequence[Message], tokenizer: Tokenizer) -> TokenRow:
    """One chat as tokens with its mask. Raises `EpisodeError` with the cause when it cannot be."""
    ids: list[int] = []
    mask: list[bool] = []
    rendered = ""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(messages[:at], add_generation_prompt=True)
        whole = tokenizer.render(messages[: at + 1], add_generation_prompt=False)
        context = tokenizer.encode(_beyond(prompt, rendered, f"before message {at + 1}"))
        said, is_ended = _said(_beyond(whole, prompt, f"at message {at + 1}"), tokenizer)
        turn = tokenizer.encode(said)
        if not is_ended:
            # The template writes no end; a policy that is to stop must say one all the same.
            turn = [*turn, *tokenizer.eos_token_ids[:1]]
        if not ids and not context:
            raise ChatError(
                "the prompt before its first assistant message is empty: nothing would predict the first token"
            )
        ids += [*context, *turn]
        mask += [False] * len(context) + [True] * len(turn)
        rendered = prompt + said
    if not any(mask):
        raise ChatError("has no assistant message with a token in it: there is nothing to train")
    return TokenRow.of(
        token_ids=ids, logprobs=np.where(mask, np.nan, 0.0), loss_mask=mask, versions=[NOT_SAMPLED] * len(ids)
    )


def _said(text: str, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The part of a rendered turn that the policy says, with the token that ends it; and whether there is one."""
    ends = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos_token_ids]
    cut = max((text.rfind(end) + len(end) for end in ends if end and end in text), default=0)
    return (text[:cut], True) if cut else (text, False)


def _beyond(text: str, beginning: str, where: str) -> str:
    if text.startswith(beginning):
        return text[len(beginning) :]
    at = next(
        (n for n, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b), min(len(text), len(beginning))
    )
    raise ChatError(
        f"the chat template rewrites the history {where}: at character {at} it has {text[at : at + EXCERPT]!r} where "
        f"{beginning[at : at + EXCERPT]!r} stood, so there is no single sequence of tokens to train"
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemonstrationError(
            f"cannot read the demonstrations {path}: {error}. A relative path is looked up beside the config file"
        ) from error
    # Only a newline ends a line: JSON strings may hold other line separators.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _messages(line: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ChatError(f"is not JSON ({error})") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ChatError('has no list "messages" with at least one message')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f'message {number} is not an object with a "role"')
        if not isinstance(message.get("content"), str) and "tool_calls" not in message:
            raise ChatError(f'message {number} ({message["role"]}) has no text in "content"')
    return messages


def _told(bad: Sequence[BadLine]) -> str:
    more = len(bad) - SHOWN_BAD_LINES
    lines = [f"{len(bad)} bad line{'s' if len(bad) != 1 else ''}", *(f"  {line}" for line in bad[:SHOWN_BAD_LINES])]
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)
