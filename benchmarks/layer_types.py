"""What layers of several kinds cost and remember, on a CPU.

    python benchmarks/layer_types.py decode
    python benchmarks/layer_types.py copies runs/quickstart FILE
    python benchmarks/layer_types.py recall runs/ablations/layer-types

`decode`: milliseconds of a token and bytes of cache and states of a row, by the length of its context: eight layers of 256 channels with
initial weights, one thread, the arms in turn. `recall`: a segment of 24 random words comes twice, a text apart. What the runs of an
ablation gain in bits per token on its second half the second time, by the distance. `copies`: documents of segments of 8 to 32 random
words, each a token, that come again and again, for a source that teaches a small model to copy, which it does not learn from a few million
tokens of text.
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

import torch

from lmworks import load_model, load_tokenizer
from lmworks.api.models import Model as LoadedModel
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model

LENGTHS = (1024, 4096, 16384, 32768)
ARMS = {
    "attention": {},
    "windows 3:1": {"sliding_window": "1Ki", "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "delta rule 3:1": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "gated_delta": {"num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 64, "value_head_dim": 64},
    },
}  # fmt: skip
_SHAPE = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
          "head_dim": 64, "intermediate_size": 704}  # fmt: skip
_PIECE, _ROUNDS, _NEEDLE, _ROWS = 1024, 15, 24, 32
_DOCUMENTS, _DOCUMENT = 1000, 1000  # documents, and words of each


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


def recall(folder: Path) -> None:
    distances = (64, 128, 256, 512, 896)
    print(f"| run | {' | '.join(f'{distance} tokens' for distance in distances)} |\n|---|{'---|' * len(distances)}")
    for run in sorted(folder.glob("arms/*/seed-*")):
        model, tokenizer = load_model(run), load_tokenizer(run)
        text, words = tokenizer.encode("\n".join(topics.values())), [*_words(run)]
        gains = (statistics.mean(_gains(model, text, words, distance)) for distance in distances)
        print(f"| {run.parent.name}, {run.name} | {' | '.join(f'{gain:.2f}' for gain in gains)} |", flush=True)


def copies(run: Path, file: Path) -> None:
    draw, words = random.Random(5), [*_words(run).values()]
    with open(file, "w", encoding="utf-8") as out:
        for _ in range(_DOCUMENTS):
            segments: list[list[str]] = []
            text: list[str] = []
            while len(text) < _DOCUMENT:
                if not segments or draw.random() < 0.4:
                    segments.append(draw.choices(words, k=draw.randint(8, 32)))
                    text += segments[-1]
                else:
                    text += draw.choice(segments)
            out.write(json.dumps({"text": " " + " ".join(text)}) + "\n")


def _words(run: Path) -> dict[int, str]:
    """The tokens of a byte-level vocabulary that are a space and a word, by id."""
    vocabulary = json.loads((run / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return {number: token[1:] for token, number in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,}", token)}


def _gains(model: LoadedModel, text: list[int], words: list[int], distance: int) -> Iterator[float]:
    """Bits per token that the second half of a segment costs less the second time."""
    draw, half = random.Random(distance), _NEEDLE // 2
    for _ in range(_ROWS):
        segment, start = draw.choices(words, k=_NEEDLE), draw.randrange(len(text) - distance)
        bits = [-value / math.log(2) for value in model.token_logprobs([*segment, *text[start : start + distance], *segment])]
        yield statistics.mean(bits[half:_NEEDLE]) - statistics.mean(bits[-half:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "copies", "recall"])
    parser.add_argument("paths", nargs="*", type=Path)
    options = parser.parse_args()
    {"decode": decode, "copies": copies, "recall": recall}[options.what](*options.paths)
