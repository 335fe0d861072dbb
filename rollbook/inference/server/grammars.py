"""Compiles grammars with llguidance and follows them token by token. Imported on the first request that has a grammar."""

from functools import lru_cache

import llguidance
import numpy as np
from numpy.typing import NDArray

from rollbook.inference.engine import GrammarError
from rollbook.inference.request import BadRequestError
from rollbook.inference.server.text import TextTokenizer

CACHED_GRAMMARS = 256
MAX_GRAMMAR_CHARS = 1 << 17
"""A grammar is compiled on the event loop: one of two million characters would stop all requests for seconds."""
MAX_ERROR_CHARS = 300
NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""The policy chooses the tokens of a text that the grammar fixes. Otherwise llguidance would force the tokenizer's choice."""


class LlguidanceCompiler:
    """Compiles grammars for one tokenizer. `vocab_size` is the model's; models may have more tokens than their tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, *, vocab_size: int) -> None:
        if not tokenizer.eos_token_ids:
            raise BadRequestError("this tokenizer has no end token, which a grammar needs")
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)), eos_token=list(tokenizer.eos_token_ids)
        )
        self._start = lru_cache(CACHED_GRAMMARS)(self._compiled)

    def compile(self, grammar: str, *, field: str) -> "GrammarConstraint":
        """Raises `BadRequestError` that names `field`."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise BadRequestError(
                f"{field}: the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed",
                param=field,
            )
        matcher = self._start(grammar)
        if matcher.is_error():
            raise BadRequestError(f"{field}: the grammar is not supported: {_first_line(matcher)}", param=field)
        constraint = GrammarConstraint(matcher)
        try:
            # Limits of llguidance on the size of a grammar may take effect with the first token only.
            constraint.copy().allowed()
        except GrammarError as error:
            raise BadRequestError(f"{field}: {error}", param=field) from error
        return constraint

    def _compiled(self, grammar: str) -> llguidance.LLMatcher:
        lark = llguidance.LLMatcher.grammar_from_lark(grammar if "%llguidance" in grammar else NO_FORCING + grammar)
        return llguidance.LLMatcher(self._tokenizer, lark, log_level=0)


class GrammarConstraint:
    """Satisfies `engine.TokenConstraint`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> NDArray[np.uint8]:
        allowed = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_first_line(self._matcher)}")
        return np.frombuffer(allowed, dtype=np.uint8)

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def copy(self) -> "GrammarConstraint":
        return GrammarConstraint(self._matcher.deep_copy())


def _first_line(matcher: llguidance.LLMatcher) -> str:
    """The error of a matcher, without the state that llguidance prints after it."""
    return str(matcher.get_error()).partition("\n")[0][:MAX_ERROR_CHARS]


class _Vocabulary:
    """What llguidance needs of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.eos_token_id = tokenizer.eos_token_ids[0]
        unnamed = (token for token, raw in enumerate(self.tokens) if not raw)
        self.special_token_ids = sorted({*tokenizer.special_token_ids, *unnamed})
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
