"""The memory with which answers are drawn (`grpo`): the weights of the model that draws them, without those that it shares with the model
that is trained, and its KV caches. It is counted, not profiled: a profiler would record every operator of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor

from lmworks.model import Transformer
from lmworks.model.cache import Cache
from lmworks.profile.spans import replaced
from lmworks.train.grpo import PolicyGradient
from lmworks.train.observe.memory_kinds import storage_bytes
from lmworks.train.trainer import Trainer


class RolloutMemory:
    """`bytes`: the most so far."""

    def __init__(self) -> None:
        self.bytes = 0.0

    @classmethod
    @contextmanager
    def of(cls, trainer: Trainer) -> Iterator[RolloutMemory]:
        """Within the block, that of the answers that a trainer draws; none if its objective draws none."""
        found, objective = cls(), trainer.objective
        if not isinstance(objective, PolicyGradient):
            yield found
            return
        with replaced(objective.rollouts, draw_share=found._around(objective.rollouts.draw_share, trainer)):
            yield found

    def _around(self, draw: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
        def call(generator: Transformer, *args: Any) -> Any:
            seen: set[int] = set()
            storage_bytes(trainer.model.parameters(), seen)
            weights, caches = storage_bytes(_tensors(generator), seen), WeakSet[Cache]()
            make, hidden = generator.cache, generator.hidden

            def cache(*given: Any) -> Cache:
                made = make(*given)
                caches.add(made)
                return made

            def step(*given: Any, **options: Any) -> Any:
                self.bytes = max(self.bytes, weights + sum(one.bytes for one in caches))
                return hidden(*given, **options)

            with replaced(generator, cache=cache, hidden=step):
                return draw(generator, *args)

        return call


def _tensors(model: Transformer) -> Iterator[Tensor]:
    """All tensors of a model, those too that are neither parameters nor buffers of their modules."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                yield value
