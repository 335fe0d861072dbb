"""Messages for weight updates in vLLM's format, with publication, epoch and digest in every update."""

from typing import Any, Literal

import msgspec

from rollbook.contracts.policy import Publication, PublicationId, SamplerExactness
from rollbook.contracts.weights import Adapter

UNPUBLISHED = "default"
"""vLLM's version of weights that were never published."""

Backend = Literal["directory", "shared_memory", "cuda_ipc", "nccl", "pull"]


class AdapterInfo(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Marks the tensors of an update as those of a LoRA adapter. `settings`: PEFT's `adapter_config.json`."""

    name: str
    settings: dict[str, Any]
    base_digest: str | None = None
    base_dtype: str | None = "F32"

    @classmethod
    def of(cls, adapter: Adapter) -> "AdapterInfo":
        return cls(
            name=adapter.name,
            settings=dict(adapter.settings),
            base_digest=adapter.base_digest,
            base_dtype=adapter.base_dtype,
        )

    def to_contract(self) -> Adapter:
        return Adapter(name=self.name, settings=self.settings, base_digest=self.base_digest, base_dtype=self.base_dtype)


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A publication and the location of its tensors.

    `directory` and `shared_memory`: `path` is a safetensors file that both sides can read. `cuda_ipc`: `handles` refer to memory of
    the same GPU. `nccl`: vLLM receives the tensors over a process group in the order of `names`. `pull`: the replica fetches a
    safetensors file from one of `sources`, the trainer first.
    """

    publication: int
    step: int
    epoch: int
    digest: str
    backend: Backend = "directory"
    path: str | None = None
    names: list[str] | None = None
    dtype_names: list[str] | None = None
    shapes: list[list[int]] | None = None
    handles: list[dict[str, Any]] | None = None
    adapter: AdapterInfo | None = None
    sources: list[str] | None = None

    def to_contract(self) -> Publication:
        return Publication(id=PublicationId(self.publication), epoch=self.epoch, step=self.step, digest=self.digest)

    def adapter_contract(self) -> Adapter | None:
        return None if self.adapter is None else self.adapter.to_contract()

    def tensor_headers(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor. Raises `ValueError` if their numbers differ."""
        names, dtypes, shapes = self.names or [], self.dtype_names or [], self.shapes or []
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise ValueError(f"names: {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not match")
        return [(n, d, tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=True)]


class RangeManifest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The file of a publication, as ranges with digests. The last range may be shorter."""

    publication: int
    digest: str
    """Digest of the published weights."""
    size: int
    range_bytes: int
    digests: list[str]
    copies: list[str] = []
    """Replicas that have the file, besides the server that responds."""


class UpdateBody(msgspec.Struct, forbid_unknown_fields=True):
    update_info: UpdateInfo


class InitInfo(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How a vLLM replica joins the trainer's process group. The trainer is rank 0. Our own server joins none."""

    backend: Backend = "directory"
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int = 1
    world_size: int = 1
    packed: bool | None = None
    """vLLM's trainers send it."""


class InitBody(msgspec.Struct, forbid_unknown_fields=True):
    init_info: InitInfo


class FinishBody(msgspec.Struct, forbid_unknown_fields=True):
    weight_version: str | None = None


class NewVersionBody(msgspec.Struct, forbid_unknown_fields=True):
    new_version: str


class CheckBody(msgspec.Struct, forbid_unknown_fields=True):
    action: str = "checksum"


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: list[str]


class LoadAdapterBody(msgspec.Struct):
    """Like vLLM, unknown fields are ignored."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(msgspec.Struct):
    lora_name: str


class RpcBody(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class WeightCheck(msgspec.Struct):
    """`digest` is computed from the weights in memory; `published` is the digest of their publication."""

    digest: str
    weight_version: str
    published: str | None
    dtype: str
    """Dtype of the weights in memory. The digests are equal if the published weights have the same dtype."""


class WeightInfo(msgspec.Struct):
    weight_version: str = UNPUBLISHED
    publication: int | None = None
    step: int | None = None
    epoch: int | None = None
    digest: str | None = None
    dtype: str | None = None
    """Dtype of the weights in memory. Only digests of equal dtypes can be compared."""
    adapter: str | None = None
    """The live adapter."""
    inexact_because: str | None = "the server does not say that its logprobs are exact"
    """Why logprobs do not have the bits of the trainer; null: they have, on the same machine."""
    recomputes: bool = False
    """With kv_after_update = "recompute"."""
    machine: dict[str, str] = {}
    """GPU and libraries, which decide the last bits."""

    @classmethod
    def of(
        cls,
        publication: Publication | None,
        *,
        exactness: SamplerExactness | None = None,
        dtype: str | None = None,
        adapter: Adapter | None = None,
    ) -> "WeightInfo":
        said = cls(dtype=dtype, adapter=None if adapter is None else adapter.name)
        if exactness is not None:
            said.inexact_because, said.recomputes = exactness.inexact_because, exactness.recomputes
            said.machine = dict(exactness.machine)
        if publication is None:
            return said
        return msgspec.structs.replace(
            said,
            weight_version=str(publication.id),
            publication=publication.id,
            step=publication.step,
            epoch=publication.epoch,
            digest=publication.digest,
        )

    @property
    def exactness(self) -> SamplerExactness:
        return SamplerExactness(
            inexact_because=self.inexact_because, recomputes=self.recomputes, machine=dict(self.machine)
        )

    def to_contract(self) -> Publication | None:
        if self.publication is None or self.step is None or self.epoch is None or self.digest is None:
            return None
        return Publication(id=PublicationId(self.publication), epoch=self.epoch, step=self.step, digest=self.digest)
