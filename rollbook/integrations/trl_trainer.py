"""TRL's `AsyncGRPOTrainer` for batches of the ledger, and what it needs to run on a CPU."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, slice_tensors
from torch.utils.data import DataLoader, IterableDataset
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, packing


class RollbookGRPOTrainer(AsyncGRPOTrainer):  # type: ignore[misc]  # TRL is not installed where types are checked
    """`AsyncGRPOTrainer` that requests a batch only when the batch before it was trained.

    The loader of accelerate fetches one batch ahead. That adds a version of lag, and after a crash it waits for a batch that is
    formed only after the current one was trained. PyTorch's own loader does not fetch ahead. With several processes, rank 0 gets
    the batch and sends each rank its row.
    """

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = super().get_train_dataloader().base_dataloader
        if self.accelerator.num_processes == 1:
            return loader
        return DataLoader(_RowOfRank(loader, self.accelerator), batch_size=None)


class _RowOfRank(IterableDataset[Any]):
    """Batches of rank 0, reduced to the row of this process. All ranks iterate in step."""

    def __init__(self, loader: DataLoader[Any], accelerator: Any) -> None:
        self._loader = loader
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:
        rank, is_main = self._accelerator.process_index, self._accelerator.is_main_process
        batches = iter(self._loader) if is_main else iter(())
        while True:
            sent = broadcast_object_list([next(batches, None) if is_main else None], from_process=0)[0]
            if sent is None:
                return
            yield slice_tensors(sent, slice(rank, rank + 1))


def use_cpu() -> None:
    """Replace what TRL needs of a GPU: a flash-attention kernel for sequences of different lengths, and the device's peak speed.

    Call it before creating the trainer, and only on a machine without a GPU.
    """
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def varlen_attention(  # noqa: PLR0917 - the signature of the kernel
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> torch.Tensor:
    """Tokens × heads × size. Each segment of queries attends to the keys of its own sequence; the last keys are its own."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    spans = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
    outputs = [_attend(query[q0:q1], key[k0:k1], value[k0:k1], softmax_scale, causal) for (q0, q1), (k0, k1) in spans]
    return torch.cat(outputs)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, causal: bool
) -> torch.Tensor:
    num_q, num_k = len(query), len(key)
    # Aligned at the end, as in the kernel: the last query attends to every key.
    mask = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q) if causal else None
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.squeeze(0).transpose(0, 1)
