"""The host's state of every slot, as arrays: owner, position, sampling settings. A step needs no Python loop over rows.

Each decode step moves every active row by one position, so the host knows the lengths before it has read the tokens. Steps can
therefore be launched ahead, and a row that reaches its limit is free at launch.
"""

# S slots

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.inference.request import GenerationRequest

_STREAM = np.uint64(0xD1B54A32D192ED03)
_SEED = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
NO_STOP = -1


Tops = tuple[NDArray[np.int32], NDArray[np.float32]]
"""The most likely tokens of every row, and their logprobs."""


class RowTable:
    """Used by one thread. `packed` holds all columns that the device needs, as one block of memory."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.packed = np.zeros(6 * max_rows, dtype=np.int32)
        blocks = self.packed.reshape(6, max_rows)
        self.keys = blocks[:2].reshape(-1).view(np.int64)
        """Random bits for the next token of each row."""
        self.positions = blocks[2]
        """Where the next token of each row is written: 0 for a free row, the prefilled length for a row in prefill."""
        self.temperatures = blocks[3].view(np.float32)
        self.top_k = blocks[4]
        self.top_p = blocks[5].view(np.float32)
        self.owners: NDArray[np.object_] = np.full(max_rows, None, dtype=object)
        self.is_active = np.zeros(max_rows, dtype=np.bool_)
        """Whether the row is decoded. An owned row that is not active is in prefill."""
        self.counts = np.zeros(max_rows, dtype=np.int64)
        """Tokens launched for the owner so far."""
        self.limits = np.zeros(max_rows, dtype=np.int64)
        self.tops = np.zeros(max_rows, dtype=np.int64)
        """Number of most likely tokens to report for each token."""
        self.adapters = np.zeros(max_rows, dtype=np.int32)
        """The adapter of each row, as a slot of `AdapterBank`. A free row has that of the policy."""
        self.is_constrained = np.zeros(max_rows, dtype=np.bool_)
        """Whether the owner has a constraint."""
        self.stops = np.full((max_rows, 1), NO_STOP, dtype=np.int32)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._is_owned = np.zeros(max_rows, dtype=np.bool_)
        self.is_scaled = self.is_truncated = self.is_any_greedy = self.has_stops = self.has_tops = False
        self._has_current_flags = True
        self.is_drafting = False
        """Whether rows may have drafts. Then all tokens of all rows are processed before a round."""
        self.num_owned = 0
        self.temperatures[:] = 1.0
        self.top_p[:] = 1.0

    @property
    def extent(self) -> int:
        """Rows up to the last owned one."""
        owned = np.flatnonzero(self._is_owned)
        return int(owned[-1]) + 1 if len(owned) else 0

    @property
    def owned_adapters(self) -> NDArray[np.int32]:
        """The adapters of the rows that have an owner."""
        return self.adapters[self._is_owned]

    def requests(self) -> list[GenerationRequest]:
        return list(self.owners[self._is_owned])

    def free_rows(self, count: int) -> list[int]:
        """The lowest free rows, so that the table stays dense."""
        free: list[int] = np.flatnonzero(~self._is_owned)[:count].tolist()
        return free

    def is_owned(self, extent: int) -> list[bool]:
        """Whether each of the first `extent` rows has an owner."""
        owned: list[bool] = self._is_owned[:extent].tolist()
        return owned

    def masks(self) -> dict[int, NDArray[np.uint8]]:
        """The tokens that may come next in each constrained row, as bits."""
        rows: list[int] = np.flatnonzero(self.is_constrained).tolist()
        return {row: self.owners[row].mask for row in rows}

    def occupy(self, row: int, request: GenerationRequest) -> None:
        sampling = request.sampling
        self.owners[row] = request
        self._is_owned[row] = True
        self.num_owned += 1
        request.row = row
        self.positions[row] = 0
        self.counts[row] = len(request.tokens)
        self.limits[row] = request.limit
        self._seeds[row] = (request.seed * _SEED) & _MASK_64
        self.temperatures[row] = sampling.temperature
        self.top_k[row] = min(sampling.top_k, 2**31 - 1)
        self.top_p[row] = sampling.top_p
        self.tops[row] = sampling.top_logprobs
        self.adapters[row] = request.adapter
        self.is_constrained[row] = request.constraint is not None
        stops = sampling.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.max_rows, len(stops)), NO_STOP, dtype=np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = NO_STOP
        self.stops[row, : len(stops)] = stops
        self._has_current_flags = False

    def release(self, row: int) -> None:
        self.owners[row] = None
        self._is_owned[row] = False
        self.num_owned -= 1
        self.is_active[row] = False
        self.positions[row] = 0
        self.temperatures[row] = 1.0
        self.top_k[row] = 0
        self.top_p[row] = 1.0
        self.tops[row] = 0
        self.adapters[row] = 0
        self.is_constrained[row] = False
        self.stops[row] = NO_STOP
        self._has_current_flags = False

    def move(self, source: int, target: int) -> None:
        """Move the owner of a row to a free row."""
        request: GenerationRequest = self.owners[source]
        for column in (
            self.positions,
            self.temperatures,
            self.top_k,
            self.top_p,
            self.counts,
            self.limits,
            self.tops,
            self.adapters,
            self.is_constrained,
            self._seeds,
        ):
            column[target] = column[source]
        self.stops[target] = self.stops[source]
        self.is_active[target] = self.is_active[source]
        self._is_owned[target] = True
        self.owners[target] = request
        self.num_owned += 1
        self.release(source)
        request.row = target

    def prepare(self) -> None:
        """Before a launch: compute each row's random bits, a hash (splitmix64) of its seed and the token's index."""
        if not self._has_current_flags:
            self._update_flags()
        self.keys[:] = _keys(self._seeds, self.counts)

    def lines(self) -> "DecodeLines":
        """The tokens that the next round decodes."""
        active = np.flatnonzero(self.is_active)
        if not self.is_drafting:
            return DecodeLines.undrafted(active, self)
        self.prepare()
        drafts: list[list[int]] = [request.draft for request in self.owners[active]]
        sizes = np.array([1 + len(draft) for draft in drafts], dtype=np.int64)
        rows, total = np.repeat(active, sizes), int(sizes.sum())
        offsets = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = [
            token for row, draft in zip(active, drafts, strict=True) for token in (self.owners[row].tokens[-1], *draft)
        ]
        return DecodeLines(
            rows=rows,
            offsets=offsets,
            tokens=np.array(tokens, dtype=np.int32),
            positions=self.positions[rows] + offsets.astype(np.int32),
            columns=rows + offsets * (self.max_rows + 1),
            keys=_keys(self._seeds[rows], self.counts[rows] + offsets),
        )

    def _update_flags(self) -> None:
        self._has_current_flags = True
        self.is_scaled = bool(((self.temperatures != 1.0) & (self.temperatures != 0.0)).any())
        self.is_any_greedy = bool((self.temperatures == 0.0).any())
        self.is_truncated = bool(((self.top_k > 0) | (self.top_p < 1.0)).any())
        widest = int((self.stops != NO_STOP).sum(axis=1).max())
        self.has_stops = widest > 0
        # One request with many stop tokens must not slow down later rounds.
        if self.stops.shape[1] > max(1, widest):
            self.stops = self.stops[:, : max(1, widest)].copy()
        self.has_tops = bool(self.tops.any())


def _keys(seeds: NDArray[np.uint64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The random bits of the tokens with these indices."""
    mixed = seeds + (counts.astype(np.uint64) + np.uint64(1)) * _STREAM
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: NDArray[np.int64] = (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLines:
    """The tokens of a decode step: the last one of each row, and after it those that are drafted."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """0: the last token of the row; then the number of the drafted one."""
    tokens: NDArray[np.int32] | None
    """None: only the device knows them, and none are drafted."""
    positions: NDArray[np.int32]
    columns: NDArray[np.int64]
    """Where the results are written: those after the tokens with one offset follow each other."""
    keys: NDArray[np.int64]
    """Random bits for what is sampled after each."""

    @classmethod
    def undrafted(cls, rows: NDArray[np.int64], table: RowTable) -> "DecodeLines":
        table.prepare()
        offsets = np.zeros(len(rows), dtype=np.int64)
        return cls(
            rows=rows,
            offsets=offsets,
            tokens=None,
            positions=table.positions[rows],
            columns=rows,
            keys=table.keys[rows],
        )

    @property
    def depth(self) -> int:
        """Tokens that a row may get."""
        return 1 + int(self.offsets.max(initial=0))


class RoundLog:
    """Tokens and logprobs of recent rounds, one line per round, one column per row. A request's tokens are a slice of a column."""

    def __init__(self, max_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = np.zeros((capacity, max_rows), dtype=np.int32)
        self.logprobs = np.zeros((capacity, max_rows), dtype=np.float32)
        self.versions = np.zeros(capacity, dtype=np.int32)
        self.tops: list[Tops | None] = [None] * capacity

    def write(
        self,
        number: int,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        version: int,
        tops: Tops | None = None,
    ) -> None:
        line = number % self.capacity
        self.tops[line] = tops
        self.tokens[line] = tokens
        self.logprobs[line] = logprobs
        self.versions[line] = version

    def flush(self, request: GenerationRequest, until: int) -> None:
        """Append a request's tokens of the rounds before `until`. Must be called before their lines are overwritten."""
        segments, request.segments = request.segments, []
        for row, start, end in segments:
            last = until if end is None else min(end, until)
            if start < last:
                first, count = start % self.capacity, last - start
                # A range is read several times faster than a list of lines. It is a list where the log starts again.
                is_whole = first + count <= self.capacity
                lines = slice(first, first + count) if is_whole else np.arange(start, last) % self.capacity
                request.extend(self.tokens[lines, row], self.logprobs[lines, row], self.versions[lines])
                if tops := request.sampling.top_logprobs:
                    self._flush_tops(request, [number % self.capacity for number in range(start, last)], row, tops)
            if end is None or end > last:
                request.segments.append((row, max(start, last), end))

    def _flush_tops(self, request: GenerationRequest, lines: list[int], row: int, count: int) -> None:
        for line in lines:
            tops = self.tops[line]
            assert tops is not None, "a round with such a row collects them"
            request.top_tokens.append(tops[0][row, :count].copy())
            request.top_logprobs.append(tops[1][row, :count].copy())
