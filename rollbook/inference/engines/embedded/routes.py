"""Records which experts a mixture chooses for each token, so that the trainer can use the same ones (router replay).

transformers gives all mixtures one form: a module that receives the hidden states, the indices of the chosen experts and their
weights. A hook in front of it sees the indices. They are kept with the keys and values of their position, so whatever copies a row
or reuses a prefix copies them too, and a position that is computed again has the choices of its last forward.
"""

# N rows, C tokens a row, L layers, K choices

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import routes_dtype, unknown_choice
from rollbook.numerics.experts import Experts
from rollbook.numerics.module_parts import UnsupportedModelError

CHOSEN = ("top_k_index", "router_indices")
"""Names of the argument with the indices of the chosen experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteShape:
    """The routes of one token. On the device, two bytes are int16: torch has few operations for uint16."""

    layers: int
    choices: int
    stored: np.dtype[Any]

    def __str__(self) -> str:
        return f"routes: {self.layers} layers x {self.choices} choices, {self.num_bytes} bytes for each token"

    @property
    def num_bytes(self) -> int:
        return self.layers * self.choices * self.stored.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.stored.itemsize == 1 else torch.int16

    @classmethod
    def of_experts(cls, experts: Sequence[Experts]) -> "RouteShape | None":
        """None without experts. Raises `UnsupportedModelError` if layers choose different numbers of experts."""
        if not experts:
            return None
        choices = {own.choices for own in experts}
        if len(choices) != 1:
            raise UnsupportedModelError(f"its layers choose {sorted(choices)} experts, and routes need the same number")
        # One more than there are experts is a choice, too: that of no expert.
        stored = routes_dtype(max(own.count for own in experts) + 1)
        return cls(layers=len(experts), choices=choices.pop(), stored=stored)

    def stacked(self, chosen: Sequence[Tensor]) -> Tensor:
        """The choices of each layer (M, K) as (M, L, K), in ascending order."""
        return torch.stack(list(chosen), dim=1).sort(dim=-1).values.to(self.dtype)

    def read(self, routes: Tensor) -> NDArray[Any]:
        """Routes of some tokens in main memory, (tokens, L, K)."""
        copied: NDArray[Any] = routes.to("cpu", copy=True).numpy().view(self.stored)
        return copied.reshape(-1, self.layers, self.choices)


class RouteRecorder:
    """Hooks the experts of a module. Used by one thread."""

    def __init__(self, module: Any) -> None:
        """Raises `RunError` if the choices of this model cannot be seen."""
        self._experts = [part for part in module.modules() if _chosen_argument(part) is not None]
        self._chosen: dict[int, Tensor] | None = None
        for layer, part in enumerate(self._experts):
            part.register_forward_pre_hook(self._hook(layer, part), with_kwargs=True)
        self.shape = self._probed_shape(module)

    def _hook(self, layer: int, experts: nn.Module) -> Any:
        argument = _chosen_argument(experts)
        assert argument is not None
        place, name = argument

        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._chosen is not None:
                index = kwargs[name] if name in kwargs else args[place]
                self._chosen[layer] = index.flatten(0, -2)

        return keep

    def _probed_shape(self, module: Any) -> RouteShape:
        kind = module.config.model_type
        if not self._experts:
            raise RunError(no_experts(kind))
        device = next(module.parameters()).device
        with torch.inference_mode(), self.recording() as chosen:
            module(input_ids=torch.ones((1, 1), dtype=torch.long, device=device), use_cache=False)
        widths = {index.shape[-1] for index in chosen.values()}
        if len(widths) != 1:
            raise RunError(
                f"inference.record_routes: layers of a model of type {kind!r} choose {sorted(widths) or 'no'} experts; the same "
                "number is needed in all layers. Remove trainer.router_replay"
            )
        # One more than there are experts is a choice, too: that of no expert.
        experts = max(int(getattr(part, "num_experts", 1 << 15)) for part in self._experts) + 1
        return RouteShape(
            layers=len(self._experts),
            choices=widths.pop(),
            stored=routes_dtype(experts),
        )

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """While the context lasts, the choices of each layer are collected: (tokens, K)."""
        chosen: dict[int, Tensor] = {}
        self._chosen = chosen
        try:
            yield chosen
        finally:
            self._chosen = None

    def stacked(self, chosen: dict[int, Tensor], rows: int) -> Tensor:
        """The choices of a forward over `rows` rows as (N, C, L, K), in ascending order."""
        shape = self.shape
        first = next(iter(chosen.values()))
        skipped = torch.full_like(first, unknown_choice(shape.stored))
        layers = [chosen.get(layer, skipped) for layer in range(shape.layers)]
        return shape.stacked(layers).view(rows, -1, shape.layers, shape.choices)


def no_experts(model_type: str) -> str:
    return (
        f"inference.record_routes: a model of type {model_type!r} has no experts whose choices can be recorded. Remove "
        "trainer.router_replay"
    )


def has_experts(module: nn.Module) -> bool:
    return any(_chosen_argument(part) is not None for part in module.modules())


def _chosen_argument(module: nn.Module) -> tuple[int, str] | None:
    """Its place and name; None if the module has none."""
    names = inspect.signature(module.forward).parameters
    return next(((place, name) for place, name in enumerate(names) if name in CHOSEN), None)
