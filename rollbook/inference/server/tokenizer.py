"""What the server needs of a tokenizer. The room knows no tokenizer library: whoever wires the server brings one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Texts(Protocol):
    """Text to tokens and back, as the model's own files say."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode_prompt(self, text: str) -> list[int]:
        """A text prompt, with the tokens that the model wants at its start."""

    def encode(self, text: str) -> list[int]:
        """Text as it stands: a rendered chat brings its special tokens itself."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; half a character where it is half a character."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A chat as one text. Raises `EpisodeError` where the template refuses it."""
