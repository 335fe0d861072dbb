"""Demonstrations: turns the chats of a JSONL file into token rows in which exactly the assistant's tokens are trained.

An assistant message with `"weight": 0` is context. A line may have tokens instead of a chat. Then nothing is rendered: the model
must have the same vocabulary.

The rows equal those of a rollout in which the policy sampled the same text. Each prompt is the template's rendering of the history
up to the assistant's turn, encoded separately; the turn is the text that the template adds, up to and including its end token. The
template's text between turns is context and is not trained.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.contracts.decoding import load_json
from rollbook.contracts.errors import EpisodeError, RunError
from rollbook.contracts.policy import NOT_SAMPLED
from rollbook.contracts.trajectory import TokenRow
from rollbook.rollout.contract import Message, Tokenizer

SHOWN_BAD_LINES = 20
"""Bad lines that are listed; the rest is counted."""
EXCERPT = 30


class DemonstrationError(RunError):
    """The file of demonstrations cannot be used."""


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
    """A digest of each line's messages, or tokens. A split depends on these, not on the order of the file."""
    bad: tuple[BadLine, ...]

    def split(self, share: float) -> tuple[tuple[TokenRow, ...], tuple[TokenRow, ...]]:
        """The rows to train, and about `share` of all rows for validation. Changes to other lines do not move a chat."""
        is_held_out = [int(key[:8], 16) / 2**32 < share for key in self.keys]
        train = tuple(row for row, held_out in zip(self.rows, is_held_out, strict=True) if not held_out)
        validation = tuple(row for row, held_out in zip(self.rows, is_held_out, strict=True) if held_out)
        if not train or (share > 0 and not validation):
            raise DemonstrationError(
                f"{self.path}: validation_share = {share:g} of {len(self.rows)} demonstrations leaves {len(train)} to train and "
                f"{len(validation)} to validate with; set a validation file, or choose another share"
            )
        return train, validation


def read_demonstrations(path: Path, tokenizer: Tokenizer, *, max_tokens: int, is_strict: bool) -> Demonstrations:
    """Read every line. Bad lines are reported with number and cause: all in one error if `is_strict`, else in `bad`."""
    rows: list[TokenRow] = []
    keys: list[str] = []
    bad: list[BadLine] = []
    for number, line in _lines(path):
        try:
            row, key = _row(_object(line), tokenizer)
            if len(row) > max_tokens:
                raise ChatError(f"has {len(row)} tokens, and sft.max_tokens is {max_tokens}")
        except EpisodeError as error:
            bad.append(BadLine(number=number, cause=str(error)))
            continue
        rows.append(row)
        keys.append(key)
    if bad and is_strict:
        raise DemonstrationError(f"{path}: {_listed(bad)}\nFix them, or set sft.bad_lines = 'skip' to leave them out.")
    if not rows:
        raise DemonstrationError(f"{path} has no usable demonstration" + (f"; {_listed(bad)}" if bad else ""))
    return Demonstrations(path=path, rows=tuple(rows), keys=tuple(keys), bad=tuple(bad))


def digest_of_rows(rows: Sequence[TokenRow]) -> str:
    """A digest of the tokens and masks, in order."""
    whole = hashlib.blake2b(digest_size=16)
    for row in rows:
        whole.update(row.token_ids.tobytes() + row.loss_mask.tobytes())
    return whole.hexdigest()


