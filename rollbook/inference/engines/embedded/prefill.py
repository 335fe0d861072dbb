"""Prefills prompts into the slots: in pieces, batched, and once for all requests with the same tokens.

A request in prefill owns its row but is not decoded yet. After its last piece, its first token is sampled.
"""

# N rows, V vocabulary

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollbook.inference.engines.batching import PrefillSpan, pieces_of_round, prefill_forwards
from rollbook.inference.engines.embedded.prefix_cache import NOT_REUSABLE, PrefixCache, PrefixHit, PromptMemo
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.request import GenerationRequest


@dataclass(slots=True, eq=False)
class Prefill:
    """A request in prefill. Its siblings have the same tokens and get a copy of its row."""

    request: GenerationRequest
    tokens: list[int]
    done: int = 0
    hit: PrefixHit | None = None
    """A cached prefix that is still to be copied into the row."""
    siblings: list[GenerationRequest] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.done >= len(self.tokens)

    @property
    def is_memoizable(self) -> bool:
        """Whether one of the requests needs a single token only."""
        return any(r.limit - len(r.tokens) == 1 for r in (self.request, *self.siblings))


@dataclass(frozen=True, slots=True)
class _ForwardOutput:
    """The logits of a forward, and the line of each prefill that it completed."""

    logits_NV: Tensor
    completed: list[tuple[int, Prefill]]


