"""Prompts on their way into the slots: in pieces, batched, and once for all who ask the same.

A request that is being filled owns its row and is not decoded yet. When its last piece is in, its first token is sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollbook.inference.engines.batching import Piece, pieces_of_round, prefill_forwards
from rollbook.inference.engines.embedded.cache.prefix_cache import NEVER, PrefixHit, PrefixStore
from rollbook.inference.engines.embedded.cache.prompt_memo import PromptMemo
from rollbook.inference.engines.embedded.row_table import RowTable
from rollbook.inference.engines.embedded.runner import Runner
from rollbook.inference.request import Request


@dataclass(slots=True, eq=False)
class Filling:
    """A request whose row is being prefilled. Siblings bring the same tokens: they get a copy."""

    request: Request
    tokens: list[int]
    done: int = 0
    hit: PrefixHit | None = None
    """What its row still has to be given before the rest is filled."""
    siblings: list[Request] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.done >= len(self.tokens)

    @property
    def wants_one_token(self) -> bool:
        return any(r.limit - len(r.tokens) == 1 for r in (self.request, *self.siblings))


@dataclass(frozen=True, slots=True)
class _Heads:
    """Logits of a forward, and who is ready to sample from which line of it."""

    logits_NV: Tensor
    ready: list[tuple[int, Filling]]


class Prefiller:
    """Who is being filled, in order of arrival."""

    def __init__(
        self,
        runner: Runner,
        table: RowTable,
        *,
        round_tokens: int,
        forward_tokens: int,
        memo_rows: int,
        prefixes: PrefixStore,
    ) -> None:
        self._runner = runner
        self._prefixes = prefixes
        self._table = table
        self._round_tokens, self._forward_tokens = round_tokens, forward_tokens
        self._memo = PromptMemo(memo_rows)
        self._known: list[tuple[Request, Tensor]] = []
        self._filling: list[Filling] = []

    @property
    def has_work(self) -> bool:
        return bool(self._filling or self._known)

    @property
    def longest(self) -> int:
        """Positions that the longest of them will need, its first token included."""
        return max((len(filling.tokens) + 1 for filling in self._filling), default=1)

    def add(self, requests: Sequence[Request]) -> None:
        """They have their rows."""
        leaders: dict[tuple[int, ...], Filling] = {}
        for request in requests:
            tokens = (*request.prompt, *request.tokens)
            leader = leaders.get(tokens)
            if leader is not None:
                leader.siblings.append(request)
            elif request.limit - len(request.tokens) == 1 and (logits_V := self._memo.get(tokens)) is not None:
                self._known.append((request, logits_V))
            else:
                hit = self._prefixes.find(tokens)
                leaders[tokens] = Filling(request, list(tokens), 0 if hit is None else hit.length, hit)
        self._filling.extend(leaders.values())

    def forget(self, request: Request) -> None:
        """It is over, or over here. Its siblings go on without it."""
        self._known = [(known, logits_V) for known, logits_V in self._known if known is not request]
        for filling in self._filling:
            if request is filling.request and filling.siblings:
                # The next sibling is filled from the beginning, in its own row.
                filling.request, filling.done, filling.hit = filling.siblings.pop(0), 0, None
            elif request in filling.siblings:
                filling.siblings.remove(request)
        self._filling = [filling for filling in self._filling if filling.request is not request]

    def weights_changed(self) -> None:
        self._memo.clear()

    def begin_again(self) -> None:
        """What was filled under older weights is filled again, in rounds to come."""
        for filling in self._filling:
            filling.done, filling.hit = 0, None
            filling.request.cached_tokens = 0
            self._table.positions[filling.request.row] = 0

    def fill_now(self, rows: Sequence[tuple[Request, list[int]]]) -> None:
        """Fill rows that are being decoded, all of them, and sample nothing."""
        fillings = [Filling(request, tokens) for request, tokens in rows]
        while not all(filling.is_ready for filling in fillings):
            for _ in self._fill(fillings):
                pass

    def round(self) -> list[int]:
        """Fill what a round may fill. Gives the rows that sampled their first token."""
        begun: list[int] = []
        self._table.prepare()
        if self._known:
            begun += [request.row for request, _ in self._known]
            logits_NV = torch.stack([logits_V for _, logits_V in self._known])
            self._runner.begin_rows(self._table, begun, logits_NV, range(len(begun)))
            self._known = []
        self._take_over()
        for heads in self._fill(self._filling):
            rows: list[int] = []
            sources: list[int] = []
            for line, filling in heads.ready:
                self._copy_to_siblings(filling)
                for sibling in filling.siblings:
                    sibling.cached_tokens = filling.request.cached_tokens
                if filling.wants_one_token:
                    self._memo.put(tuple(filling.tokens), heads.logits_NV[line])
                for request in (filling.request, *filling.siblings):
                    rows.append(request.row)
                    sources.append(line)
                    self._table.positions[request.row] = len(filling.tokens)
            if rows:
                self._runner.begin_rows(self._table, rows, heads.logits_NV, sources)
                begun += rows
        self._filling = [filling for filling in self._filling if not filling.is_ready]
        self._table.counts[begun] += 1
        self._table.is_active[begun] = True
        return begun

    def _take_over(self) -> None:
        """Give rows what earlier requests had computed of their tokens. At once: these are the weights it was computed with."""
        for filling in self._filling:
            if filling.hit is not None:
                row = filling.request.row
                self._prefixes.put_in(filling.hit, row)
                self._table.positions[row] = filling.done
                filling.request.cached_tokens = min(filling.hit.length, len(filling.request.prompt))
                filling.hit = None

    def _fill(self, fillings: Sequence[Filling]) -> Iterator[_Heads]:
        """One round's share of prefilling, forward by forward."""
        waves = pieces_of_round(
            [(filling.done, len(filling.tokens)) for filling in fillings],
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
                    yield self._forward(fillings, [pieces[index] for index in forward], is_fresh=is_fresh)

    def _forward(self, fillings: Sequence[Filling], pieces: Sequence[Piece], *, is_fresh: bool) -> _Heads:
        logits_NV = self._runner.prefill(
            [fillings[piece.index].request.row for piece in pieces],
            [fillings[piece.index].tokens[piece.start : piece.end] for piece in pieces],
            [piece.start for piece in pieces],
            is_fresh=is_fresh,
        )
        ready: list[tuple[int, Filling]] = []
        for line, piece in enumerate(pieces):
            filling = fillings[piece.index]
            filling.done = piece.end
            if not self._table.is_active[filling.request.row]:
                self._table.positions[filling.request.row] = piece.end
            if filling.is_ready:
                ready.append((line, filling))
        return _Heads(logits_NV, ready)

    def _copy_to_siblings(self, filling: Filling) -> None:
        targets = [sibling.row for sibling in filling.siblings if sibling.limit - len(sibling.tokens) > 1]
        for sibling in filling.siblings:
            if sibling.row not in targets:
                # Its one token is sampled from the leader's logits: nothing stands in its row.
                sibling.mark = NEVER
        if targets:
            sources = [filling.request.row] * len(targets)
            self._runner.slots.copy_rows(sources, targets, length=len(filling.tokens))
