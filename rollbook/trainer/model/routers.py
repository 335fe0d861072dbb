"""Routers of mixtures of experts: their load, a loss that balances it, and whether they are trained.

transformers gives all of them one form: a module that returns the logits of all experts, the weights of the chosen experts, and
their indices. A hook keeps the result of each pass.
"""

# T tokens of a pass, E experts, K experts a token, L layers

from typing import Any

import torch
from torch import Tensor, nn

from rollbook.contracts.errors import RunError

PROBED_TOKENS = 5


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router") and getattr(module, "weight", None) is not None


def freeze_routers(module: nn.Module) -> None:
    for part in module.modules():
        if is_router(part):
            part.requires_grad_(False)


@torch.no_grad()
def check_balance(module: nn.Module, probed: Any) -> None:
    """Raises `RunError` if the load of the experts of a module cannot be balanced. `probed`: the module, or its first layers,
    which may have no experts."""
    reason = None
    if not any(map(is_router, module.modules())):
        reason = "it has no routers of experts"
    elif routers := Routers(probed):
        embedding = probed.get_input_embeddings().weight
        ids_1T = torch.arange(PROBED_TOKENS, device=embedding.device).unsqueeze(0) % embedding.shape[0]
        try:
            probed(input_ids=ids_1T, use_cache=False)
            if routers.largest_load() is None:
                reason = "its routers do not return their choices"
        finally:
            routers.close()
    if reason is not None:
        raise RunError(
            f"trainer.router_loss: the load of a model of type {probed.config.model_type!r} cannot be balanced, because {reason}."
            " Set trainer.router_loss = 0"
        )


class Routers:
    """Keeps what the routers of a module chose in its last pass."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [part for part in module.modules() if is_router(part)]
        self._logits: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._is_token_T: Tensor | None = None
        self._hooks = [router.register_forward_hook(self._hook(layer)) for layer, router in enumerate(self._found)]

    def __bool__(self) -> bool:
        return bool(self._found)

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
            chosen = [part for part in parts if not part.is_floating_point()]
            if parts and chosen:
                self._logits[layer], self._chosen[layer] = parts[0], chosen[-1].detach()

        return keep

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def clear(self, is_token_T: Tensor | None = None) -> None:
        """Before a pass: the recomputation in a backward pass must not add to it. `is_token_T`: False for padding."""
        self._logits, self._chosen = {}, {}
        self._is_token_T = is_token_T

    def balance_loss(self) -> Tensor | None:
        """The mean over layers of E x sum of (share of choices) x (mean probability), as in the Switch Transformer: 1 if the load
        is even. None without routers."""
        losses = []
        for layer, logits in self._logits.items():
            logits_TE = logits.flatten(0, -2)
            share_E = self._share(layer, logits_TE.shape[-1])
            losses.append(logits_TE.shape[-1] * (share_E * self._mean(logits_TE.float().softmax(dim=-1))).sum())
        return torch.stack(losses).mean() if losses else None

    def largest_load(self) -> Tensor | None:
        """The load of the busiest expert of any layer, in multiples of an even load. None without routers."""
        loads = [
            self._share(layer, logits.shape[-1]).max() * logits.shape[-1] for layer, logits in self._logits.items()
        ]
        return torch.stack(loads).max() if loads else None

    def _share(self, layer: int, experts: int) -> Tensor:
        """The share of all choices that each expert got."""
        chosen_TK = self._chosen[layer].flatten(0, -2).long()
        # Not `bincount`, for which Python would wait for the device.
        counts_TE = torch.zeros(len(chosen_TK), experts, device=chosen_TK.device)
        counts_TE.scatter_add_(1, chosen_TK, torch.ones(chosen_TK.shape, device=chosen_TK.device))
        return self._mean(counts_TE) / chosen_TK.shape[-1]

    def _mean(self, values_TE: Tensor) -> Tensor:
        """Over the tokens of the pass."""
        if self._is_token_T is None:
            return values_TE.mean(dim=0)
        return (values_TE * self._is_token_T[:, None]).sum(dim=0) / self._is_token_T.sum()
