"""Our weight transfer back end inside vLLM: it reads a published file, checks its digest, and only then touches the model.

vLLM finds it by the entry point `vllm.general_plugins` of this package; a server uses it when started with
`--weight-transfer-config '{"backend": "rollbook"}'`. Loaded in vLLM's processes only.
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
    """Nothing to set up: both sides see the same file."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    path: str
    digest: str


class FileWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """One file is one update. A file that is not what was published changes nothing."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        return None

    def start_weight_update(self) -> None:
        """Nothing yet: the layers are opened for loading once the bytes are known to be right."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        path = Path(update_info.path)
        digest = weights_digest(read_weights(path).values())
        if digest != update_info.digest:
            raise ValueError(
                f"weights at {path} have digest {digest}, but were announced with {update_info.digest}; nothing was loaded"
            )
        initialize_layerwise_reload(self.model)
        self.model.load_weights(load_file(path).items())
        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_packed_copies()

    def _renew_packed_copies(self) -> None:
        """On a CPU an output embedding multiplies by a packed copy. Where it is tied, loading the input one does not renew it."""
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def finish_weight_update(self) -> None:
        """Done already."""

    def shutdown(self) -> None:
        """Holds nothing."""


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
