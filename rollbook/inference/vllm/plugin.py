"""A weight transfer back end for vLLM: reads a published file, checks its digest, then loads it into the model.

vLLM finds it by the entry point `vllm.general_plugins` of this package; a server uses it when started with
`--weight-transfer-config '{"backend": "rollbook"}'`. It is imported in vLLM's processes only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollbook.contracts.weights import weights_digest
from rollbook.inference.weights.safetensors import read_weights

BACKEND = "rollbook"


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Nothing to set up: both sides read the same file."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    path: str
    digest: str


class FileWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """One file is one update. A file with another digest than the published one is not loaded."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        return None

    def start_weight_update(self) -> None:
        """Not needed: the layers are prepared for loading after the digest was checked."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        path = Path(update_info.path)
        digest = weights_digest(read_weights(path).values())
        if digest != update_info.digest:
            raise ValueError(
                f"weights at {path} have digest {digest}, but {update_info.digest} was published; nothing was loaded"
            )
        initialize_layerwise_reload(self.model)
        self.model.load_weights(load_file(path).items())
        finalize_layerwise_reload(self.model, self.model_config)
        self._update_packed_copies()

    def _update_packed_copies(self) -> None:
        """On a CPU vLLM uses packed copies. Loading a tied input embedding does not update the copy of the output embedding."""
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def finish_weight_update(self) -> None:
        """Not needed: `receive_weights` has finished the update."""

    def shutdown(self) -> None:
        """Nothing to free."""


def register() -> None:
    """Called by vLLM in each of its processes, in some more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
