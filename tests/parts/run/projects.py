"""Projects with models of which only the config exists."""

import json
from pathlib import Path
from typing import Any

from rollbook.commands.training.init import init_project

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49_152},
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "ffn": 4864, "vocab": 151_936},
    "1.5b": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151_936},
    "8b": {"hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "ffn": 12_288, "vocab": 151_936},
}


def project(tmp_path: Path, model: str) -> Path:
    """The run file of a new project with a model of this shape, of which only the config exists."""
    home, shape = tmp_path / model, SHAPES[model]
    home.mkdir()
    table = {
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "intermediate_size": shape["ffn"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": model != "8b",
    }
    (home / "config.json").write_text(json.dumps(table), encoding="utf-8")
    init_project(tmp_path / f"run-{model}", template="single_turn", model=str(home))
    return tmp_path / f"run-{model}" / "run.toml"
