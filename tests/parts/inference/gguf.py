"""A tiny GGUF language model, written on the spot: quantised weights, byte-level tokens, a chat template."""

import zipfile
from pathlib import Path

import gguf
import numpy as np

from rollbook.rollout.chat.tokenizer import _byte_characters

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED, CONTEXT = 64, 2, 2, 1, 96, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, *, seed: int = 0, pad: str = SPECIAL[0]) -> Path:
    random = np.random.default_rng(seed)
    tokens = [pad, *SPECIAL[1:], *_byte_characters(), "he", "ll"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    matrices = {"token_embd": (len(tokens), HIDDEN)}
    for at in range(LAYERS):
        matrices |= {
            f"blk.{at}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{at}.attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{at}.attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{at}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{at}.ffn_gate": (FEED, HIDDEN),
            f"blk.{at}.ffn_up": (FEED, HIDDEN),
            f"blk.{at}.ffn_down": (HIDDEN, FEED),
        }
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{at}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for name, shape in matrices.items():
        plain = random.normal(0, 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(plain, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def in_a_wheel(file: Path, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, f"package/{file.name}")
        archive.writestr("package/__init__.py", "")
    return wheel
