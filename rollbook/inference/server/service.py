"""The policy server without HTTP: admits requests, starts generations, aborts them by request id."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from rollbook.contracts.errors import RollbookError, TransientError
from rollbook.contracts.plugin import MissingExtraError, load_on_demand
from rollbook.contracts.policy import Completion, OnTokens, SamplingParams, TokenIds
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import BASE_MODEL, Engine, EngineQueueFullError, TokenConstraint
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.generation import Generation
from rollbook.inference.server.text import TextTokenizer, template_messages

T = TypeVar("T")

MODEL_NAME = "policy"
MAX_TOKEN_CHARS = 16
"""A text with more characters for each token of the model's length is refused before it is encoded. Real texts have 3 to 6."""
MIN_TEXT_CHARS = 1 << 16
"""A shorter text is encoded whatever the model's length: small vocabularies have tokens for words of any length."""
INLINE_CHARS = 4096
INLINE_MESSAGES = 16
"""Shorter texts and chats are rendered and encoded in the event loop: a thread would take longer."""
SURPLUS_TOKENS = 4096
"""Tokens beyond the model's length that are counted for the error message."""
ENCODERS = 2
RETRY_AFTER_S = 0.1
"""New weights arrive within a training step; earlier retries only add load."""


class CompiledGrammar(TokenConstraint, Protocol):
    def copy(self) -> TokenConstraint:
        """A constraint for one completion, at its start."""


class GrammarCompiler(Protocol):
    def compile(self, grammar: str, *, field: str) -> CompiledGrammar: ...


class UnknownModelError(RollbookError):
    """The requested model is not served here."""


class StaleWeightsError(TransientError):
    """The weights are older than the request requires."""


class DrainingError(TransientError):
    """This server is shutting down and starts no new requests."""


