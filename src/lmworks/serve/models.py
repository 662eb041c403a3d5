"""The models of one server: the first is loaded from disk at the start, any other at its first request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from lmworks.errors import UserError
from lmworks.host.machine import multiplies_bf16
from lmworks.inference.sampling import SAMPLING
from lmworks.io.run_layout import BASE
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.serve.engine import Engine
from lmworks.serve.requests import EngineStats
from lmworks.serve.spin import apart

if TYPE_CHECKING:
    from lmworks.model import Transformer


class Busy(UserError):
    """The queue is full."""

    def __init__(self, waiting: int, requested: int, limit: int) -> None:
        super().__init__(f"{waiting} of at most {limit} answers are waiting, and this request asks for {requested} more; try again later")


@dataclass(frozen=True)
class LazyModel:
    """A model that is not loaded yet; `load` loads it."""

    context: int
    tuned: bool
    load: Callable[[], Engine]
    sampling: Mapping[str, float] = field(default_factory=lambda: dict(SAMPLING))


class Models:
    """Engines by name. `lazy` are models that are loaded at their first request.

    The number of answers in flight, which bounds the memory of the KV caches, is divided among the loaded models.
    """

    def __init__(self, first: Engine, lazy: Mapping[str, LazyModel] | None = None) -> None:
        self.first, self._loaded, self._lazy = first, {first.name: first}, dict(lazy or {})
        self._rows = first.max_rows
        self._loading = asyncio.Lock()

    @property
    def known(self) -> dict[str, Engine | LazyModel]:
        """All models, loaded or not; the first model comes first."""
        return {**self._loaded, **self._lazy}

    async def engine(self, name: str | None) -> Engine:
        """The engine of this name (of the first model for None); loads it if necessary. Raises `UserError` if it cannot be loaded."""
        name = self.first.name if name is None else name
        if name not in self._loaded:
            async with self._loading:
                if name not in self._loaded:  # another request may have loaded it
                    self._add(name, await asyncio.to_thread(self._lazy[name].load))
        return self._loaded[name]

    def _add(self, name: str, engine: Engine) -> None:
        del self._lazy[name]
        self._loaded[name] = engine
        for each in self._loaded.values():
            each.max_rows = max(1, self._rows // len(self._loaded))

    def require_capacity(self, limit: int, requested: int) -> None:
        """Raise `Busy` if `requested` more answers would exceed `limit` waiting answers, over all models."""
        waiting = sum(engine.waiting for engine in self._loaded.values())
        if waiting + requested > limit:
            raise Busy(waiting, requested, limit)

    @property
    def alive(self) -> bool:
        """Whether all loaded engines can still take requests."""
        return all(engine.alive for engine in self._loaded.values())

    def stats(self) -> EngineStats:
        """The sums over all engines."""
        stats = [engine.stats() for engine in self._loaded.values()]
        return EngineStats(
            sum(one.running for one in stats), sum(one.waiting for one in stats),
            sum(one.prompt_tokens for one in stats), sum(one.generated_tokens for one in stats),
            sum(one.hit_tokens for one in stats),
        )  # fmt: skip

    def close(self) -> None:
        """Close all engines."""
        for engine in self._loaded.values():
            engine.close()


Dtype = Literal["auto", "float32", "bfloat16"]
_BOUNDS = {"temperature": (0, 2), "top_p": (0, 1), "top_k": (0, 1e9), "min_p": (0, 1), "repetition_penalty": (0.01, 100)}


def prepare(model: Transformer, dtype: Dtype = "auto", rows: int = Engine.max_rows) -> Transformer:
    """The model on the first GPU, else the CPU, with weights in `dtype`, which are cast once; `model` is emptied.

    `rows` is the number of answers that it will usually write at a time. `auto` is bf16 on a GPU that multiplies it, and fp32 elsewhere: a
    CPU then gives the same answers with and without bf16 products.
    """
    from lmworks.inference.model import for_inference

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    narrow = device.type == "cuda" and multiplies_bf16(device) if dtype == "auto" else dtype == "bfloat16"
    return for_inference(model, torch.bfloat16 if narrow else torch.float32, device, consume=True, rows=rows)


def load_engine(
    where: str | Path, base: bool = False, threads: int | None = None, dtype: Dtype = "auto", rows: int = Engine.max_rows,
    name: str | None = None, rope: RopeExtension | None = None,
) -> Engine:  # fmt: skip
    """Load the engine of what `open_model` opens, or of the base model of a run if `base` is set. A run is called by the name of its
    recipe, others by that of their folder or file, unless `name` is given. `threads` of the CPU are those of PyTorch by default; `dtype`
    and `rows` are those of `prepare`, `rope` that of `open_model`.

    Raises `UserError` if there is no model, or if model and tokenizer do not match.
    """
    from lmworks.weights.open import open_model

    where = f"{where}@{BASE.model}" if base else str(where)
    opened = open_model(where, "cpu", as_stored=True, rope=rope)
    if name is None:
        name = opened.name if opened.recipe is None else opened.recipe.name + "-base" * where.endswith(f"@{BASE.model}")
    return make_engine(prepare(opened.model, dtype, rows), opened.tokenizer.directory, name, opened.chat, threads)


def load_models(
    where: str | Path, base: bool = False, dtype: Dtype = "auto", name: str | None = None, rope: RopeExtension | None = None
) -> Models:  # fmt: skip
    """The models to serve: that of `load_engine`, and the other one of a run's base model and the one that it ends with, if it exists,
    which is loaded at its first request. Where there are two, the base model is called NAME-base, and the other NAME: `name`, or the name
    of the recipe."""
    from lmworks.weights.run_models import final_model

    run_dir = Path(where).expanduser()
    if not (run_dir / "resolved.json").is_file() or final_model(run_dir) == BASE.model:
        return Models(load_engine(where, base, dtype=dtype, name=name, rope=rope))
    first = load_engine(where, base, dtype=dtype, name=f"{name}-base" if base and name is not None else name, rope=rope)
    other = first.name.removesuffix("-base") if base else f"{first.name}-base"
    load = lambda: apart(lambda: load_engine(where, not base, first.threads, dtype, name=other, rope=rope))  # noqa: E731
    return Models(first, {other: LazyModel(first.context, base, load, first.sampling)})


def make_engine(model: Transformer, tokenizer_dir: Path, name: str, tuned: bool = True, threads: int | None = None) -> Engine:
    """Make an engine from a model, in the precision of its activations, and the tokenizer in `tokenizer_dir`."""
    from lmworks.inference.model import for_inference
    from lmworks.serve.vocabulary import Vocabulary
    from lmworks.tokenizer import load

    vocabulary = Vocabulary(load(tokenizer_dir))
    context = model.config.max_position_embeddings
    sampling = read_sampling(tokenizer_dir / "generation_config.json")
    assert context  # a resolved recipe and an exported config have it
    if not model.prepared:
        model = for_inference(model, rows=Engine.max_rows)
    return Engine(model, vocabulary, name, int(context), tuned=tuned, sampling=sampling, threads=threads or torch.get_num_threads())


def read_sampling(path: Path) -> dict[str, float]:
    """The sampling options that a model's generation_config.json states, greedy for `do_sample: false`; `SAMPLING` if there is no such file
    or it states none. Raises `UserError` for values that are none."""
    if not path.is_file():
        return dict(SAMPLING)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        stated = {name: given[name] for name in _BOUNDS if given.get(name) is not None}
    except (ValueError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a JSON object; restore it from the model's source") from None
    for name, value in stated.items():
        least, most = _BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise UserError(f"{path}: {name} is {str(value)[:50]}, not a number from {least:g} to {most:g}")
    if given.get("do_sample") is False:
        return {"temperature": 0.0}
    if "top_k" in stated:
        stated["top_k"] = int(stated["top_k"])
    return {"temperature": 1.0} | stated if stated else dict(SAMPLING)
