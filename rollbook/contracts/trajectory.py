"""The record of one finished episode: token rows, and a reward or the reason why there is none.

Token ids are exactly those that the engine consumed and produced. Arrays are validated on construction, so later code need not
check them again.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from rollbook.contracts.policy import (
    MAX_ROUTES,
    NOT_SAMPLED,
    Routes,
    SamplingParams,
    pack_routes,
    unpack_routes,
)

LOGPROB_SLACK = 1e-3
"""Rounding in engines can make the logprob of a certain token slightly positive."""
MIN_LOGPROB = -1e4
"""Some engines report -9999 for a token that they excluded. Lower values are not logprobs."""
MAX_WIDTH = 1024
"""Numbers per entry of a column with any width."""
WIDTH_BYTES = 2
MAX_REWARD = 1e6
"""With larger rewards, gradients overflow."""
CHAT_FACT = "chat"
"""Fact of a sample with the arguments of the chat template besides the messages: `tools` and `template`."""
SCORE_PREFIX = "reward/"
"""Prefix of the metrics of a sample that hold the value of one reward function each."""


class Extent(StrEnum):
    """What a column of a sequence has one entry for."""

    TOKEN = "token"
    """Each token of the sequence."""
    TURN = "turn"
    """Each turn of the sample that is marked in the sequence, in the order of `RolloutSample.turns`."""
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """An optional array of a sequence. Stored as little-endian numbers of `dtype`, entry after entry.

    With `width = None` each array has a width of its own. It is stored before the numbers, which are compressed: their first bytes,
    then their second ones, and so on, because the high bytes of token ids are nearly all equal.
    """

    dtype: str = "float32"
    extent: Extent = Extent.TOKEN
    width: int | None = 1
    """Numbers per entry. With more than one, the array has two dimensions. None: 1 to `MAX_WIDTH`, also with two dimensions."""
    lowest: float = -MAX_REWARD
    highest: float = MAX_REWARD
    may_be_unknown: bool = False
    """Whether NaN, for unknown, is a value."""

    def array(self, values: ArrayLike) -> NDArray[Any]:
        return np.asarray(values, dtype=self.dtype)

    def encode(self, array: NDArray[Any]) -> bytes:
        raw = np.ascontiguousarray(array, dtype=self._stored).tobytes()
        if self.width is not None:
            return raw
        planes = np.frombuffer(raw, np.uint8).reshape(-1, self._stored.itemsize).T
        return int(array.shape[1]).to_bytes(WIDTH_BYTES, "little") + zlib.compress(planes.tobytes(), level=1)

    def decode(self, raw: bytes, *, num_tokens: int) -> NDArray[Any]:
        """Raises `ValueError` if the bytes are not a whole number of entries. `num_tokens`: of the sequence."""
        if self.width is not None:
            array = np.frombuffer(raw, self._stored).astype(self.dtype)
            return array if self.width == 1 else array.reshape(-1, self.width)
        width = int.from_bytes(raw[:WIDTH_BYTES], "little")
        size = num_tokens * width * self._stored.itemsize
        unpacking = zlib.decompressobj()
        try:
            # One byte more than expected shows a wrong size, without unpacking all of it.
            planes = unpacking.decompress(raw[WIDTH_BYTES:], size + 1)
        except zlib.error as error:
            raise ValueError(f"a compressed column is damaged: {error}") from error
        if not 1 <= width <= MAX_WIDTH or len(planes) != size or not unpacking.eof:
            raise ValueError(f"a compressed column does not have {num_tokens} entries of 1 to {MAX_WIDTH} numbers")
        numbers = np.frombuffer(planes, np.uint8).reshape(self._stored.itemsize, -1).T
        return np.frombuffer(numbers.tobytes(), self._stored).astype(self.dtype).reshape(-1, width)

    @property
    def _stored(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    def check(self, name: str, array: NDArray[Any], num_entries: int) -> None:
        """Raises `ValueError` for an array that a trainer cannot use."""
        shape: tuple[int, ...] = (num_entries,) if self.width == 1 else (num_entries, self.width or 1)
        if self.width is None and array.ndim == 2 and 1 <= array.shape[1] <= MAX_WIDTH:
            shape = (num_entries, array.shape[1])
        if array.dtype != self.dtype or array.shape != shape:
            raise ValueError(
                f"token row: {name} must be {self.dtype} of shape {shape} (entries: one per {self.extent}), "
                f"got {array.dtype} of shape {array.shape}"
            )
        # `not (x <= highest)` also rejects NaN.
        is_bad = ~((array >= self.lowest) & (array <= self.highest))
        if self.may_be_unknown:
            is_bad &= ~np.isnan(array)
        if is_bad.any():
            at = int(is_bad.argmax())
            raise ValueError(
                f"token row: {name} has {array.flat[at]} at position {at // math.prod(shape[1:])}, which cannot be trained"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesColumn(Column):
    """The experts that the sampler chose for each token: an array of three dimensions, compressed (`pack_routes`)."""

    def array(self, values: ArrayLike) -> NDArray[Any]:
        return np.asarray(values)

    def encode(self, array: NDArray[Any]) -> bytes:
        return pack_routes(array)

    def decode(self, raw: bytes, *, num_tokens: int) -> NDArray[Any]:
        return unpack_routes(raw, num_tokens=num_tokens)

    def check(self, name: str, array: NDArray[Any], num_entries: int) -> None:
        is_shaped = array.ndim == 3 and len(array) == num_entries and 1 <= array[0].size <= MAX_ROUTES
        if not is_shaped or array.dtype not in (np.uint8, np.uint16):
            raise ValueError(
                f"token row: {name} must be uint8 or uint16 of shape ({num_entries}, layers, choices), "
                f"got {array.dtype} of shape {array.shape}"
            )


COLUMNS: dict[str, Column] = {
    "weights": Column(lowest=0.0),
    "advantages": Column(),
    "reference_logprobs": Column(lowest=MIN_LOGPROB, highest=LOGPROB_SLACK, may_be_unknown=True),
    "teacher_logprobs": Column(lowest=MIN_LOGPROB, highest=LOGPROB_SLACK, may_be_unknown=True),
    "teacher_top_ids": Column(dtype="int32", width=None, lowest=-1, highest=2**31 - 1),
    "teacher_top_logprobs": Column(
        dtype="float16", width=None, lowest=MIN_LOGPROB, highest=LOGPROB_SLACK, may_be_unknown=True
    ),
    "turn_rewards": Column(dtype="float64", extent=Extent.TURN),
    "turn_states": Column(dtype="int64", extent=Extent.TURN, lowest=-math.inf, highest=math.inf),
    "routes": RoutesColumn(),
}
"""The optional columns; a new one is one line here. Producer, ledger and trainer check them with `check_columns`. Names that are
not in the table are refused, so a column is never ignored."""


def column(name: str) -> Column:
    """Raises `ValueError` for a name that is not in the table."""
    found = COLUMNS.get(name)
    if found is None:
        raise ValueError(f"there is no column {name!r}; a sequence may have {', '.join(COLUMNS)}")
    return found


def check_columns(columns: Mapping[str, NDArray[Any]], num_entries: Mapping[Extent, int]) -> None:
    """Check the columns of one sequence whose extent is in `num_entries`. Raises `ValueError`."""
    for name, array in columns.items():
        declared = column(name)
        if declared.extent in num_entries:
            declared.check(name, array, num_entries[declared.extent])
    ids, logprobs = columns.get("teacher_top_ids"), columns.get("teacher_top_logprobs")
    if (None if ids is None else ids.shape) != (None if logprobs is None else logprobs.shape):
        raise ValueError("token row: teacher_top_ids and teacher_top_logprobs must have the same shape")


_ARRAYS = (
    ("token_ids", np.dtype(np.int32)),
    ("logprobs", np.dtype(np.float32)),
    ("loss_mask", np.dtype(np.bool_)),
    ("versions", np.dtype(np.int32)),
)


class EndReason(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIME = "time"

    @property
    def is_truncated(self) -> bool:
        return self is not EndReason.DONE


OPENAI_FINISH_REASONS = {"stop": EndReason.DONE, "tool_calls": EndReason.DONE, "length": EndReason.MAX_TOKENS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sequence of tokens as the model processed it, as four arrays of equal length.

    `logprobs` are those of the sampling distribution (0 where nothing was sampled, NaN where unknown); `loss_mask` marks trained
    tokens; `versions` are publication ids, -1 where the policy did not sample.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    versions: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Optional arrays by name, see `COLUMNS`."""

    @classmethod
    def of(
        cls,
        *,
        token_ids: ArrayLike,
        logprobs: ArrayLike,
        loss_mask: ArrayLike,
        versions: ArrayLike,
        **columns: ArrayLike | None,
    ) -> "TokenRow":
        """Build from any sequences, converting dtypes. `columns` that are None are left out."""
        return cls(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            loss_mask=np.asarray(loss_mask, dtype=np.bool_),
            versions=np.asarray(versions, dtype=np.int32),
            columns=_arrays(columns),
        )

    def with_columns(self, **columns: ArrayLike) -> "TokenRow":
        """A copy with these columns set."""
        return replace(self, columns={**self.columns, **_arrays(columns)})

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """Factor of each token's loss; None: 1."""
        return self.columns.get("weights")

    @property
    def advantages(self) -> NDArray[np.float32] | None:
        """Advantages that the producer computed, trained if `trainer.advantage` is unset or "producer". None: it computed none."""
        return self.columns.get("advantages")

    @property
    def reference_logprobs(self) -> NDArray[np.float32] | None:
        """Logprobs under the reference policy, for the KL penalty; None, or NaN: the trainer computes them."""
        return self.columns.get("reference_logprobs")

    @property
    def routes(self) -> Routes | None:
        """The experts that the sampler chose for each token; None: not recorded."""
        return self.columns.get("routes")

    @property
    def teacher_logprobs(self) -> NDArray[np.float32] | None:
        """Logprobs under a teacher, for distillation; NaN: unknown."""
        return self.columns.get("teacher_logprobs")

    @property
    def teacher_top_ids(self) -> NDArray[np.int32] | None:
        """The likeliest tokens under a teacher at each position, one row per position; -1: none."""
        return self.columns.get("teacher_top_ids")

    @property
    def teacher_top_logprobs(self) -> NDArray[np.float16] | None:
        """Their logprobs; NaN where there is none."""
        return self.columns.get("teacher_top_logprobs")

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.logprobs, self.loss_mask, self.versions)
        for array, (name, dtype) in zip(arrays, _ARRAYS, strict=True):
            if array.ndim != 1 or array.dtype != dtype:
                raise ValueError(
                    f"token row: {name} must be a one-dimensional array of {dtype}, "
                    f"got {array.dtype} of shape {array.shape}"
                )
        lengths = tuple(map(len, arrays))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"token row with arrays of unequal length: {lengths[0]} ids, {lengths[1]} logprobs, {lengths[2]} loss mask, "
                f"{lengths[3]} versions"
            )
        if lengths[0] == 0:
            raise ValueError("token row is empty")
        # A ufunc's `reduce` costs half as much as the method on the short arrays of a row.
        if np.minimum.reduce(self.token_ids) < 0:
            raise ValueError(f"token row: negative token id at position {int(self.token_ids.argmin())}")
        if np.minimum.reduce(self.versions) < NOT_SAMPLED:
            raise ValueError(f"token row: version below {NOT_SAMPLED} at position {int(self.versions.argmin())}")
        if self.loss_mask[0]:
            raise ValueError("token row: the first token cannot be trained, because nothing predicts it")
        # `fmin` and `fmax` ignore NaN, which means unknown.
        if np.fmin.reduce(self.logprobs) < MIN_LOGPROB or np.fmax.reduce(self.logprobs) > LOGPROB_SLACK:
            at = int(((self.logprobs < MIN_LOGPROB) | (self.logprobs > LOGPROB_SLACK)).argmax())
            raise ValueError(
                f"token row: logprob {self.logprobs[at]} at position {at} is not the logarithm of a probability"
            )
        if self.columns:
            check_columns(self.columns, {Extent.TOKEN: lengths[0], Extent.SEQUENCE: 1})

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def has_logprobs(self) -> bool:
        """Whether the sampling logprob of every trained token is known."""
        return not bool(np.isnan(self.logprobs[self.loss_mask]).any())

    def trained_publications(self) -> frozenset[int]:
        """Publications that sampled the trained tokens; contains NOT_SAMPLED if one is unknown."""
        return frozenset(self.versions[self.loss_mask].tolist())


