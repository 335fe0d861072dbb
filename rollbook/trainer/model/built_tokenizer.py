"""The tokenizer of a built model. Imports no torch, so that a config can be checked quickly."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit

from rollbook.trainer.model_config import SPECIAL_TOKENS, ModelBuildConfig


def fast_tokenizer(build: ModelBuildConfig) -> Tokenizer:
    """One token per word, split at white space, or one per byte; special tokens first."""
    core = _words(build.vocabulary) if build.tokenizer == "words" else _bytes()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    return core


def _words(vocabulary: Sequence[str]) -> Tokenizer:
    words = (*SPECIAL_TOKENS, *vocabulary)
    core = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL_TOKENS[3]))
    core.pre_tokenizer = WhitespaceSplit()
    return core


def _bytes() -> Tokenizer:
    """A byte-level BPE without merges."""
    symbols = (*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet()))
    core = Tokenizer(BPE({symbol: number for number, symbol in enumerate(symbols)}, [], unk_token=SPECIAL_TOKENS[3]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = ByteLevelDecoder()
    return core
