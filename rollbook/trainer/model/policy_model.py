"""The trained model: load, log-probabilities of tokens, weights, save.

Weights are always float32: updates of a small learning rate would be rounded away in bfloat16. With `compute_dtype = "bfloat16"`
there are two copies: the float32 weights that the optimizer updates, and a bfloat16 shadow used for the passes. Casting once per
step is cheaper than casting in every layer, and the shadow computes like a bfloat16 engine. With one rank, weights
that are not trained (the base of adapters, a reference) exist once, in the compute dtype: nothing updates them.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import load_on_demand
from rollbook.contracts.weights import AdapterKind
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.minibatches import Microbatch
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.distributed.sharding import gathered, shard
from rollbook.trainer.flops import ModelShape
from rollbook.trainer.model.gather import Gather
from rollbook.trainer.model.network import PolicyNetwork, fuse_norms, has_plain_head, make_packable
from rollbook.trainer.model.packed_attention import NAME as PACKED_ATTENTION
from rollbook.trainer.model.packed_attention import Packing, fastest_kernel
from rollbook.trainer.model.routers import Routers, freeze_routers
from rollbook.trainer.model.skeleton import WeightFiles, fill, first_layers, load_text_model, skeleton, with_adapters
from rollbook.trainer.model.weights import NAMES, as_in_files, digest_of, named_weights, snapshot_of, to_ordinary_memory

ADAPTER_FILE = "adapter_config.json"
"""Its presence marks a PEFT directory."""

PROBED_TOKENS = (1024, 2048)
"""The passes whose memory is compared."""
MEMORY_SHARE_OF_PASS = 0.25
"""The rest holds weights, gradients, the optimizer's state, and possibly a policy server on the same GPU."""
MAX_TOKENS_PER_PASS = 131_072


