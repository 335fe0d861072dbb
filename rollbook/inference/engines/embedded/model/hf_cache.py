"""The slots behind the cache interface of transformers, for models that run through their Hugging Face module.

`PrefillCache` writes several tokens per row. `DecodeCache` writes one token per row and returns the rows' past as views: the rows
are packed at the front, so nothing is gathered.
"""

# S slots, H key/value heads, T positions, D head size, N rows of this forward, C tokens a row

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rollbook.inference.engines.embedded.model.forward import PrefillPositions
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache

Pair = tuple[Tensor, Tensor]


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_max_length(self) -> int:
        return -1


class _ProbeLayer(_Layer):
    """Returns keys and values unchanged, and records their shape."""

    shape: LayerShape

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        self.shape = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class ProbeCache(Cache):
    """Finds the shapes of a model's keys and values."""

    def __init__(self, num_layers: int) -> None:
        self.probes = [_ProbeLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self.probes))


class _PrefillLayer(_Layer):
    def __init__(self, pair: Pair, positions: PrefillPositions) -> None:
        super().__init__()
        self._pair = pair
        self._positions = positions

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        for slots_SHTD, new_NHCD in zip(self._pair, (key_states, value_states), strict=True):
            slots_SHTD[self._positions.write_rows_NC, :, self._positions.write_at_NC] = new_NHCD.transpose(1, 2)
        if self._positions.is_fresh:
            return key_states, value_states
        keys_SHTD, values_SHTD = self._pair
        rows_N, attention_length = self._positions.rows_N, self._positions.attention_length
        return keys_SHTD[rows_N, :, :attention_length], values_SHTD[rows_N, :, :attention_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, 0) if self._positions.is_fresh else (self._positions.attention_length, 0)

    def get_seq_length(self) -> int:
        return 0 if self._positions.is_fresh else self._positions.attention_length


class PrefillCache(Cache):
    """The cache of one forward of C tokens per row."""

    def __init__(self, slots: SlotCache, positions: PrefillPositions) -> None:
        super().__init__(layers=[_PrefillLayer(pair, positions) for pair in slots.pairs])


class _DecodeLayer(_Layer):
    def __init__(self, pair: Pair, rows_N: Tensor, positions_N: Tensor, length: int) -> None:
        super().__init__()
        self._pair = pair
        self._rows_N, self._positions_N, self._length = rows_N, positions_N, length

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        count = len(self._rows_N)
        keys_SHTD, values_SHTD = self._pair
        keys_SHTD[self._rows_N, :, self._positions_N] = key_states[:, :, 0]
        values_SHTD[self._rows_N, :, self._positions_N] = value_states[:, :, 0]
        return keys_SHTD[:count, :, : self._length], values_SHTD[:count, :, : self._length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> int:
        return self._length


class DecodeCache(Cache):
    """The cache of one forward of one token in each of the first N rows."""

    def __init__(self, slots: SlotCache, *, rows_N: Tensor, positions_N: Tensor, length: int) -> None:
        super().__init__(layers=[_DecodeLayer(pair, rows_N, positions_N, length) for pair in slots.pairs])
