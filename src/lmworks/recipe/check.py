"""What the types of single nodes cannot see: names that must match across the tree."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.recipe.document import Keys
from lmworks.recipe.paths import nearest
from lmworks.recipe.recipe import Recipe


def problems(recipe: Recipe) -> Iterator[tuple[Keys, str]]:
    """Each fault of a resolved recipe, with the keys where it stands."""
    sources = [source.name for source in recipe.corpus.sources]
    for index, name in enumerate(sources):
        if name in sources[:index]:
            yield ("corpus", "sources", index, "name"), f"two sources are called {name!r}; give each its own name"
    phases = [phase.name for phase in recipe.train.phases]
    for index, phase in enumerate(recipe.train.phases):
        at: Keys = ("train", "phases", index)
        if phase.name in phases[:index]:
            yield (*at, "name"), f"two phases are called {phase.name!r}; give each its own name"
        for name in phase.mixture:
            if name not in sources:
                close = nearest(name, sources)
                hint = f"did you mean {close!r}?" if close else f"the sources are: {', '.join(sources) or 'none'}"
                yield (*at, "mixture", name), f"no source is called {name!r}; {hint}"
    model = recipe.model
    assert model.vocab_size and model.layers
    if model.vocab_size < recipe.tokenizer.vocab_size and not recipe.tokenizer.path:
        yield (
            ("model", "vocab_size"),
            f"{model.vocab_size} rows are too few for tokenizer.vocab_size {recipe.tokenizer.vocab_size}; leave model.vocab_size out",
        )
    if model.moe and model.moe.dense_layers >= model.layers:
        yield ("model", "moe", "dense_layers"), f"all {model.layers} layers would be dense; lower dense_layers or set model.moe to null"
