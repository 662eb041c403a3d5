"""What layers of several kinds cost and remember, on a CPU.

    python benchmarks/layer_types.py decode
    python benchmarks/layer_types.py recall MODEL ... runs/ablations/layer-types

`decode`: milliseconds of a token and bytes of cache and states of a row, by the length of its context: eight layers of 256 channels with
initial weights, one thread, the arms in turn. `recall`: a segment of 24 random words comes twice, a text apart. What models, and the
runs of ablations, gain in bits per token on its second half the second time, by the distance.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from lmworks import load_model
from lmworks.api.models import Model as LoadedModel
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.tokenizer import Tokenizer

LENGTHS = (1024, 4096, 16384, 32768)
DISTANCES = (64, 256, 896, 2048, 4096)
ARMS: dict[str, dict[str, Any]] = {
    "attention": {},
    "windows 3:1": {"sliding_window": "1Ki", "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "delta rule 3:1": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "gated_delta": {"num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 64},
    },
}  # fmt: skip
_SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 704,
}  # fmt: skip
_PIECE, _ROUNDS, _NEEDLE, _ROWS = 1024, 15, 24, 8


@torch.no_grad()
def decode() -> None:
    torch.set_num_threads(1)
    models = {name: initialize(Transformer(Model.model_validate(_SHAPE | arm)), seed=1).eval() for name, arm in ARMS.items()}
    print(f"| context | {' | '.join(f'{name}: ms a token | MB' for name in ARMS)} |\n|---|{'---|---|' * len(ARMS)}")
    caches = {name: model.cache(1, LENGTHS[-1] + 1) for name, model in models.items()}
    for length in LENGTHS:
        for name, model in models.items():
            for _ in range(caches[name].lengths[0], length, _PIECE):  # what the lengths before have filled is not read again
                model.hidden(torch.randint(0, 4096, (1, _PIECE)), cache=caches[name])
                caches[name].finish(_PIECE)
        took: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(_ROUNDS):
            for name, model in models.items():
                began = time.perf_counter()
                model(torch.randint(0, 4096, (1, 1)), cache=caches[name])
                took[name].append(time.perf_counter() - began)
        sizes = {name: model.cache(1, length + 1).bytes for name, model in models.items()}
        cells = (f"{1e3 * statistics.median(took[name]):.1f} | {sizes[name] / 1e6:.1f}" for name in models)
        print(f"| {length:,} | {' | '.join(cells)} |", flush=True)


def recall(*places: Path) -> None:
    print(f"| model | {' | '.join(f'{distance:,} tokens' for distance in DISTANCES)} |\n|---|{'---|' * len(DISTANCES)}")
    for place in places:
        for where in sorted(place.glob("arms/*/seed-*")) or [place]:
            model = load_model(where)
            text, words = model.tokenizer.encode("\n".join(topics.values())), _words(model.tokenizer)
            context = model.context or int(model.config.max_position_embeddings or 0)
            fitting = [distance for distance in DISTANCES if distance + 2 * _NEEDLE <= context]
            gains = [f"{statistics.mean(_gains(model, text, words, distance)):.2f}" for distance in fitting]
            print(f"| {where.relative_to(place) if where != place else model.name} | {' | '.join(gains)} |", flush=True)


def _words(tokenizer: Tokenizer) -> list[int]:
    """The tokens of a vocabulary that are a space and a word."""
    vocabulary = json.loads((tokenizer.directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return [number for token, number in vocabulary.items() if re.fullmatch("[Ġ▁][a-z]{3,}", token)]


def _gains(model: LoadedModel, text: list[int], words: list[int], distance: int) -> Iterator[float]:
    """Bits per token that the second half of a segment costs less the second time."""
    draw, half = random.Random(distance), _NEEDLE // 2
    for _ in range(_ROWS):
        segment, start = draw.choices(words, k=_NEEDLE), draw.randrange(len(text) - distance)
        bits = [-value / math.log(2) for value in model.token_logprobs([*segment, *text[start : start + distance], *segment])]
        yield statistics.mean(bits[half:_NEEDLE]) - statistics.mean(bits[-half:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "recall"])
    parser.add_argument("paths", nargs="*", type=Path)
    options = parser.parse_args()
    {"decode": decode, "recall": recall}[options.what](*options.paths)
