"""The trained model: load, log-probabilities of tokens, weights, save.

Weights are always float32: updates of a small learning rate would be rounded away in bfloat16. With `compute_dtype = "bfloat16"`
there are two copies: the float32 weights that the optimizer updates, and a bfloat16 shadow used for the passes. Casting once per
step is cheaper than casting in every layer, and the shadow computes like a bfloat16 engine. With one rank, weights
that are not trained (the base of adapters, a reference) exist once, in the compute dtype: nothing updates them.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from rollbook.contracts.errors import RunError
from rollbook.contracts.weights import AdapterKind
from rollbook.numerics import operations
from rollbook.numerics.device_memory import limit_memory
from rollbook.numerics.recipe import SINKS, Logits
from rollbook.shared_weights.base import SharedBase, map_base
from rollbook.shared_weights.files import WeightFiles
from rollbook.shared_weights.modules import named_weights
from rollbook.shared_weights.packing import NAMES
from rollbook.trainer.config import TrainerConfig
from rollbook.trainer.data.passes import Microbatch
from rollbook.trainer.data.prefixes import PackedSequences
from rollbook.trainer.distributed.sharding import gathered, shard
from rollbook.trainer.model.flops import ModelShape, first_layer_config
from rollbook.trainer.model.frozen_base import module_of
from rollbook.trainer.model.gather import Gather, on_device
from rollbook.trainer.model.loading import (
    adapters_module,
    fill,
    first_layers,
    placed,
    read_module,
    with_adapters,
)
from rollbook.trainer.model.network import (
    PolicyNetwork,
    attention_windows,
    fuse_norms,
    logits_of,
    make_exact,
    make_packable,
    use_packed,
    why_not_exact,
)
from rollbook.trainer.model.packed_attention import Packing, aligns_with_the_end, fastest_kernel
from rollbook.trainer.model.packed_delta import convolution_width, delta_parts
from rollbook.trainer.model.router_replay import RouterReplay, is_experts
from rollbook.trainer.model.routers import Routers, check_balance, freeze_routers
from rollbook.trainer.model.weights import (
    as_in_files,
    digest_of,
    published_copy,
    snapshot_of,
    to_ordinary_memory,
)

PROBED_HEADS = 128
"""Tokens with which a kernel of attention is compared."""
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
        base: SharedBase | None = None,
        is_borrowed: bool = False,
    ) -> None:
        """`files`: set if the module is a skeleton, which they fill. `is_reference`: it is never trained.

        `base`: holds the frozen weights of the module, in memory of another process. `is_borrowed`: see `over`.
        """
        config = config or TrainerConfig()
        if is_reference:
            module.requires_grad_(False)
        _check_process_group(config)
        limit_memory(config.device, config.gpu_memory_gb)
        self._adapters = adapters_module() if config.lora is not None else None
        self.publishes_adapters = False
        """Whether publications and digests cover the adapters only. Set by `publish_adapters`."""
        self.device = config.device
        self._base = base
        self._is_whole = config.ranks == 1
        self.module: nn.Module = module if is_borrowed else placed(module, config, files=files, base=base)
        files = None if self._is_whole else files
        _without_dropout(self.module)
        if config.freeze_routers:
            freeze_routers(self.module)
        self._module: Any = self.module
        self.config: Any = module.config
        is_replayed = config.router_replay and not is_reference
        is_balanced = config.router_loss > 0 and not is_reference
        logits, self.is_packed = self._choose_passes(config, files, is_replayed=is_replayed, is_balanced=is_balanced)
        computing, self._shadows = self._computing_module(config)
        self._computing: Any = computing
        # Before the routers' hooks: these see the choices that were replayed.
        self.replay = RouterReplay(computing, self.config.model_type) if is_replayed else None
        self.routers = Routers(computing)
        self._checkpointing = (False, 0)
        """Whether it is used, and how many layers keep their activations."""
        self.inexact_because = self._inexact_because(config, logits)
        """Why logprobs do not have the bits of the sampler; None if they do."""
        if self.inexact_because is None:
            make_exact(computing)
        elif config.device == "cuda":
            fuse_norms(computing)
        self.use_checkpointing(config.gradient_checkpointing)
        self.vocabulary_size = int(self._module.get_input_embeddings().weight.shape[0])
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.shape = ModelShape.of(self._module)
        is_exact = self.inexact_because is None
        self.network = PolicyNetwork(computing, max_logits_bytes=config.logits_bytes, logits=logits, is_exact=is_exact)
        self._convolution = convolution_width(self.module)
        self.attention_kernel = "none"
        """The attention kernel for packed sequences. All kernels give the same numbers, but for rounding."""
        if self.is_packed:
            self.attention_kernel = "exact" if is_exact else _attention_kernel(self._module, config)
        if config.ranks > 1:
            shard(self.network, device=config.device, is_mixed=config.compute_dtype == "bfloat16")
        if files is not None:
            fill(self._module, files, device=config.device)

    def _choose_passes(
        self, config: TrainerConfig, files: WeightFiles | None, *, is_replayed: bool, is_balanced: bool
    ) -> tuple[Logits | None, bool]:
        """How logits are computed, see `logits_of`, and whether sequences are packed. The probe needs float32: of a skeleton, or a
        base in bfloat16, the first layers are probed."""
        is_whole = files is None and all(p.dtype is torch.float32 for p in self._module.parameters())
        probed = self._module if is_whole else first_layers(self._module, files, device=config.device)
        if is_replayed:
            self._check_replay(probed)
        if is_balanced:
            check_balance(self._module, probed)
        logits = logits_of(probed)
        is_packed = config.packing != "padded" and make_packable(probed)
        if is_packed and not is_whole:
            use_packed(self._module)
        if config.packing == "packed" and not is_packed:
            raise RunError(
                f"trainer.packing = 'packed': a model of type {self.config.model_type!r} computes other numbers with packed"
                " sequences. Set trainer.packing = 'auto' or 'padded'."
            )
        return logits, is_packed

    def _check_replay(self, probed: Any) -> None:
        if not any(map(is_experts, self._module.modules())):
            raise RunError(
                f"trainer.router_replay: a model of type {self.config.model_type!r} has no experts that transformers calls in its"
                " common form. Set trainer.router_replay = false; docs/models.md lists the models that can be replayed"
            )
        replay = RouterReplay(probed, self.config.model_type)
        try:
            replay.check(probed)
        finally:
            replay.close()

    def _inexact_because(self, config: TrainerConfig, logits: Logits | None) -> str | None:
        if config.exactness != "bitwise":
            return "trainer.exactness is fast"
        if config.device != "cuda" or config.compute_dtype != "bfloat16":
            return "only passes in bfloat16 on a GPU are"
        if not self.is_packed:
            return "its sequences are not packed"
        reason = why_not_exact(self._module, logits=logits)
        if reason is None and (window := _window_of(self._module)) is not None:
            query, key, value = (
                torch.randn(PROBED_HEADS, count, width, device=config.device, dtype=torch.bfloat16)
                for count, width in _head_shapes(self.config)
            )
            if not aligns_with_the_end("exact", query, key, value, window=window):
                reason = "its windows have another size in the variable-length kernel of PyTorch"
        return reason

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
        shared_base: Path | None = None,
    ) -> "PolicyModel":
        """Load a Hugging Face directory, or a PEFT directory with its adapter merged into the base.

        With LoRA the directory is the base; `adapters` is the directory of a checkpoint's adapters, None for new ones.
        `shared_base`: the file with which the base is mapped, see `shared_weights`.
        """
        # Progress bars would disturb the run's live view.
        transformers_logging.disable_progress_bar()
        config = config or TrainerConfig()
        base = None if shared_base is None else map_base(shared_base, device=config.device)
        if base is None:
            module, files = read_module(directory, config, is_reference=is_reference)
        else:
            module, files = module_of(directory, base), None
        if config.lora is not None:
            add = partial(
                adapters_module().with_adapters,
                settings=config.lora,
                base_dir=directory,
                seed=config.seed,
                saved=adapters,
            )
            module = add(module) if files is None else with_adapters(module, add)
        return cls(module, config, files=files, is_reference=is_reference, base=base)

    @classmethod
    def over(cls, module: Any, config: TrainerConfig) -> "PolicyModel":
        """Computes with the weights of a module that something else uses. They stay where they are, in their types."""
        own = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
        return cls(own, config, is_reference=True, is_borrowed=True)

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

    def use_checkpointing(self, checkpointing: bool | int) -> None:
        """Recompute the activations inside all layers in the backward pass, inside the first ones, or keep them.

        The first ones: when they are recomputed, the activations of the others are freed already.
        """
        layers = [part for part in self._computing.modules() if isinstance(part, GradientCheckpointingLayer)]
        keeping = [] if checkpointing is True else layers[int(checkpointing) :]
        is_used = bool(checkpointing)
        if self._checkpointing == (is_used, len(keeping) * is_used):
            return
        # Layers recompute in training mode only; without dropout, that mode gives the same numbers.
        if is_used:
            options = {"use_reentrant": False, "context_fn": self._recomputing}
            self._computing.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        else:
            self._computing.gradient_checkpointing_disable()
        for layer in keeping:
            layer.gradient_checkpointing = False
        for layer in layers:
            for part in delta_parts(layer):
                part.is_recomputed = is_used and layer.gradient_checkpointing
        self._computing.train(is_used)
        self._checkpointing = (is_used, len(keeping) * is_used)

    def _recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a layer's forward, and of its recomputation, which the backward pass runs."""
        return nullcontext(), operations.unsplit_products() if self.inexact_because is None else nullcontext()

    def discard_gradients(self) -> None:
        """Free all gradients, also those that a failed backward pass left at the bfloat16 shadow."""
        for parameter in (*self.module.parameters(), *self._computing.parameters()):
            parameter.grad = None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def computing_weights(self) -> list[Tensor]:
        """The trained weights as the passes read them: the bfloat16 shadow, if there is one."""
        return [shadow for _, shadow in self._shadows] or [p for p in self.parameters() if p.requires_grad]

    def tensor(self, array: Any) -> Tensor:
        return on_device(array, self.device)

    def token_logprobs(
        self, micro: Microbatch, *, is_entropy_trained: bool = False, is_replayed: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target of the pass at its temperature, and the entropy of its distribution.

        The entropy has a gradient only with `is_entropy_trained`. `is_replayed`: with the experts that the sampler chose, if they
        are recorded. They stay in use until the next such call, because a backward pass may compute the layers again.
        """
        padding = micro.is_padding_BT
        self.routers.clear(None if padding is None else ~self.tensor(padding).flatten())
        if self.replay is not None:
            before = self.replay.routes
            routes = micro.routes_TLK if is_replayed else None
            self.replay.use(None if routes is None else self.tensor(routes))
            try:
                return self._token_logprobs(micro, is_entropy_trained=is_entropy_trained)
            finally:
                if not is_replayed:
                    self.replay.use(before)
        return self._token_logprobs(micro, is_entropy_trained=is_entropy_trained)

    def _token_logprobs(self, micro: Microbatch, *, is_entropy_trained: bool) -> tuple[Tensor, Tensor]:
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
        if sequences is None:
            return None
        heads = None
        if self.attention_kernel == "exact":
            (queries, size), (keys, _), _ = _head_shapes(self.config)
            heads = queries, keys, size
        return Packing.of(
            sequences, self.device, kernel=self.attention_kernel, heads=heads, convolution=self._convolution
        )

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
        """Under the names and shapes of the checkpoint's files, which engines read. Shards keep those of the module, see
        `_published`."""
        return as_in_files(self._module, weights) if self._is_whole else weights

    def _published(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole weights under the names and shapes of the checkpoint's files. With several ranks a collective, in main memory: the
        shard of a rank may hold a part of an expert."""
        if self._is_whole:
            return as_in_files(self._module, weights)
        return as_in_files(self._module, {name: gathered(weight.detach()).cpu() for name, weight in weights.items()})

    def checkpointed_weights(self) -> dict[str, Tensor]:
        """The live weights that a checkpoint holds: the adapters only with LoRA. Under the names of the module, with any number of
        ranks: shards are read and written in place."""
        if self._adapters is None:
            return named_weights(self.module)
        adapters: dict[str, Tensor] = self._adapters.adapter_weights(self.module)
        return adapters

    def checkpoint_weights(self, published: Mapping[str, Tensor], *, on_gpu: bool) -> Mapping[str, Tensor]:
        """The weights for a checkpoint: the copy made for publication, unless that was cast to bfloat16 or merged with adapters.
        `on_gpu`: see `snapshot_of`."""
        if self.publishes_adapters or (self._adapters is None and not self._shadows):
            return published if on_gpu else to_ordinary_memory(published)
        return snapshot_of(self._saved_weights(), on_gpu=on_gpu)

    def _saved_weights(self) -> Mapping[str, Tensor]:
        """The live weights of a checkpoint of one rank, under the names of the files."""
        weights = self.checkpointed_weights()
        return weights if self._adapters is not None else self._as_in_files(weights)

    def publish_adapters(self) -> AdapterKind:
        """From now on, publications and digests cover the adapters only. Returns their settings and base."""
        if self._adapters is None:
            raise RunError("adapters cannot be published: trainer.lora is not set")
        self.publishes_adapters = True
        if self._base is not None:
            weights, digest = self._base.tensors, self._base.digest
        else:
            weights = self._published(self._adapters.base_weights(self.module))
            digest = digest_of(weights)
        return AdapterKind(
            settings=self._adapters.settings_of(self.module), base_digest=digest, base_dtype=_common_dtype(weights)
        )

    def has_digest(self, digest: str) -> bool:
        """Whether it is the digest of these weights, in any form they may have been published in."""
        if digest == self.digest():
            return True
        if self._adapters is None:
            return bool(self._shadows) and digest == digest_of(self._saved_weights())
        return digest in (
            digest_of(self._adapters.adapter_weights(self.module)),
            digest_of(self._published(self._adapters.MergedWeights(self.module))),
        )

    def snapshot(self, *, on_gpu: bool = False) -> Mapping[str, Tensor]:
        """A copy of the weights as engines read them. Training does not change it. `on_gpu`: on the GPU of a whole model."""
        is_on_gpu = on_gpu and self._is_whole and self.device == "cuda"
        copied = published_copy(self.weights(), device="cuda" if is_on_gpu else "cpu")
        return copied if self._is_whole or self.publishes_adapters else as_in_files(self._module, copied)

    def send_weights(self) -> None:
        """At a rank other than 0, while rank 0 makes a snapshot: take part in gathering each weight, and keep none of them."""
        for weight in self.weights().values():
            gathered(weight)

    def digest(self) -> str:
        is_named = self._is_whole or self.publishes_adapters
        return digest_of(self.weights() if is_named else self._published(self.weights()))

    def save(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write config and weights (its own, or a snapshot) as a Hugging Face directory, without the tokenizer."""
        found = self.checkpoint_weights(self.snapshot(), on_gpu=False) if weights is None else weights
        plain = to_ordinary_memory(dict(found))
        if self._adapters is not None:
            self._adapters.save_adapters(self._module, directory, plain)
        else:
            # The weights already have the names of the files.
            self._module.save_pretrained(str(directory), state_dict=plain, save_original_format=False)


def _check_process_group(config: TrainerConfig) -> None:
    if config.ranks > 1 and not dist.is_initialized():
        raise RunError(
            f"trainer.ranks = {config.ranks}, but this command trains in one process. Set trainer.ranks = 1:"
            " the weights then agree with those of several ranks up to rounding, not to the bit."
        )


def _common_dtype(weights: Mapping[str, Tensor]) -> str | None:
    """In safetensors' name; None if they differ."""
    names = {NAMES[weight.dtype] for weight in weights.values()}
    return names.pop() if len(names) == 1 else None


def _attention_kernel(module: Any, config: TrainerConfig) -> str:
    (heads, width), (kv_heads, _), _ = _head_shapes(module.config)
    return fastest_kernel(
        device=config.device,
        dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        window=_window_of(module),
        has_sinks=any(hasattr(part, SINKS) for part in module.modules()),
    )


def _head_shapes(config: Any) -> list[tuple[int, int]]:
    """Number and width of the heads of queries, keys and values."""
    first = first_layer_config(config)
    heads = first.num_attention_heads
    width = getattr(first, "head_dim", None) or first.hidden_size // heads
    return [(count, width) for count in (heads, *[getattr(first, "num_key_value_heads", None) or heads] * 2)]


def _window_of(module: Any) -> int | None:
    """The shortest window of any layer; None if all have full attention."""
    return min((window for window in attention_windows(module) or () if window is not None), default=None)


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
