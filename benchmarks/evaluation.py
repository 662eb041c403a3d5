"""Speed of scoring multiple-choice sets, beside lm-evaluation-harness: python benchmarks/evaluation.py [--model FOLDER] [--items 200]

The same model answers the same items in cloze form (one likelihood per choice) by three paths:

1. ours: `lmworks.evaluate.sets.forms` on `BatchedLogProbs`
2. lm-evaluation-harness with our model interface
3. lm-evaluation-harness with its own class for transformers, on the same weights in Hugging Face format, at each batch size of
   `--batch-sizes`; its fastest counts

Each time holds all that is done once the model and the rows are loaded: prompts, tokens, scores and accuracy. The paths take turns; medians
are printed, by the clock and by CPU time of the process, and the ratios to ours. Without `--model` the weights are random: they do not
matter for the time. The accuracies must be equal in fp32. Needs the extras `harness` and `export`, and accelerate.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import library_texts, write_corpus

from lmworks.evaluate.harness.exporting import METRICS, export, task_name
from lmworks.evaluate.harness.lm import HarnessLM
from lmworks.evaluate.harness.task_data import Source
from lmworks.evaluate.harness.task_index import manager
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.sets import benchmarks, forms
from lmworks.export.export import write_huggingface
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load
from lmworks.tokenizer.train import train
from lmworks.weights.open import OpenModel, open_model

Accuracies = dict[str, float]


def random_model(folder: Path, hidden_size: int, layers: int) -> Path:
    """A dense model with random weights in Hugging Face format, and a tokenizer trained on the standard library."""
    write_corpus(folder / "corpus", library_texts(2))
    train(Recipe(name="speed", threads=1, tokenizer={"vocab_size": 8192}), folder / "corpus", folder / "tokenizer")
    config = Model(
        vocab_size=8192, hidden_size=hidden_size, num_hidden_layers=layers, num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128), head_dim=64, intermediate_size=4 * hidden_size, use_qk_norm=True,
        tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings="2048 tokens",
    )  # fmt: skip
    write_huggingface(initialize(Transformer(config), seed=1).eval(), load(folder / "tokenizer"), folder / "model", torch.float32)
    return folder / "model"


def ours(opened: OpenModel, sets: list[str], items: int) -> Accuracies:
    logprobs = BatchedLogProbs(opened.model, opened.context)
    found = {}
    for name in sets:
        loaded = benchmarks.load(Benchmark(name=name), items, 0)
        asked = [forms.cloze(item, ()) for item in loaded.items]  # type: ignore[arg-type]
        found[name] = forms.score(forms.answer(asked, opened.tokenizer, logprobs)).accuracy
    return found


def theirs(lm: object, loaded: Any, names: dict[str, str]) -> Accuracies:
    from lm_eval.evaluator import evaluate

    found = evaluate(lm, loaded, bootstrap_iters=0, log_samples=False)  # type: ignore[arg-type]
    assert found is not None
    results = found["results"]
    main, partial = (f"{METRICS[norm]},none" for norm in ("byte", "none"))
    return {name: results[task][main if main in results[task] else partial] for task, name in names.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, help="a model in Hugging Face format")
    options.add_argument("--hidden-size", type=int, default=512)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--sets", default="arc-easy,boolq,commonsenseqa,hellaswag,openbookqa,piqa,sciq,winogrande")
    options.add_argument("--items", type=int, default=200)
    options.add_argument("--batch-sizes", default="8,32,64")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    given = options.parse_args()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as place, Source().installed():
        folder = Path(place)
        model = given.model or random_model(folder, given.hidden_size, given.layers)
        sets = given.sets.split(",")
        export(folder / "tasks", [Benchmark(name=one) for one in sets], ("cloze",), given.items)
        names = {task_name(name, "cloze", 0): name for name in sets}
        loaded = manager(folder / "tasks", trusted=False).load(list(names))
        opened = open_model(model, given.device)
        dtype = {"fp32": "float32", "bf16": "bfloat16"}[opened.precision]
        paths: dict[str, Callable[[], Accuracies]] = {
            "ours": lambda: ours(opened, sets, given.items),
            "lm-eval, our class": lambda: theirs(HarnessLM(opened), loaded, names),
        }
        for size in map(int, given.batch_sizes.split(",")):
            lm = HFLM(pretrained=str(model), dtype=dtype, device=given.device, batch_size=size, max_length=opened.context)
            paths[f"lm-eval, hf, batch {size}"] = lambda lm=lm: theirs(lm, loaded, names)  # type: ignore[misc]
        figures = measure(paths, given.rounds, exact=opened.precision == "fp32")
        figures |= {"items": given.items, "sets": sets, "device": given.device, "threads": torch.get_num_threads(), "dtype": dtype}
        if given.out:
            given.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def measure(paths: dict[str, Callable[[], Accuracies]], rounds: int, exact: bool) -> dict[str, object]:
    """Let the paths take turns, after one turn that is not counted; print and return medians. `exact`: the accuracies must be equal."""
    found = {name: path() for name, path in paths.items()}
    for name, accuracies in found.items():
        assert accuracies == found["ours"] or not exact, (name, accuracies, found["ours"])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    for _ in range(rounds):
        for name, path in paths.items():
            start, cpu = time.perf_counter(), time.process_time()
            path()
            times[name].append((time.perf_counter() - start, time.process_time() - cpu))
    medians = {name: tuple(statistics.median(column) for column in zip(*taken, strict=True)) for name, taken in times.items()}
    clock, cpu = medians["ours"]
    print(f"{'path':<24}{'s':>9}{'CPU s':>9}{'of ours':>9}{'of our CPU':>12}")
    for name, (seconds, busy) in medians.items():
        print(f"{name:<24}{seconds:>9.2f}{busy:>9.2f}{seconds / clock:>9.2f}{busy / cpu:>12.2f}")
    fastest = min(seconds for name, (seconds, _) in medians.items() if ", hf" in name)
    print(f"ours takes {clock / fastest:.2f} of the time of lm-evaluation-harness with transformers at its fastest batch size")
    print("the accuracies are " + ("equal" if all(one == found["ours"] for one in found.values()) else f"not equal: {found}"))
    return {"seconds": {name: one[0] for name, one in medians.items()}, "cpu_seconds": {name: one[1] for name, one in medians.items()}}


if __name__ == "__main__":
    main()
