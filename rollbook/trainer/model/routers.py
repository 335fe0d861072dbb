"""Routers of mixtures of experts: their load, a loss that balances it, and whether they are trained.

transformers gives all of them one form: a module that returns the logits of all experts, the weights of the chosen experts, and
their indices. A hook keeps the result of each pass.
"""

# T tokens of a pass, E experts, K experts a token, L layers

from typing import Any

import torch
from torch import Tensor, nn


def is_router(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router") and getattr(module, "weight", None) is not None


def freeze_routers(module: nn.Module) -> None:
    for part in module.modules():
        if is_router(part):
            part.requires_grad_(False)


class Routers:
    """Keeps what the routers of a module chose in its last pass."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [part for part in module.modules() if is_router(part)]
        self._logits: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        for layer, router in enumerate(self._found):
            router.register_forward_hook(self._hook(layer))

    def __bool__(self) -> bool:
        return bool(self._found)

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple) else []
            chosen = [part for part in parts if not part.is_floating_point()]
            if parts and chosen:
                self._logits[layer], self._chosen[layer] = parts[0], chosen[-1].detach()

        return keep

    def clear(self) -> None:
        """Before a pass: the recomputation in a backward pass must not add to it."""
        self._logits, self._chosen = {}, {}

    def balance_loss(self) -> Tensor | None:
        """The mean over layers of E x sum of (share of choices) x (mean probability), as in the Switch Transformer: 1 if the load
        is even. None without routers."""
        losses = []
        for layer, logits in self._logits.items():
            logits_TE = logits.flatten(0, -2)
            share_E = self._share(layer, logits_TE.shape[-1])
            losses.append(logits_TE.shape[-1] * (share_E * logits_TE.float().softmax(dim=-1).mean(dim=0)).sum())
        return torch.stack(losses).mean() if losses else None

    def largest_load(self) -> Tensor | None:
        """The load of the busiest expert of any layer, in multiples of an even load. None without routers."""
        loads = [
            self._share(layer, logits.shape[-1]).max() * logits.shape[-1] for layer, logits in self._logits.items()
        ]
        return torch.stack(loads).max() if loads else None

    def _share(self, layer: int, experts: int) -> Tensor:
        """The share of all choices that each expert got."""
        chosen = self._chosen[layer].flatten().long()
        # Not `bincount`, for which Python would wait for the device.
        counts_E = torch.zeros(experts, device=chosen.device).scatter_add_(0, chosen, torch.ones_like(chosen).float())
        return counts_E / len(chosen)
