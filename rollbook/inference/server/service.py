"""What the policy server does, without HTTP: which requests may begin, under which name, from which weights, who may end them."""

import itertools
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rollbook.contracts.errors import RollbookError, TransientError
from rollbook.contracts.policy import SamplingParams
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import Engine, QueueFullError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import Generation
from rollbook.inference.server.tokenizer import Texts

MODEL_NAME = "policy"
MAX_CHOICES = 1024
"""Completions of one request at most: prompts times n."""
RETRY_STALE_S = 0.1
"""Weights arrive within a training step; asking again sooner only costs."""


class UnknownModelError(RollbookError):
    """Asked for a model that this server does not serve."""


class StaleWeightsError(TransientError):
    """Newer weights were asked for than this server has."""


class DrainingError(TransientError):
    """This server ends soon and begins nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One completion to make."""

    prompt: Sequence[int]
    sampling: SamplingParams


class PolicyService:
    """One of it a process."""

    def __init__(
        self,
        engine: Engine,
        config: InferenceConfig,
        *,
        texts: Texts | None = None,
        model_names: Sequence[str] = (MODEL_NAME,),
    ) -> None:
        self.engine = engine
        self.config = config
        self.texts = texts
        self.model_names = tuple(model_names)
        self.started = int(time.time())
        self.is_draining = False
        self.failures = 0
        self._boot = uuid.uuid4().hex[:12]
        self._count = itertools.count(1)
        self._named: dict[str, list[Generation]] = {}

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.texts is None else self.texts.eos_token_ids

    def new_id(self, kind: str) -> str:
        return f"{kind}-{self._boot}-{next(self._count)}"

    def model(self, asked: str | None) -> str:
        """The name to answer under. Raises `UnknownModelError`."""
        if asked is None:
            return self.model_names[0]
        if asked not in (names := self.served_names):
            raise UnknownModelError(f"the model {asked!r} is not served here; there is {', '.join(names)}")
        return asked

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's own names mean whatever is live; an adapter's name means that very one, and is known while it is live."""
        adapter = self.engine.adapter
        return self.model_names if adapter is None else (*self.model_names, adapter.name)

    def require_texts(self, field: str) -> Texts:
        if self.texts is None:
            raise BadRequestError(
                f"{field}: this server has no tokenizer, so it takes and gives token ids only", param=field
            )
        return self.texts

    @contextmanager
    def generations(
        self,
        asks: Sequence[Ask],
        *,
        min_publication: int,
        stops: Sequence[str] = (),
        is_watched: bool = False,
        has_text: bool = True,
        request_id: str | None = None,
    ) -> Iterator[list[Generation]]:
        """Begin all of them or none; whoever leaves the block, by whatever way, leaves no slot behind."""
        self._require_room(len(asks), min_publication)
        begun: list[Generation] = []
        try:
            # One by one: should the third be refused, the first two are in the list and are abandoned below.
            begun.extend(
                Generation(
                    self.engine,
                    ask.prompt,
                    ask.sampling,
                    texts=self.texts if has_text else None,
                    stops=stops,
                    is_watched=is_watched or request_id is not None,
                )
                for ask in asks
            )
            if request_id is not None:
                self._named.setdefault(request_id, []).extend(begun)
            yield begun
        finally:
            for generation in begun:
                generation.abandon()
            if request_id is not None:
                self._forget(request_id, begun)

    def abort(self, request_ids: Sequence[str]) -> int:
        """End requests by the ids their senders gave them. Tells how many completions ended."""
        return sum(generation.abort() for name in request_ids for generation in self._named.get(name, ()))

    def _require_room(self, count: int, min_publication: int) -> None:
        if self.is_draining:
            raise DrainingError("this server is about to end; ask another, or again later", retry_after_s=1.0)
        publication = self.engine.publication
        if publication is None or publication.id < min_publication:
            have = "none" if publication is None else str(publication.id)
            raise StaleWeightsError(
                f"weights of publication {min_publication} or newer were asked for, this server has {have}",
                retry_after_s=RETRY_STALE_S,
            )
        if self.engine.stats().queued + count > self.config.max_queued:
            raise QueueFullError(
                f"{self.config.max_queued} requests may wait at most; try again later", retry_after_s=RETRY_STALE_S
            )

    def _forget(self, request_id: str, begun: Sequence[Generation]) -> None:
        left = [generation for generation in self._named.get(request_id, ()) if generation not in begun]
        if left:
            self._named[request_id] = left
        else:
            self._named.pop(request_id, None)


def require_count(n: int, num_prompts: int) -> None:
    if n < 1 or n * num_prompts > MAX_CHOICES:
        raise BadRequestError(
            f"n: {n} for {num_prompts} prompts; 1 to {MAX_CHOICES} completions a request are possible", param="n"
        )


def model_card(service: PolicyService, name: str) -> Mapping[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "rollbook",
        "parent": None if name in service.model_names else service.model_names[0],
        "max_model_len": service.engine.max_model_len,
        "vocab_size": service.engine.vocab_size,
    }
