"""What layers of several kinds cost and remember, on a CPU.

    python benchmarks/layer_types.py decode
    python benchmarks/layer_types.py recall runs/ablations/layer-types

`decode`: milliseconds of a token and bytes of cache and states of a row, by the length of its context: eight layers of 256 channels with
initial weights, one thread, the arms in turn. `recall`: a segment of 24 random tokens comes twice, a text apart. What the runs of an
ablation gain in bits per token on its second half the second time, by the distance.
"""

from __future__ import annotations

import argparse
import math
import random
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


@torch.no_grad()
def decode() -> None:
    torch.set_num_threads(1)
    models = {name: initialize(Transformer(Model.model_validate(_SHAPE | arm)), seed=1).eval() for name, arm in ARMS.items()}
    print(f"| context | {' | '.join(f'{name}: ms a token | MB' for name in ARMS)} |\n|---|{'---|---|' * len(ARMS)}")
    for length in LENGTHS:
        caches = {}
        for name, model in models.items():
            caches[name] = model.cache(1, length + _ROUNDS + 1)
            for start in range(0, length, _PIECE):
                model(torch.randint(0, 4096, (1, min(_PIECE, length - start))), cache=caches[name])
                caches[name].finish(min(_PIECE, length - start))
        took: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(_ROUNDS):
            for name, model in models.items():
                began = time.perf_counter()
                model(torch.randint(0, 4096, (1, 1)), cache=caches[name])
                took[name].append(time.perf_counter() - began)
        cells = (f"{1e3 * statistics.median(took[name]):.1f} | {caches[name].bytes / 1e6:.1f}" for name in models)
        print(f"| {length:,} | {' | '.join(cells)} |", flush=True)


def recall(folder: Path) -> None:
    distances = (64, 128, 256, 512, 896)
    print(f"| run | {' | '.join(f'{distance} tokens' for distance in distances)} |\n|---|{'---|' * len(distances)}")
    for run in sorted(folder.glob("arms/*/seed-*")):
        model, text = load_model(run), load_tokenizer(run).encode("\n".join(topics.values()))
        gains = (statistics.mean(_gains(model, text, distance)) for distance in distances)
        print(f"| {run.parent.name}, {run.name} | {' | '.join(f'{gain:.2f}' for gain in gains)} |", flush=True)


def _gains(model: LoadedModel, text: list[int], distance: int) -> Iterator[float]:
    """Bits per token that the second half of a segment costs less the second time."""
    draw, vocabulary, half = random.Random(distance), model.config.vocab_size, _NEEDLE // 2
    for _ in range(_ROWS):
        segment, start = [draw.randrange(300, vocabulary - 300) for _ in range(_NEEDLE)], draw.randrange(len(text) - distance)
        bits = [-value / math.log(2) for value in model.token_logprobs([*segment, *text[start : start + distance], *segment])]
        yield statistics.mean(bits[half:_NEEDLE]) - statistics.mean(bits[-half:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "recall"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/ablations/layer-types"))
    options = parser.parse_args()
    decode() if options.what == "decode" else recall(options.folder)
