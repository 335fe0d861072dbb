"""Our slots behind transformers' cache interface, for models that run through their own Hugging Face module.

`PrefillCache` writes what a forward of several tokens a row computes; `DecodeCache` writes one token a row and shows the rows'
whole past as views: the rows lie packed at the front, so nothing is gathered.
"""

# S slots, H key/value heads, T positions, D head size, N rows of this forward, C tokens a row

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rollbook.inference.engines.embedded.cache.slot_cache import LayerShape, SlotCache
from rollbook.inference.engines.embedded.model.forward import PrefillPlaces

Pair = tuple[Tensor, Tensor]


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def get_max_length(self) -> int:
        return -1


class _ProbeLayer(_Layer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    """Hands keys and values through, and remembers their shape."""

    shape: LayerShape

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        self.shape = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


class ProbeCache(Cache):
    """Finds out what a model keeps of a position."""

    def __init__(self, num_layers: int) -> None:
        self.probes = [_ProbeLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self.probes))


class _PrefillLayer(_Layer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    def __init__(self, pair: Pair, places: PrefillPlaces) -> None:
        super().__init__()
        self._pair = pair
        self._places = places

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        for slots_SHTD, new_NHCD in zip(self._pair, (key_states, value_states), strict=True):
            slots_SHTD[self._places.write_rows_NC, :, self._places.write_at_NC] = new_NHCD.transpose(1, 2)
        if self._places.is_fresh:
            return key_states, value_states
        keys_SHTD, values_SHTD = self._pair
        rows_N, reach = self._places.rows_N, self._places.reach
        return keys_SHTD[rows_N, :, :reach], values_SHTD[rows_N, :, :reach]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, 0) if self._places.is_fresh else (self._places.reach, 0)

    def get_seq_length(self) -> int:
        return 0 if self._places.is_fresh else self._places.reach


class PrefillCache(Cache):
    """For one forward of C tokens in each of some rows."""

    def __init__(self, slots: SlotCache, places: PrefillPlaces) -> None:
        super().__init__(layers=[_PrefillLayer(pair, places) for pair in slots.pairs])


class _DecodeLayer(_Layer):  # type: ignore[no-untyped-call]  # transformers leaves it untyped
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
    """For one forward of one token in each of the first N rows."""

    def __init__(self, slots: SlotCache, *, rows_N: Tensor, positions_N: Tensor, length: int) -> None:
        super().__init__(layers=[_DecodeLayer(pair, rows_N, positions_N, length) for pair in slots.pairs])