class PolicyService:
    """One instance per server process."""

    def __init__(
        self,
        engine: Engine,
        config: InferenceConfig,
        *,
        tokenizer: TextTokenizer | None = None,
        model_names: Sequence[str] = (MODEL_NAME,),
    ) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer = tokenizer
        self.model_names = tuple(model_names)
        self.started = int(time.time())
        self.is_draining = False
        self._boot_id = uuid.uuid4().hex[:12]
        self._count = itertools.count(1)
        self._by_request_id: dict[str, list[Generation]] = {}
        self._compiler: GrammarCompiler | None = None
        self._compiling = asyncio.Lock()
        # Few threads, and not those of `asyncio.to_thread`: long texts must not delay weight updates.
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="policy.encode")

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.tokenizer is None else self.tokenizer.eos_token_ids

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's own names mean the policy: the published weights, or the base with the published adapter. That one is also
        served by its name, and the weights without it as `base`. Other adapters have names of their own."""
        adapter = self.engine.adapter
        published = () if adapter is None else (adapter.name, BASE_MODEL)
        return (*self.model_names, *published, *self.engine.named_adapters)

    def new_id(self, kind: str) -> str:
        return f"{kind}-{self._boot_id}-{next(self._count)}"

    def resolve_model(self, name: str | None) -> str:
        """The name for the response. Raises `UnknownModelError`."""
        if name is None:
            return self.model_names[0]
        if name not in (names := self.served_names):
            raise UnknownModelError(f"the model {name!r} is not served here; available: {', '.join(names)}")
        return name

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a resolved name means, for the engine. None: the policy."""
        return name if name == BASE_MODEL or name in self.engine.named_adapters else None

    def require_tokenizer(self, field: str) -> TextTokenizer:
        if self.tokenizer is None:
            raise BadRequestError(f"{field}: this server has no tokenizer; send and request token ids", param=field)
        return self.tokenizer

    async def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The tokens of prompts. Raises `BadRequestError` for a text that cannot fit into the model's length."""
        tokenizer = self.require_tokenizer("prompt")

        def encode_all() -> list[list[int]]:
            return [
                self._encode(tokenizer, text, field="prompt", add_special_tokens=add_special_tokens) for text in texts
            ]

        return encode_all() if sum(map(len, texts)) <= INLINE_CHARS else await self._in_encoder(encode_all)

    async def decode_tokens(self, tokens: Sequence[int]) -> str:
        tokenizer = self.require_tokenizer("tokens")
        return await self._in_encoder(partial(tokenizer.decode, tokens, skip_special_tokens=False))

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template: Mapping[str, Any] | None,
    ) -> list[int]:
        """The tokens of a rendered chat. Raises `BadRequestError`."""
        tokenizer = self.require_tokenizer("messages")

        def render_and_encode() -> list[int]:
            text = tokenizer.render(
                template_messages(messages),
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                template=template,
            )
            return self._encode(tokenizer, text, field="messages", add_special_tokens=add_special_tokens)

        contents = (message.get("content") for message in messages)
        is_short = (
            len(messages) <= INLINE_MESSAGES
            and not tools
            and sum(len(text) if isinstance(text, str) else INLINE_CHARS for text in contents if text) < INLINE_CHARS
        )
        return render_and_encode() if is_short else await self._in_encoder(render_and_encode)

    def _encode(self, tokenizer: TextTokenizer, text: str, *, field: str, add_special_tokens: bool) -> list[int]:
        longest = max(MIN_TEXT_CHARS, MAX_TOKEN_CHARS * self.engine.max_model_len)
        if len(text) > longest:
            raise BadRequestError(
                f"{field}: the text has {len(text)} characters; at most {longest} can fit into the model's length of "
                f"{self.engine.max_model_len} tokens (max_model_len)",
                param=field,
            )
        encode = tokenizer.encode_prompt if add_special_tokens else tokenizer.encode
        most = self.engine.max_model_len + SURPLUS_TOKENS
        tokens = encode(text, max_tokens=most + 1)
        if len(tokens) > most:
            raise BadRequestError(
                f"{field}: the text has more than {most} tokens; the model's length is {self.engine.max_model_len} "
                "(max_model_len)",
                param=field,
            )
        return tokens

    async def _in_encoder(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

    async def compile_grammar(self, grammar: tuple[str, str] | None) -> CompiledGrammar | None:
        """`grammar`: its text, and the field that requires it. Raises `BadRequestError`."""
        if grammar is None:
            return None
        text, field = grammar
        tokenizer = self.require_tokenizer(field)
        async with self._compiling:
            if self._compiler is None:
                try:
                    make = load_on_demand("rollbook.inference.server.grammars:LlguidanceCompiler")
                except MissingExtraError as error:
                    raise BadRequestError(
                        f"{field}: this server cannot follow grammars: {error}", param=field
                    ) from error
                made: GrammarCompiler = await asyncio.to_thread(make, tokenizer, vocab_size=self.engine.vocab_size)
                self._compiler = made
            compiler = self._compiler
        return await asyncio.to_thread(compiler.compile, text, field=field)

    def submit(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        *,
        min_publication: int,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Completion]:
        """Start one completion of token ids. Cancel the future to free its slot."""
        self._require_publication(min_publication)
        return self.engine.submit(prompt, sampling, on_tokens=on_tokens)

    @contextmanager
    def generations(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        min_publication: int,
        stops: Sequence[str] = (),
        is_streamed: bool = False,
        has_text: bool = True,
        skip_special_tokens: bool | None = None,
        request_id: str | None = None,
        grammar: CompiledGrammar | None = None,
        model: str | None = None,
    ) -> Iterator[list[Generation]]:
        """Start a generation for each prompt, or none of them. Leaving the block frees their slots. `model`: a served name."""
        self._require_publication(min_publication)
        self._require_queue_space(len(requests))
        started: list[Generation] = []
        try:
            # Append one by one: if the engine rejects a request, the generations started before it are abandoned below.
            for prompt, sampling in requests:
                started.append(
                    Generation(
                        self.engine,
                        prompt,
                        sampling,
                        tokenizer=self.tokenizer if has_text else None,
                        skip_special_tokens=skip_special_tokens is not False,
                        stops=stops,
                        is_streamed=is_streamed or request_id is not None,
                        constraint=None if grammar is None else grammar.copy(),
                        adapter=self.adapter_of(model),
                    )
                )
            if request_id is not None:
                self._by_request_id.setdefault(request_id, []).extend(started)
            yield started
        finally:
            for generation in started:
                generation.abandon()
            if request_id is not None:
                left = [other for other in self._by_request_id.pop(request_id, ()) if other not in started]
                if left:
                    self._by_request_id[request_id] = left

    def abort(self, request_ids: Sequence[str]) -> int:
        """Abort requests by the ids that their senders chose. Returns the number of aborted completions."""
        return sum(generation.abort() for name in request_ids for generation in self._by_request_id.get(name, ()))

    def _require_publication(self, min_publication: int) -> None:
        if self.is_draining:
            raise DrainingError("this server is shutting down; use another replica or retry later", retry_after_s=1.0)
        publication = self.engine.publication
        if publication is None or publication.id < min_publication:
            current = "none" if publication is None else str(publication.id)
            raise StaleWeightsError(
                f"the request requires publication {min_publication} or newer, this server has {current}",
                retry_after_s=RETRY_AFTER_S,
            )

    def _require_queue_space(self, count: int) -> None:
        """The engine itself checks the space for one request."""
        if self.engine.stats().queued + count > self.config.max_queued:
            raise EngineQueueFullError(
                f"the queue is full ({self.config.max_queued} requests); retry later", retry_after_s=RETRY_AFTER_S
            )