class PolicyModel:
    """A causal language model with float32 weights on one device."""

    def __init__(
        self,
        module: Any,
        config: TrainerConfig | None = None,
        *,
        files: WeightFiles | None = None,
        is_reference: bool = False,
    ) -> None:
        """`files`: set if the module is a skeleton. Each rank fills its shards from them. `is_reference`: it is never trained."""
        config = config or TrainerConfig()
        if is_reference:
            module.requires_grad_(False)
        _check_process_group(config)
        _limit_memory(config)
        self._adapters = _adapters_module() if config.lora is not None else None
        self.publishes_adapters = False
        """Whether publications and digests cover the adapters only. Set by `publish_adapters`."""
        self.device = config.device
        self._is_whole = config.ranks == 1
        self.module: nn.Module = module if files is not None else _aligned(module, config)
        _without_dropout(self.module)
        if config.freeze_routers:
            freeze_routers(self.module)
        self._module: Any = self.module
        self.config: Any = module.config
        has_plain, self.is_packed = self._choose_passes(config, files)
        computing, self._shadows = self._computing_module(config)
        self._computing: Any = computing
        self.routers = Routers(computing)
        self._is_checkpointing = False
        if config.device == "cuda":
            fuse_norms(computing)
        self.use_checkpointing(config.gradient_checkpointing)
        self.vocabulary_size = int(self._module.get_input_embeddings().weight.shape[0])
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.shape = _shape(self._module)
        self.network = PolicyNetwork(computing, max_logits_bytes=config.logits_bytes, has_plain_head=has_plain)
        self.attention_kernel = _attention_kernel(self.config, config) if self.is_packed else "none"
        """The attention kernel for packed sequences. All kernels give the same numbers."""
        if config.ranks > 1:
            shard(self.network, device=config.device, is_mixed=config.compute_dtype == "bfloat16")
        if files is not None:
            fill(self._module, files, device=config.device)

    def _choose_passes(self, config: TrainerConfig, files: WeightFiles | None) -> tuple[bool, bool]:
        """Whether the head is a plain linear layer, and whether sequences are packed. The probe needs float32: of a skeleton, or a
        base in bfloat16, the first layers are probed."""
        is_whole = files is None and all(p.dtype is torch.float32 for p in self._module.parameters())
        probed = self._module if is_whole else first_layers(self._module, files, device=config.device)
        has_plain = has_plain_head(probed)
        is_packed = config.packing != "padded" and make_packable(probed)
        if is_packed and not is_whole:
            self._module.set_attn_implementation(PACKED_ATTENTION)
        if config.packing == "packed" and not is_packed:
            raise RunError(
                f"trainer.packing = 'packed': a model of type {self.config.model_type!r} computes other numbers with packed"
                " sequences. Set trainer.packing = 'auto' or 'padded'."
            )
        return has_plain, is_packed

    def _computing_module(self, config: TrainerConfig) -> tuple[Any, list[tuple[nn.Parameter, nn.Parameter]]]:
        """The module that computes the passes, and each weight with its bfloat16 shadow. Sharding has its own mixed precision."""
        if config.compute_dtype != "bfloat16" or config.ranks > 1:
            return self._module, []
        # Deepcopy takes these instead of copies of the weights: no second copy in float32 is made.
        chosen = {id(p): _shadow_of(p) if p.requires_grad else p for p in self._module.parameters()}
        computing = copy.deepcopy(self._module, dict(chosen))
        return computing, [(p, chosen[id(p)]) for p in self.module.parameters() if p.requires_grad]

    @classmethod
    def load(
        cls,
        directory: Path,
        config: TrainerConfig | None = None,
        *,
        adapters: Path | None = None,
        is_reference: bool = False,
    ) -> "PolicyModel":
        """Load a Hugging Face directory, or a PEFT directory with its adapter merged into the base.

        With LoRA the directory is the base; `adapters` is the directory of a checkpoint's adapters, None for new ones.
        """
        # Progress bars would disturb the run's live view.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        config = config or TrainerConfig()
        module, files = _read_module(directory, config, is_reference=is_reference)
        if config.lora is not None:
            add = partial(
                _adapters_module().with_adapters,
                settings=config.lora,
                base_dir=directory,
                seed=config.seed,
                saved=adapters,
            )
            module = add(module) if files is None else with_adapters(module, add)
        return cls(module, config, files=files, is_reference=is_reference)

    def tokens_per_pass(self, config: TrainerConfig) -> int:
        """`max_tokens_per_microbatch`, or as many tokens as take a quarter of the GPU's memory.

        Small passes leave a GPU idle: with 135M parameters and 16,384 tokens, starting its kernels takes longer than running them.
        """
        if config.max_tokens_per_microbatch is not None or config.device == "cpu" or config.ranks > 1:
            return config.tokens_per_pass
        # As in a step: compiled code is only valid for the number of threads it was compiled with.
        torch.set_num_threads(config.threads)
        few, many = PROBED_TOKENS
        self._memory_of_forward(few)  # compiles, and allocates what all passes share
        bytes_per_token = max(1.0, (self._memory_of_forward(many) - self._memory_of_forward(few)) / (many - few))
        budget = MEMORY_SHARE_OF_PASS * torch.cuda.get_device_properties(self.device).total_memory
        return min(max(int(budget / bytes_per_token) // few * few, few), MAX_TOKENS_PER_PASS)

    def _memory_of_forward(self, num_tokens: int) -> int:
        """Peak memory of the forward pass over one sequence, in bytes: what the backward pass needs, and the logits.

        The peak of both passes would be that of the gradients, whose size does not depend on the tokens.
        """
        ids_T = torch.arange(num_tokens, device=self.device) % self.vocabulary_size
        sequences = PackedSequences.unshared([num_tokens]) if self.is_packed else None
        torch.cuda.reset_peak_memory_stats()
        logprobs_T, _ = self.network(
            ids_T.unsqueeze(0),
            self._packing(sequences),
            predictions=Gather.of(np.arange(num_tokens), num_tokens, self.device),
            targets_N=ids_T,
            temperatures_N=None,
        )
        peak = torch.cuda.max_memory_allocated()
        logprobs_T.sum().backward()
        for parameter in self.parameters():
            parameter.grad = None
        return peak

    def use_checkpointing(self, is_used: bool) -> None:
        """Recompute the activations inside layers in the backward pass, or keep them."""
        if is_used == self._is_checkpointing:
            return
        # Layers recompute in training mode only; without dropout, that mode gives the same numbers.
        if is_used:
            self._computing.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self._computing.gradient_checkpointing_disable()
        self._computing.train(is_used)
        self._is_checkpointing = is_used

    def discard_gradients(self) -> None:
        """Free all gradients, also those that a failed backward pass left at the bfloat16 shadow."""
        for parameter in (*self.module.parameters(), *self._computing.parameters()):
            parameter.grad = None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def token_logprobs(self, micro: Microbatch, *, is_entropy_trained: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of each target of the pass at its temperature, and the entropy of its distribution.

        The entropy has a gradient only with `is_entropy_trained`.
        """
        self.routers.clear()
        result: tuple[Tensor, Tensor] = self.network(
            self.tensor(micro.inputs_BT),
            self._packing(micro.sequences),
            predictions=Gather.of(micro.predicted_at_N, micro.inputs_BT.size, self.device),
            targets_N=self.tensor(micro.targets_N),
            temperatures_N=None if (micro.temperatures_N == 1.0).all() else self.tensor(micro.temperatures_N),
            is_entropy_trained=is_entropy_trained,
        )
        return result

    def _packing(self, sequences: PackedSequences | None) -> Packing | None:
        return None if sequences is None else Packing.of(sequences, self.device, kernel=self.attention_kernel)

    def adapters_off(self) -> AbstractContextManager[Any]:
        """Compute with the base model, which is the initial policy, while the context lasts."""
        if self._adapters is None:
            raise RunError("the KL penalty needs a reference model, or adapters that can be disabled")
        off: AbstractContextManager[Any] = self._adapters.adapters_disabled(self.network.language_model)
        return off

    @torch.no_grad()
    def update_shadow(self) -> None:
        """Copy the updated weights to the bfloat16 shadow. Call it after every optimizer step."""
        updated = [(master, shadow) for master, shadow in self._shadows if master.requires_grad]
        if updated:
            masters, shadows = zip(*updated, strict=True)
            torch._foreach_copy_(shadows, masters)

    def weights(self) -> Mapping[str, Tensor]:
        """The live weights that publications and digests cover, by name; tied weights once: those that the passes compute with.

        With LoRA: the adapters only, or the merged weights, see `publishes_adapters`.
        """
        if self._adapters is not None and self.publishes_adapters:
            alone: dict[str, Tensor] = self._adapters.adapter_weights(self.module)
            return alone
        if self._adapters is not None:
            merged: Mapping[str, Tensor] = self._adapters.MergedWeights(self.module)
            return self._as_in_files(merged)
        return self._as_in_files(named_weights(self.module, dict(self._shadows)))

    def _as_in_files(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Under the names and shapes of the checkpoint's files, which engines read. Shards keep those of the module."""
        return as_in_files(self._module, weights) if self._is_whole else weights

    def checkpointed_weights(self) -> dict[str, Tensor]:
        """The live weights that a checkpoint holds: the adapters only with LoRA."""
        if self._adapters is None:
            return dict(self._as_in_files(named_weights(self.module)))
        adapters: dict[str, Tensor] = self._adapters.adapter_weights(self.module)
        return adapters

    def checkpoint_weights(self, published: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights for a checkpoint: the copy made for publication, unless that was cast to bfloat16 or merged with adapters."""
        if self.publishes_adapters or (self._adapters is None and not self._shadows):
            return published
        return snapshot_of(self.checkpointed_weights())

    def publish_adapters(self) -> AdapterKind:
        """From now on, publications and digests cover the adapters only. Returns their settings and base."""
        if self._adapters is None:
            raise RunError("adapters cannot be published: trainer.lora is not set")
        self.publishes_adapters = True
        return AdapterKind(
            settings=self._adapters.settings_of(self.module),
            base_digest=digest_of(base := self._as_in_files(self._adapters.base_weights(self.module))),
            base_dtype=_common_dtype(base),
        )

    def has_digest(self, digest: str) -> bool:
        """Whether it is the digest of these weights, in any form they may have been published in."""
        if digest == self.digest():
            return True
        if self._adapters is None:
            return bool(self._shadows) and digest == digest_of(self.checkpointed_weights())
        return digest in (
            digest_of(self._adapters.adapter_weights(self.module)),
            digest_of(self._as_in_files(self._adapters.MergedWeights(self.module))),
        )

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the weights, on their device if there is room. Training does not change it."""
        return dict(snapshot_of(self.weights()))

    def send_weights(self) -> None:
        """At a rank other than 0, while rank 0 makes a snapshot: take part in gathering each weight, and keep none of them."""
        for weight in self.weights().values():
            gathered(weight)

    def digest(self) -> str:
        return digest_of(self.weights())

    def save(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write config and weights (its own, or a snapshot) as a Hugging Face directory, without the tokenizer."""
        plain = to_ordinary_memory(dict(self.checkpoint_weights(self.snapshot()) if weights is None else weights))
        if self._adapters is not None:
            self._adapters.save_adapters(self._module, directory, plain)
        else:
            # With one rank, the weights already have the names of the files.
            self._module.save_pretrained(str(directory), state_dict=plain, save_original_format=not self._is_whole)


def _check_process_group(config: TrainerConfig) -> None:
    if config.ranks > 1 and not dist.is_initialized():
        raise RunError(
            f"trainer.ranks = {config.ranks}, but this command trains in one process. Set trainer.ranks = 1:"
            " the weights then agree with those of several ranks up to rounding, not to the bit."
        )


def _limit_memory(config: TrainerConfig) -> None:
    """Beyond the limit torch first returns cached memory, then raises `OutOfMemoryError`."""
    if config.gpu_memory_gb is not None and config.device == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, config.gpu_memory_gb * 1e9 / total))


def _adapters_module() -> Any:
    """Imported by name: PEFT is an extra that only runs with LoRA need."""
    return load_on_demand("rollbook.trainer.model.lora")


def _common_dtype(weights: Mapping[str, Tensor]) -> str | None:
    """In safetensors' name; None if they differ."""
    names = {NAMES[weight.dtype] for weight in weights.values()}
    return names.pop() if len(names) == 1 else None


def _base_dtype(config: TrainerConfig) -> torch.dtype:
    """Of weights that are not trained. Sharding casts by itself."""
    return torch.bfloat16 if config.compute_dtype == "bfloat16" and config.ranks == 1 else torch.float32


def _read_module(directory: Path, config: TrainerConfig, *, is_reference: bool) -> tuple[Any, WeightFiles | None]:
    """A skeleton with the files that fill it, if every rank can read its own shards; otherwise the whole model."""
    files = WeightFiles.of(directory) if config.ranks > 1 else None
    try:
        if files is not None and (module := skeleton(directory, files)) is not None:
            return module, files
        is_frozen = is_reference or config.lora is not None
        return _whole(directory, _base_dtype(config) if is_frozen else torch.float32), None
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise RunError(f"cannot load a model from {directory}: {type(error).__name__}: {error}") from error


def _whole(directory: Path, dtype: torch.dtype) -> Any:
    """All weights of a Hugging Face directory, or of a PEFT directory with its adapter merged into the base."""
    if (directory / ADAPTER_FILE).is_file():
        return _adapters_module().merged_module(directory)
    module = load_text_model(directory, dtype=dtype)
    if any(buffer.dtype is torch.bfloat16 for buffer in module.buffers()):
        # Such as rotary frequencies: they are computed in float32. The weights are rounded later.
        return load_text_model(directory, dtype=torch.float32)
    return module


def _aligned(module: Any, config: TrainerConfig) -> Any:
    """The module on its device; only one weight at a time is in memory twice. Equal weights give equal bits: kernels choose their
    order of summation by memory alignment, tensors read from a file may be unaligned, and a copy is aligned the same way in every
    process."""
    moved = module.to(device=config.device)
    for parameter in moved.parameters():
        dtype = torch.float32 if parameter.requires_grad else _base_dtype(config)
        parameter.data = parameter.data.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for buffer in moved.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()
    return moved


def _attention_kernel(architecture: Any, config: TrainerConfig) -> str:
    architecture = _first_layer(architecture)
    heads = architecture.num_attention_heads
    return fastest_kernel(
        device=config.device,
        dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32,
        heads=heads,
        kv_heads=getattr(architecture, "num_key_value_heads", None) or heads,
        width=getattr(architecture, "head_dim", None) or architecture.hidden_size // heads,
    )


def _first_layer(config: Any) -> Any:
    """Heads may differ between layers; the first stands for all. Older versions of transformers have one configuration for all."""
    text = config.get_text_config()
    return next(iter(getattr(text, "per_layer_config", None) or [text]))


def _shape(module: Any) -> ModelShape:
    config = _first_layer(module.config)
    head, embedding = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    # A model with recurrent states only has no heads.
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    body = [parameter for parameter in module.parameters() if parameter is not head and parameter is not embedding]
    return ModelShape(
        body_parameters=sum(parameter.numel() for parameter in body),
        frozen_parameters=sum(parameter.numel() for parameter in body if not parameter.requires_grad),
        head_parameters=head.numel(),
        is_head_frozen=not head.requires_grad,
        layers=config.num_hidden_layers,
        attention_width=heads * width,
        width=config.hidden_size,
    )


def _without_dropout(module: nn.Module) -> None:
    """Disable dropout: the ratio compares this distribution with the sampling distribution, which has none."""
    module.eval()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def _shadow_of(master: nn.Parameter) -> nn.Parameter:
    """A bfloat16 copy, whose gradients are accumulated in float32 at the master weight.

    Buffers are not cast: rotary frequencies need float32 precision.
    """
    shadow = nn.Parameter(master.detach().to(torch.bfloat16))
    shadow.register_post_accumulate_grad_hook(_accumulate_into(master))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return shadow


def _accumulate_into(master: nn.Parameter) -> Any:
    def accumulate(shadow: Tensor) -> None:
        if shadow.grad is None:
            return
        if master.grad is None:
            master.grad = shadow.grad.float()
        else:
            master.grad.add_(shadow.grad)
        shadow.grad = None

    return accumulate
