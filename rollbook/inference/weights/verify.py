"""Tensors of an update that are in memory already: are they the published ones?"""

from collections.abc import Mapping
from typing import TypeGuard

from rollbook.contracts.policy import Publication
from rollbook.contracts.weights import RawTensor, weights_digest
from rollbook.inference.engine import TensorSource, WeightsError


def is_raw(tensor: TensorSource) -> TypeGuard[RawTensor]:
    """Bytes in host memory, with their name, dtype and shape beside them."""
    return not hasattr(tensor, "data_ptr")


def require_published(publication: Publication, tensors: Mapping[str, TensorSource]) -> None:
    """Raises `WeightsError` unless the bytes are those that were published. Tensors on a device are taken as they are."""
    raw = [tensor for tensor in tensors.values() if is_raw(tensor)]
    if len(raw) < len(tensors):
        return
    named_wrongly = [name for name, tensor in zip(tensors, raw, strict=True) if tensor.name != name]
    if named_wrongly:
        raise WeightsError(f"tensor {named_wrongly[0]} calls itself otherwise; nothing was loaded")
    digest = weights_digest(raw)
    if digest != publication.digest:
        raise WeightsError(
            f"the tensors have digest {digest}, but publication {publication.id} (step {publication.step}) was announced "
            f"with {publication.digest}; nothing was loaded"
        )