def _arrays(columns: Mapping[str, ArrayLike | None]) -> dict[str, NDArray[Any]]:
    return {name: column(name).array(values) for name, values in columns.items() if values is not None}


def _flat_row(
    tokens: ArrayLike | None, logprobs: ArrayLike | None, loss_mask: ArrayLike | None, versions: ArrayLike | None
) -> TokenRow:
    if tokens is None or logprobs is None or loss_mask is None:
        raise ValueError("a rollout sample needs tokens, logprobs and loss_mask, or sequences")
    marks = np.asarray(loss_mask, dtype=np.float32)
    return TokenRow.of(
        token_ids=tokens,
        logprobs=logprobs,
        loss_mask=marks != 0,
        versions=np.full(marks.shape, NOT_SAMPLED) if versions is None else versions,
        weights=None if ((marks == 0) | (marks == 1)).all() else marks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMark:
    """The tokens of one turn: `start` to `end` (exclusive) in sequence `sequence`, with its duration."""

    sequence: int
    start: int
    end: int
    seconds: float = 0.0
    """From the policy request to its response."""
    queue_s: float = 0.0
    """The part of `seconds` that the policy server did not sample."""
    act_s: float = 0.0
    """Seconds in which the environment acted on the turn."""


@dataclass(frozen=True, slots=True, init=False)
class RolloutSample:
    """One finished episode with one reward. It has several sequences if its history was rewritten.

    `RolloutSample(tokens, logprobs, loss_mask, reward)` makes a sample of one sequence from parallel lists. `reward is None` means
    that it could not be scored; `invalid_cause` says why. An infrastructure failure is never reward 0.
    """

    sequences: tuple[TokenRow, ...]
    sampling: SamplingParams
    reward: float | None
    finish_reason: EndReason
    invalid_cause: str | None
    solved: bool | None
    """Whether the task was solved, if the environment reports it."""
    messages: tuple[Mapping[str, Any], ...] | None
    metrics: Mapping[str, float]
    turns: tuple[TurnMark, ...]
    facts: Mapping[str, Any]
    """Details from the environment for people. Plain JSON values."""
    started_at: float | None
    """When the episode began and ended, scoring included: Unix time on the worker's machine. None: not recorded."""
    ended_at: float | None

    def __init__(
        self,
        tokens: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        loss_mask: ArrayLike | None = None,
        reward: float | None = None,
        *,
        versions: ArrayLike | None = None,
        sequences: tuple[TokenRow, ...] | None = None,
        sampling: SamplingParams | None = None,
        finish_reason: str = EndReason.DONE,
        invalid_cause: str | None = None,
        solved: bool | None = None,
        messages: tuple[Mapping[str, Any], ...] | None = None,
        metrics: Mapping[str, float] | None = None,
        turns: tuple[TurnMark, ...] = (),
        facts: Mapping[str, Any] | None = None,
        started_at: float | None = None,
        ended_at: float | None = None,
    ) -> None:
        """Takes `tokens`, `logprobs` and `loss_mask` of one sequence, or `sequences`.

        Numbers in `loss_mask` other than 0 and 1 are weights of the token's loss. `versions` are publication ids; None: unknown.
        `finish_reason` is an `EndReason`, or "stop" or "length" as in OpenAI's API.
        """
        if sequences is None:
            sequences = (_flat_row(tokens, logprobs, loss_mask, versions),)
        elif not (tokens is None and logprobs is None and loss_mask is None and versions is None):
            raise ValueError("a rollout sample takes sequences, or tokens, logprobs and loss_mask of one; not both")
        assign = object.__setattr__
        assign(self, "sequences", sequences)
        assign(self, "sampling", sampling or SamplingParams())
        assign(self, "reward", reward)
        assign(self, "finish_reason", OPENAI_FINISH_REASONS.get(finish_reason) or EndReason(finish_reason))
        assign(self, "invalid_cause", invalid_cause)
        assign(self, "solved", solved)
        assign(self, "messages", messages)
        assign(self, "metrics", {} if metrics is None else metrics)
        assign(self, "turns", turns)
        assign(self, "facts", {} if facts is None else facts)
        assign(self, "started_at", started_at)
        assign(self, "ended_at", ended_at)
        self._check()

    def _check(self) -> None:
        if not self.sequences:
            raise ValueError("a rollout sample needs at least one sequence")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(
                f"reward is {self.reward}; use None and an invalid_cause for a sample that could not be scored"
            )
        if self.reward is not None and abs(self.reward) > MAX_REWARD:
            raise ValueError(f"reward is {self.reward}; it must be between -{MAX_REWARD:g} and {MAX_REWARD:g}")
        if self.reward is None and not self.invalid_cause:
            raise ValueError("a sample without reward needs an invalid_cause")
        if self.reward is not None and self.invalid_cause:
            raise ValueError(f"a sample with reward {self.reward} cannot be invalid ({self.invalid_cause})")
        if self.reward is not None and self.num_trained == 0:
            raise ValueError("a scored sample needs at least one trained token")
        for turn in self.turns:
            if not (
                0 <= turn.sequence < len(self.sequences)
                and 0 <= turn.start <= turn.end <= len(self.sequences[turn.sequence])
            ):
                raise ValueError(f"turn mark {turn} is outside the sample's sequences")
        for number, row in enumerate(self.sequences):
            if row.columns:
                check_columns(row.columns, {Extent.TURN: sum(turn.sequence == number for turn in self.turns)})

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids of the only sequence. Raises `ValueError` if there are several, as for `logprobs` and `loss_mask`."""
        return self._only.token_ids

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return self._only.logprobs

    @property
    def loss_mask(self) -> NDArray[np.bool_] | NDArray[np.float32]:
        """1 for trained tokens, or their weights."""
        weights = self._only.weights
        return self._only.loss_mask if weights is None else weights

    @property
    def is_renormalised(self) -> bool:
        """Whether logprobs are those of a part of the vocabulary: of top-p, of top-k, or of what a grammar allowed."""
        sampling = self.sampling
        is_truncated = sampling.top_p < 1 or sampling.top_k > 0
        return is_truncated or sampling.grammar is not None or bool(self.facts.get("constrained_turns"))

    @property
    def _only(self) -> TokenRow:
        if len(self.sequences) > 1:
            raise ValueError(
                f"the sample has {len(self.sequences)} sequences, because its history was rewritten; read them from .sequences"
            )
        return self.sequences[0]

    @property
    def is_scorable(self) -> bool:
        return self.reward is not None

    @property
    def scores(self) -> dict[str, float]:
        """The value of each reward function that scored the sample, by name; `environment` is the reward of the episode."""
        return {
            name.removeprefix(SCORE_PREFIX): float(value)
            for name, value in self.metrics.items()
            if name.startswith(SCORE_PREFIX)
        }

    def with_turns(self, *, rewards: ArrayLike | None = None, states: Sequence[str] | None = None) -> "RolloutSample":
        """A copy with a reward for each turn, and a key of the state in which each turn was sampled, in the order of `turns`.

        Turns with equal keys were sampled in the same state (`trainer.advantage = "gigpo"`). The rewards of the turns need not
        add up to the sample's reward: the rest counts for the last turn.
        """
        given = {
            "turn_rewards": rewards,
            "turn_states": None if states is None else [_state_number(state) for state in states],
        }
        found = {name: column(name).array(values) for name, values in given.items() if values is not None}
        for name, values in found.items():
            if values.shape != (len(self.turns),):
                raise ValueError(f"{name} has shape {values.shape}; the sample has {len(self.turns)} turns")
        at = np.array([turn.sequence for turn in self.turns], dtype=np.int64)
        rows = [
            row.with_columns(**{name: values[at == number] for name, values in found.items()})
            for number, row in enumerate(self.sequences)
        ]
        return replace(self, sequences=tuple(rows))

    @property
    def turn_rewards(self) -> NDArray[np.float64] | None:
        """The reward of each turn, in the order of `turns`; None: not recorded."""
        return self._by_turn("turn_rewards")

    @property
    def turn_states(self) -> NDArray[np.int64] | None:
        """A number for the state in which each turn was sampled, equal for equal states; None: not recorded."""
        return self._by_turn("turn_states")

    def _by_turn(self, name: str) -> NDArray[Any] | None:
        if not self.turns or any(name not in row.columns for row in self.sequences):
            return None
        in_order = [iter(row.columns[name].tolist()) for row in self.sequences]
        return column(name).array([next(in_order[turn.sequence]) for turn in self.turns])

    def written_mask(self, sequence: int) -> NDArray[np.bool_]:
        """The tokens of a sequence that are in a turn and were not sampled: a thinking budget wrote them."""
        row = self.sequences[sequence]
        is_in_turn = np.zeros(len(row), dtype=np.bool_)
        for turn in self.turns:
            if turn.sequence == sequence:
                is_in_turn[turn.start : turn.end] = True
        written: NDArray[np.bool_] = is_in_turn & (row.versions == NOT_SAMPLED)
        return written

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.sequences)

    @property
    def num_trained(self) -> int:
        return sum(row.num_trained for row in self.sequences)


def _state_number(state: str) -> int:
    # int64 has one bit less than the digest.
    return xxhash.xxh3_64_intdigest(state.encode("utf-8", "surrogatepass")) >> 1
