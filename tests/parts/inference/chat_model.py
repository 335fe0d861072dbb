"""A tiny model with text: one token per byte, a chat template with tools, seeded random weights."""

from pathlib import Path

from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if reasoning_effort %}<effort {{ reasoning_effort }}>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
MAX_LEN = 512


def chat_model(directory: Path, *, seed: int = 1, is_tied: bool = True) -> Path:
    build = ModelBuildConfig(
        # Heads of size 32, the smallest that vLLM's attention on a CPU supports.
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        intermediate_size=96,
        max_position_embeddings=MAX_LEN,
        tokenizer="bytes",
        chat_template=TEMPLATE,
        initializer_range=0.3,
        tie_embeddings=is_tied,
    )
    return prepare_model_directory(ModelConfig(build=build), directory, seed=seed)