def _row(value: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[TokenRow, str]:
    """The tokens of one line, and its key."""
    if "token_ids" in value:
        row = token_row(value, tokenizer)
        return row, hashlib.blake2b(row.token_ids.tobytes(), digest_size=8).hexdigest()
    messages, tools, template = _messages(value), value.get("tools") or [], value.get("template") or {}
    if not isinstance(tools, list) or not isinstance(template, dict):
        raise ChatError('"tools" must be a list and "template" an object, as the chat template takes them')
    key = hashlib.blake2b(json.dumps(messages, sort_keys=True).encode(), digest_size=8).hexdigest()
    return chat_row(messages, tokenizer, tools=tools, template=template), key


def token_row(value: Mapping[str, Any], tokenizer: Tokenizer) -> TokenRow:
    """A line with tokens, as they are. Raises `ChatError` if this model would read another text, or cannot train them."""
    ids, mask, found = value["token_ids"], value.get("loss_mask"), value.get("vocabulary")
    if found != tokenizer.vocabulary_digest:
        raise ChatError(
            f'its tokens are of "vocabulary" {found}, and the model has {tokenizer.vocabulary_digest}: use a model with the same '
            "tokenizer, or chats (rollbook export without --tokens)"
        )
    is_list = isinstance(ids, list) and all(type(one) is int and 0 <= one < tokenizer.vocab_size for one in ids)
    if not is_list:
        raise ChatError(f'"token_ids" is no list of numbers from 0 to {tokenizer.vocab_size - 1}')
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(one in (0, 1) for one in mask):
        raise ChatError(f'"loss_mask" is no list of {len(ids)} numbers that are 0 or 1')
    if not any(mask) or mask[0]:
        raise ChatError('"loss_mask" must train a token, and not the first one, which nothing predicts')
    is_trained = np.array(mask, dtype=np.bool_)
    return TokenRow.of(
        token_ids=ids,
        logprobs=np.where(is_trained, np.nan, 0.0),
        loss_mask=is_trained,
        versions=[NOT_SAMPLED] * len(ids),
    )


def chat_row(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template: Mapping[str, Any] | None = None,
) -> TokenRow:
    """One chat as tokens with its mask. Raises `EpisodeError` with the cause if it cannot be trained."""
    render = partial(tokenizer.render, tools=tools, template=template)
    ids: list[int] = []
    mask: list[bool] = []
    rendered = ""
    is_said = [message["role"] == "assistant" and message.get("weight", 1) != 0 for message in messages]
    messages = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    for at in range(len(messages)):
        if not is_said[at]:
            continue
        prompt = render(messages[:at], add_generation_prompt=True)
        whole = render(messages[: at + 1], add_generation_prompt=False)
        context = tokenizer.encode(_suffix(prompt, rendered, f"before message {at + 1}"))
        said, is_ended = _policy_text(_suffix(whole, prompt, f"at message {at + 1}"), tokenizer)
        turn = tokenizer.encode(said)
        if not is_ended:
            # The template writes no end token, but the policy must learn to emit one.
            turn = [*turn, *tokenizer.eos_token_ids[:1]]
        if not ids and not context:
            raise ChatError(
                "the prompt before its first assistant message is empty: the first token cannot be predicted"
            )
        ids += [*context, *turn]
        mask += [False] * len(context) + [True] * len(turn)
        rendered = prompt + said
    if not any(mask):
        raise ChatError("has no assistant message with a token to train")
    return TokenRow.of(
        token_ids=ids, logprobs=np.where(mask, np.nan, 0.0), loss_mask=mask, versions=[NOT_SAMPLED] * len(ids)
    )


def _policy_text(text: str, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The part of a rendered turn that the policy generates, up to its end token, and whether there is an end token."""
    ends = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos_token_ids]
    cut = max((text.rfind(end) + len(end) for end in ends if end and end in text), default=0)
    return (text[:cut], True) if cut else (text, False)


def _suffix(text: str, prefix: str, where: str) -> str:
    if text.startswith(prefix):
        return text[len(prefix) :]
    at = next((n for n, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix)))
    raise ChatError(
        f"the chat template rewrites the history {where}: at character {at}, {prefix[at : at + EXCERPT]!r} became "
        f"{text[at : at + EXCERPT]!r}, so the chat is not one sequence of tokens; rollbook export --tokens writes those of rollouts"
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemonstrationError(
            f"cannot read the demonstrations {path}: {error}. Relative paths start at the directory of the config file"
        ) from error
    # Only a newline ends a line: JSON strings may hold other line separators.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _object(line: str) -> dict[str, Any]:
    try:
        value = load_json(line)
    except ValueError as error:
        raise ChatError(f"is not JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _messages(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatError('has no list "messages" with at least one message')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ChatError(f'message {number} is not an object with a "role"')
        if not isinstance(message.get("content"), str) and "tool_calls" not in message:
            raise ChatError(f'message {number} ({message["role"]}) has no text in "content"')
        if type(message.get("weight", 1)) is not int or message.get("weight", 1) not in (0, 1):
            raise ChatError(f'message {number} ({message["role"]}) has a "weight" that is not 0 or 1')
    return messages


def _listed(bad: Sequence[BadLine]) -> str:
    more = len(bad) - SHOWN_BAD_LINES
    lines = [f"{len(bad)} bad line{'s' if len(bad) != 1 else ''}", *(f"  {line}" for line in bad[:SHOWN_BAD_LINES])]
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)