class Prefiller:
    """The requests in prefill, in order of arrival."""

    def __init__(
        self,
        runner: Runner,
        table: RowTable,
        *,
        round_tokens: int,
        forward_tokens: int,
        memo_rows: int,
        prefixes: PrefixCache,
        copies_all: bool = False,
    ) -> None:
        """`copies_all`: siblings that need a single token get a copy of the row, too."""
        self._copies_all = copies_all
        self._runner = runner
        self._prefixes = prefixes
        self._table = table
        self._round_tokens, self._forward_tokens = round_tokens, forward_tokens
        self._memo = PromptMemo(memo_rows)
        self._memoized: list[tuple[GenerationRequest, Tensor]] = []
        self._prefills: list[Prefill] = []

    @property
    def has_work(self) -> bool:
        return bool(self._prefills or self._memoized)

    @property
    def longest(self) -> int:
        """Positions that the longest of them needs, its first new token included."""
        return max((len(prefill.tokens) + 1 for prefill in self._prefills), default=1)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Each request must already own a row."""
        leaders: dict[tuple[int, ...], Prefill] = {}
        for request in requests:
            tokens = (*request.prompt.tolist(), *request.tokens)
            # Requests with the same tokens share work only if they use the same adapter.
            key = (request.adapter, *tokens)
            leader = leaders.get(key)
            if leader is not None:
                leader.siblings.append(request)
            elif request.limit - len(request.tokens) == 1 and (logits_V := self._memo.get(key)) is not None:
                self._memoized.append((request, logits_V))
            else:
                hit = self._prefixes.find(tokens, adapter=request.adapter)
                leaders[key] = Prefill(request, list(tokens), 0 if hit is None else hit.length, hit)
        self._prefills.extend(leaders.values())

    def remove(self, request: GenerationRequest) -> None:
        """Its siblings continue without it."""
        self._memoized = [(other, logits_V) for other, logits_V in self._memoized if other is not request]
        for prefill in self._prefills:
            if request is prefill.request and prefill.siblings:
                # The next sibling is prefilled from the start, in its own row.
                prefill.request, prefill.done, prefill.hit = prefill.siblings.pop(0), 0, None
            elif request in prefill.siblings:
                prefill.siblings.remove(request)
        self._prefills = [prefill for prefill in self._prefills if prefill.request is not request]

    def weights_changed(self) -> None:
        self._memo.clear()

    def restart(self) -> None:
        """Prefill again, in later rounds, what was prefilled under older weights."""
        for prefill in self._prefills:
            prefill.done, prefill.hit = 0, None
            prefill.request.cached_tokens = 0
            self._table.positions[prefill.request.row] = 0

    def recompute(self, rows: Sequence[tuple[GenerationRequest, list[int]]]) -> None:
        """Prefill rows that are being decoded, completely, and sample nothing."""
        prefills = [Prefill(request, tokens) for request, tokens in rows]
        while not all(prefill.is_complete for prefill in prefills):
            for _ in self._forwards(prefills):
                pass

    def round(self) -> list[int]:
        """Prefill one round's share of tokens. Returns the rows that sampled their first token."""
        started: list[int] = []
        self._table.prepare()
        if self._memoized:
            started += [request.row for request, _ in self._memoized]
            logits_NV = torch.stack([logits_V for _, logits_V in self._memoized])
            self._runner.sample_first_tokens(self._table, started, logits_NV, range(len(started)))
            self._memoized = []
        self._copy_prefixes()
        for output in self._forwards(self._prefills):
            rows: list[int] = []
            sources: list[int] = []
            for line, prefill in output.completed:
                self._copy_to_siblings(prefill)
                for sibling in prefill.siblings:
                    sibling.cached_tokens = prefill.request.cached_tokens
                if prefill.is_memoizable and self._is_of_one_version(prefill):
                    self._memo.put((prefill.request.adapter, *prefill.tokens), output.logits_NV[line])
                for request in (prefill.request, *prefill.siblings):
                    rows.append(request.row)
                    sources.append(line)
                    self._table.positions[request.row] = len(prefill.tokens)
            if rows:
                self._runner.sample_first_tokens(self._table, rows, output.logits_NV, sources)
                started += rows
        self._prefills = [prefill for prefill in self._prefills if not prefill.is_complete]
        self._table.counts[started] += 1
        self._table.is_active[started] = True
        return started

    def _is_of_one_version(self, prefill: Prefill) -> bool:
        """Whether all of its keys were computed since the weights changed last."""
        return prefill.request.weights_generation == self._prefixes.weights_generation

    def _copy_prefixes(self) -> None:
        """Copy cached prefixes into their rows now, because a weight update would make them stale."""
        for prefill in self._prefills:
            if prefill.hit is not None:
                row = prefill.request.row
                self._prefixes.copy_in(prefill.hit, row)
                self._table.positions[row] = prefill.done
                prefill.request.cached_tokens = min(prefill.hit.length, len(prefill.request.prompt))
                prefill.hit = None

    def _forwards(self, prefills: Sequence[Prefill]) -> Iterator[_ForwardOutput]:
        """Run the prefill forwards of one round."""
        waves = pieces_of_round(
            [(prefill.done, len(prefill.tokens)) for prefill in prefills],
            max_tokens=self._round_tokens,
            piece_tokens=self._forward_tokens,
        )
        for wave in waves:
            for is_fresh in (True, False):
                pieces = [piece for piece in wave if (piece.start == 0) is is_fresh]
                for forward in prefill_forwards(
                    [piece.length for piece in pieces],
                    max_tokens=self._forward_tokens,
                    forward_cost=self._runner.forward_cost_tokens,
                ):
                    yield self._forward(prefills, [pieces[index] for index in forward], is_fresh=is_fresh)

    def _forward(self, prefills: Sequence[Prefill], pieces: Sequence[PrefillSpan], *, is_fresh: bool) -> _ForwardOutput:
        rows = [prefills[piece.index].request.row for piece in pieces]
        logits_NV = self._runner.prefill(
            rows,
            [prefills[piece.index].tokens[piece.start : piece.end] for piece in pieces],
            [piece.start for piece in pieces],
            is_fresh=is_fresh,
            adapters_N=self._table.adapters[rows],
        )
        completed: list[tuple[int, Prefill]] = []
        for line, piece in enumerate(pieces):
            prefill = prefills[piece.index]
            prefill.done = piece.end
            if not self._table.is_active[prefill.request.row]:
                self._table.positions[prefill.request.row] = piece.end
            if prefill.is_complete:
                completed.append((line, prefill))
        return _ForwardOutput(logits_NV, completed)

    def _copy_to_siblings(self, prefill: Prefill) -> None:
        targets = [s.row for s in prefill.siblings if self._copies_all or s.limit - len(s.tokens) > 1]
        for sibling in prefill.siblings:
            if sibling.row not in targets:
                # Its only token is sampled from the leader's logits, so its row stays empty.
                sibling.weights_generation = NOT_REUSABLE
        if targets:
            sources = [prefill.request.row] * len(targets)
            self._runner.slots.copy_rows(sources, targets, length=len(prefill.tokens))
