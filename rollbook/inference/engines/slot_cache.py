"""Keys and values of running requests, one row a slot, rows at different positions.

Two caches speak transformers' cache interface: `PrefillCache` only collects what a padded prefill computes; `SlotCache` holds the
running rows, always packed at the front, so that a decode step reads views and gathers nothing. Tensors grow with what is in use.
"""

# S slots, H key/value heads, T positions, D head size, N rows of this forward

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LENGTH_STEP = 64
"""Positions are added in steps of this many, so that growing (a copy) is rare."""

Pair = tuple[Tensor, Tensor]
"""Keys and values, each (rows, H, T, D)."""


class _PrefillLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Hands keys and values through, and remembers them."""

    is_sliding = False
    computed: Pair

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        self.computed = (key_states, value_states)
        return self.computed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class PrefillCache(Cache):
    """For one prefill forward from position 0."""

    def __init__(self, num_layers: int) -> None:
        self.collected = [_PrefillLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self.collected))


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """One layer's slots. `update` writes one token a row at the row's own position."""

    is_sliding = False

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._cache = cache
        self.stored: Pair | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.room(key_states, value_states)

    def room(self, like_keys: Tensor, like_values: Tensor) -> Pair:
        """The slots, grown to what the cache has reserved; what they hold stays."""
        rows, length = self._cache.reserved
        stored = self.stored
        if stored is None or stored[0].shape[0] < rows or stored[0].shape[2] < length:
            old_keys, old_values = stored or (None, None)
            stored = (_grown(old_keys, like_keys, rows, length), _grown(old_values, like_values, rows, length))
            self.stored, self.is_initialized = stored, True
        return stored

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        keys_SHTD, values_SHTD = self.room(key_states, value_states)
        rows_N, positions_N, length = self._cache.decoding
        keys_SHTD[rows_N, :, positions_N] = key_states[:, :, 0]
        values_SHTD[rows_N, :, positions_N] = value_states[:, :, 0]
        count = len(rows_N)
        return keys_SHTD[:count, :, :length], values_SHTD[:count, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.decoding[2], 0

    def get_seq_length(self) -> int:
        return self._cache.decoding[2]

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The running rows. Row i belongs to the i-th running request of the engine."""

    def __init__(self, num_layers: int, *, max_rows: int, max_length: int) -> None:
        self._max_rows, self._max_length = max_rows, max_length
        self.reserved = (0, 0)
        nothing = torch.empty(0, dtype=torch.long)
        self.decoding: tuple[Tensor, Tensor, int] = (nothing, nothing, 0)
        self._slots = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slots))

    def decode_at(self, positions: Sequence[int], device: torch.device) -> Pair:
        """Prepare a decode of one token in each of the first rows. Gives positions (N) and the additive mask (N, 1, 1, T)."""
        length = max(positions) + 1
        self._reserve(len(positions), length)
        positions_N = torch.tensor(positions, device=device)
        self.decoding = (torch.arange(len(positions), device=device), positions_N, length)
        is_future_NT = torch.arange(length, device=device) > positions_N[:, None]
        mask_NT = torch.zeros(is_future_NT.shape, device=device).masked_fill_(is_future_NT, float("-inf"))
        return positions_N, mask_NT[:, None, None, :]

    def store(self, prefill: PrefillCache, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Copy rows of a prefill into slots. Its padding is overwritten, or masked, before anybody reads it."""
        length = prefill.collected[0].computed[0].shape[2]
        self._reserve(max(rows) + 1, length)
        for layer, filled in zip(self._slots, prefill.collected, strict=True):
            for slots_SHTD, computed_NHTD in zip(layer.room(*filled.computed), filled.computed, strict=True):
                sources_N, rows_N = _index(sources, slots_SHTD), _index(rows, slots_SHTD)
                slots_SHTD[rows_N, :, :length] = computed_NHTD[sources_N]

    def move(self, moves: Sequence[tuple[int, int]], *, length: int) -> None:
        """Copy row to row, (from, to), the first `length` positions."""
        for slots_SHTD in self._tensors():
            sources_N = _index([source for source, _ in moves], slots_SHTD)
            targets_N = _index([target for _, target in moves], slots_SHTD)
            slots_SHTD[targets_N, :, :length] = slots_SHTD[sources_N, :, :length]

    def wipe(self, rows: Sequence[int]) -> None:
        """Forget rows completely."""
        for slots_SHTD in self._tensors():
            slots_SHTD[_index(rows, slots_SHTD)] = 0

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._slots if layer.stored is not None for tensor in layer.stored]

    def _reserve(self, rows: int, length: int) -> None:
        have_rows, have_length = self.reserved
        if rows > have_rows:
            have_rows = min(self._max_rows, max(rows, 2 * have_rows))
        if length > have_length:
            have_length = min(self._max_length, -(-length // LENGTH_STEP) * LENGTH_STEP)
        self.reserved = (have_rows, have_length)


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(rows), device=like.device)


def _grown(old_SHTD: Tensor | None, like_NHTD: Tensor, rows: int, length: int) -> Tensor:
    _, heads, _, size = like_NHTD.shape
    # Zeros, not empty memory: a masked position still takes part as 0 x value, and 0 x NaN is NaN.
    new_SHTD = torch.zeros((rows, heads, length, size), dtype=like_NHTD.dtype, device=like_NHTD.device)
    if old_SHTD is not None:
        new_SHTD[: old_SHTD.shape[0], :, : old_SHTD.shape[2]] = old_SHTD
    return new_SHTD
