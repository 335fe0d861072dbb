"""Router replay: the trainer uses the experts that the sampler chose, with gate weights from its own router.

A router takes the experts with the highest scores, by `torch.topk`. Engine and trainer round differently, so nearly equal scores
change places, another expert is taken, and the log-probability of the token jumps. Replay answers that one call with the recorded
choices and the trainer's own scores of them; the rest of the router is the model's code. So gradients flow through the gate
weights, and there is no list of families: a probe with a few tokens shows whether the choices reach the experts.
"""

# T tokens of a pass, E experts, K experts a token, L layers

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollbook.contracts.errors import RunError

CHOSEN = ("top_k_index", "router_indices")
"""Names of the argument of a module of experts with the indices of the chosen ones."""
TOP_K = (torch.topk, torch.Tensor.topk)
PROBED_TOKENS = 5


def is_experts(module: nn.Module) -> bool:
    return chosen_argument(module) is not None


def chosen_argument(module: nn.Module) -> tuple[int, str] | None:
    """Place and name of the argument with the indices of the chosen experts; None if the module has none."""
    names = inspect.signature(module.forward).parameters
    return next(((place, name) for place, name in enumerate(names) if name in CHOSEN), None)


class RouterReplay:
    """Hooks the layers with experts of a module. Layers count from 0 in the order of its modules, as in the engine."""

    def __init__(self, module: nn.Module, model_type: str) -> None:
        self._model_type = model_type
        named = dict(module.named_modules())
        self._experts = [(name, part) for name, part in named.items() if is_experts(part)]
        self.num_layers = len(self._experts)
        self.num_experts = max((int(getattr(part, "num_experts", 0)) for _, part in self._experts), default=0)
        self._routes_TLK: Tensor | None = None
        self._is_known_T1: Tensor | None = None
        self._differing: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] | None = None
        self._modes: list[_Mode] = []
        self._hooks: list[Any] = []
        for layer, (name, part) in enumerate(self._experts):
            block = _block(name, named)
            self._hooks += [
                block.register_forward_pre_hook(self._enter(layer)),
                block.register_forward_hook(self._leave(layer), always_call=True),
                part.register_forward_pre_hook(self._receive(layer, part), with_kwargs=True),
            ]

    def use(self, routes_TLK: Tensor | None) -> None:
        """The choices of the next passes, whose gradients may recompute them; None: the trainer's own. An id that is no expert
        marks a token whose choices are unknown."""
        self._routes_TLK = routes_TLK
        self._is_known_T1 = None if routes_TLK is None else routes_TLK[:, 0, :1].int() < self.num_experts
        self._differing = {}

    @property
    def routes(self) -> Tensor | None:
        return self._routes_TLK

    def counts(self, num_tokens: int) -> Tensor:
        """Of the last pass: choices that differ from the trainer's own, choices that were replayed (both of a token and a layer),
        tokens with recorded choices, all tokens (`num_tokens`)."""
        if self._routes_TLK is None or self._is_known_T1 is None:
            return torch.tensor([0.0, 0.0, 0.0, num_tokens], dtype=torch.float64)
        known = self._is_known_T1.sum()
        differing = torch.stack(list(self._differing.values())).sum()
        counted = torch.stack([differing, known * len(self._differing), known, torch.full_like(known, num_tokens)])
        return counted.double().cpu()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, layer: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._routes_TLK is not None:
                self._modes.append(_Mode(self, layer))
                self._modes[-1].__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

        return enter

    def _leave(self, layer: int) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            if self._routes_TLK is None or not self._modes:
                return
            self._modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if layer not in self._differing:
                raise RunError(self._refusal("a layer does not choose its experts by one torch.topk over all of them"))

        return leave

    def _receive(self, layer: int, experts: nn.Module) -> Callable[..., None]:
        argument = chosen_argument(experts)
        assert argument is not None
        place, name = argument

        def receive(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._received is not None:
                index = kwargs[name] if name in kwargs else args[place]
                self._received[layer] = index.detach().flatten(0, -2)

        return receive

    def chosen(self, layer: int, scores: Tensor, own: Any) -> Any:
        """The result of `topk` over these scores, with the recorded choices. `own`: the result without them."""
        assert self._routes_TLK is not None
        assert self._is_known_T1 is not None
        num_tokens, _, num_choices = self._routes_TLK.shape
        experts = scores.shape[-1]
        if (
            own.indices.shape[-1] != num_choices
            or experts != self.num_experts
            or scores.numel() != num_tokens * experts
        ):
            return own
        scores_TE, own_TK = scores.reshape(-1, experts), own.indices.reshape(-1, num_choices)
        recorded_TK = self._routes_TLK[:, layer].long()
        is_other_T1 = (own_TK.sort(dim=-1).values != recorded_TK).any(dim=-1, keepdim=True) & self._is_known_T1
        self._differing[layer] = is_other_T1.sum()
        wanted_TK = torch.where(is_other_T1, recorded_TK, own_TK)
        # In the order of their scores, as `topk` returns them.
        order_TK = scores_TE.detach().gather(-1, wanted_TK).argsort(dim=-1, descending=True, stable=True)
        index_TK = torch.where(is_other_T1, wanted_TK.gather(-1, order_TK), own_TK)
        values_TK = scores_TE.gather(-1, index_TK)
        shape = own.indices.shape
        return torch.return_types.topk((values_TK.view(shape), index_TK.view(shape)))

    @torch.no_grad()
    def check(self, language_model: Any) -> None:
        """Raises `RunError` if this model cannot replay choices. Does nothing if the module has no layer with experts: the first
        layers of a large model may have none."""
        if not self.num_layers:
            return
        if not self.num_experts:
            raise RunError(self._refusal("its modules of experts do not say how many there are"))
        embedding = language_model.get_input_embeddings().weight
        ids_1T = (torch.arange(PROBED_TOKENS, device=embedding.device) * 7919 % embedding.shape[0]).unsqueeze(0)
        own = self._probe(language_model, ids_1T)
        if sorted(own) != list(range(self.num_layers)) or len({index.shape for index in own.values()}) != 1:
            raise RunError(self._refusal("its layers do not all choose the same number of experts"))
        other_TLK = torch.stack([(own[n] + 1) % self.num_experts for n in sorted(own)], dim=1).sort(dim=-1).values
        self.use(other_TLK)
        received = self._probe(language_model, ids_1T)
        self.use(None)
        found_TLK = torch.stack([received[n] for n in sorted(received)], dim=1).sort(dim=-1).values
        if not torch.equal(found_TLK, other_TLK):
            raise RunError(self._refusal("the choices of its routers do not reach the experts unchanged"))

    def _probe(self, language_model: Any, ids_1T: Tensor) -> dict[int, Tensor]:
        """The choices that the experts of each layer received."""
        received: dict[int, Tensor] = {}
        self._received = received
        try:
            language_model(input_ids=ids_1T, use_cache=False)
        finally:
            self._received = None
        return received

    def _refusal(self, reason: str) -> str:
        return (
            f"trainer.router_replay: a model of type {self._model_type!r} cannot be replayed: {reason}. Set "
            "trainer.router_replay = false; docs/models.md lists the models that can"
        )


class _Mode(TorchFunctionMode):
    """While a layer computes: its `topk` over all experts returns the recorded choices."""

    def __init__(self, replay: RouterReplay, layer: int) -> None:
        super().__init__()
        self._replay, self._layer = replay, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            return result
        scores = args[0] if args else kwargs["input"]
        return self._replay.chosen(self._layer, scores, result)


def _block(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    """The module that calls router and experts: the nearest one around the experts that is not a wrapper of PEFT."""
    while True:
        name = name.rpartition(".")[0]
        if not type(modules[name]).__module__.startswith("peft."):
            return modules[name]
