"""Tokenizer and chat template of a model directory. The only module of this room that imports `tokenizers` and `jinja2`."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from rollbook.contracts.decoding import valid_text
from rollbook.contracts.errors import RunError
from rollbook.rollout.contract import Message, RenderError

CACHED_TEXTS = 4096
"""Size of the caches of renderings and encodings. Episodes of a group share their first prompt, so most turns hit the cache."""
FIRST_CHARS_PER_TOKEN = 4
MERGED_TOKENS = 64
"""More tokens than the end of a text can lose when it continues: the next characters may merge with the last tokens."""
CACHED_CHARS = 4096
"""Longer strings are not cached: this keeps the two caches below 40 MB, and long strings rarely repeat."""
OPENING, CLOSING, REASONING = "<think>", "</think>", "reasoning_content"
"""Tags of thoughts, and the field of messages from which templates read them."""


def _byte_characters() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a printable character: itself if printable, else the next unused one above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + at): byte for at, byte in enumerate(others)}}


_BYTE_OF = _byte_characters()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenizerError(RunError):
    """The files of a tokenizer are missing or invalid."""


class ModelTokenizer:
    """Implements `contract.Tokenizer`."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        chat_template: str | None,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._fast = fast
        self._special_tokens = dict(special_tokens or {})
        self._source = chat_template
        self._template = None if chat_template is None else _compile(chat_template)
        self._has_reasoning = chat_template is not None and REASONING in chat_template
        self._eos_token_ids = tuple(eos_token_ids)
        # The rendering of a template that reads the date does not depend on the messages alone.
        self._may_cache = chat_template is not None and "strftime_now" not in chat_template
        added = fast.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_token_ids = tuple(sorted(token_id for token_id, token in added.items() if token.special))
        """Control tokens, which are no text."""
        self._is_byte_level = "ByteLevel" in repr(fast.decoder)
        self._encode_short = lru_cache(CACHED_TEXTS)(self._encode)
        self._render_short = lru_cache(CACHED_TEXTS)(self._render_plain)

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelTokenizer":
        """Read `tokenizer.json` and, if they exist, tokenizer config, generation config and `chat_template.jinja`."""
        try:
            fast = FastTokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises a bare Exception
            raise TokenizerError(f"cannot load a tokenizer from {directory / 'tokenizer.json'}: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        special = {
            name: value if isinstance(value, str) else value["content"]
            for name, value in config.items()
            if name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        template = config.get("chat_template")
        template_file = directory / "chat_template.jinja"
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(
                f"{directory}: chat_template is a {type(template).__name__}; it must be one template text"
            )
        return cls(
            fast,
            chat_template=template,
            special_tokens=special,
            eos_token_ids=_eos_ids(fast, special, _read_json(directory / "generation_config.json")),
        )

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """The tokens of a text; only the first `max_tokens`, if given."""
        if len(text) <= CACHED_CHARS:
            return list(self._encode_short(text))[:max_tokens]
        return self._encode_long(text, max_tokens, add_special_tokens=False)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._fast.encode(valid_text(text), add_special_tokens=False).ids)

    def _encode_long(self, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> list[int]:
        """Without offsets, which take half of the time. The interpreter is free meanwhile, but not while it frees the tokens.

        So the beginning of a long text is encoded first: if it has too many tokens already, the rest is not encoded.
        """
        text = valid_text(text)
        size = len(text) if max_tokens is None else min(len(text), FIRST_CHARS_PER_TOKEN * max_tokens)
        while True:
            [encoding] = self._fast.encode_batch_fast([text[:size]], add_special_tokens=add_special_tokens)
            if size == len(text) or (max_tokens is not None and len(encoding) > max_tokens + MERGED_TOKENS):
                return list(encoding.ids[:max_tokens])
            size = min(len(text), 2 * size)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def encode_prompt(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Tokens of a text at the start of a sequence, with the model's start token if it has one; only the first `max_tokens`."""
        return self._encode_long(text, max_tokens, add_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be part of a character."""
        token: str | None = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._is_byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        if (fallback := _BYTE_FALLBACK.fullmatch(token)) is not None:
            return bytes([int(fallback.group(1), 16)])
        return token.replace("\u2581", " ").encode()

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        """The text of these tokens, including special ones, and the character span of each."""
        text = self.decode(token_ids, skip_special_tokens=False)
        again = self._fast.encode(text, add_special_tokens=False)
        if list(again.ids) == list(token_ids):
            return text, [(int(begin), int(end)) for begin, end in again.offsets]
        # Sampled tokens can differ from the encoding of their text. Decoding them one by one may split multi-byte characters.
        parts = [self.decode([token], skip_special_tokens=False) for token in token_ids]
        ends = list(itertools.accumulate(map(len, parts)))
        return "".join(parts), list(zip([0, *ends[:-1]], ends, strict=True))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        if self._may_cache and not tools and not template:
            plain = _plain_chat(messages)
            if plain is not None:
                return self._render_short(plain, add_generation_prompt)
        return self._render(messages, add_generation_prompt, tools, template)

    def _render_plain(self, chat: tuple[str, ...], add_generation_prompt: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(chat[::2], chat[1::2], strict=True)]
        return self._render(messages, add_generation_prompt)

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise RenderError(
                "this tokenizer has no chat template: write one into chat_template.jinja in the model directory (for a model that "
                'the run builds: model.build.chat_template), such as "{% for m in messages %}{{ m.role }}: {{ m.content }}'
                '{{ eos_token }}\\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"'
            )
        try:
            return self._template.render(
                {
                    **(template or {}),
                    **self._special_tokens,
                    "messages": [*map(_with_reasoning, messages)] if self._has_reasoning else messages,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Templates run Python operations on message fields, so unexpected messages raise Python's exceptions.
            raise RenderError(f"the chat template rejected {len(messages)} messages: {error}") from error

    @cached_property
    def identity(self) -> str:
        """Digest of vocabulary, merges, special tokens and template: equal tokenizers make equal tokens."""
        parts = (self._fast.to_str(), self._source or "", json.dumps(self._special_tokens, sort_keys=True))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    @cached_property
    def vocabulary_digest(self) -> str:
        """Digest of all tokens and their ids. Tokenizers with equal ones give every id the same meaning; templates may differ."""
        vocabulary = sorted(self._fast.get_vocab(with_added_tokens=True).items(), key=itemgetter(1, 0))
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:32]

    @property
    def vocab_size(self) -> int:
        size: int = self._fast.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids


def _plain_chat(messages: Sequence[Message]) -> tuple[str, ...] | None:
    """The cache key of a short chat whose messages have only role and content: both, alternating."""
    chat: list[str] = []
    length = 0
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if len(message) != 2 or not isinstance(role, str) or not isinstance(content, str):
            return None
        length += len(content)
        chat += (role, content)
    return tuple(chat) if length <= CACHED_CHARS else None


def _eos_ids(fast: FastTokenizer, special: dict[str, str], generation: dict[str, Any]) -> tuple[int, ...]:
    """The tokenizer's end token first, then those of the generation config (some models have several)."""
    ids: list[int] = []
    if "eos_token" in special and (own := fast.token_to_id(special["eos_token"])) is not None:
        ids.append(own)
    listed = generation.get("eos_token_id")
    for token_id in listed if isinstance(listed, list) else [listed]:
        if isinstance(token_id, int) and token_id not in ids:
            ids.append(token_id)
    return tuple(ids)


class _GenerationTag(Extension):
    """Published templates mark replies with `{% generation %}`, for masks of training data. It renders its content."""

    tags = {"generation"}  # noqa: RUF012  # declared by jinja2

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(source: str) -> jinja2.Template:
    # Templates of downloaded models are untrusted.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template does not parse: line {error.lineno}: {error}") from error


def _with_reasoning(message: Message) -> Message:
    """Newer templates read the thought of a reply from a field, and print one in its text as part of the answer. The start of the
    thought may be missing, because it is the end of the prompt."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str) or CLOSING not in content:
        return message
    if message.get(REASONING) is not None:
        return message
    thought, _, rest = content.partition(CLOSING)
    return {**message, REASONING: thought.rpartition(OPENING)[2].strip("\n"), "content": rest.lstrip("\n")}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers. Jinja's `tojson` escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} contains a {type(content).__name__}; it must be an object")
    return content
