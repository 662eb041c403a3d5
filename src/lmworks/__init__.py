"""lmworks: raw text to a language model that people can talk to.

The names below are the Python API, imported on first use: `import lmworks` imports neither torch nor numpy.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmworks.api.models import Model, load_model, load_tokenizer
    from lmworks.api.recipes import Recipe, load_recipe
    from lmworks.api.runs import Run, open_run
    from lmworks.api.steps import TrainingSession
    from lmworks.errors import UserError
    from lmworks.tokenizer.tokenizer import Tokenizer
    from lmworks.ui.terminal import Interrupted

__version__ = "0.1.0"
__all__ = [
    "Interrupted",
    "Model",
    "Recipe",
    "Run",
    "Tokenizer",
    "TrainingSession",
    "UserError",
    "load_model",
    "load_recipe",
    "load_tokenizer",
    "open_run",
]

# Must be set before torch is imported. OpenMP threads that spin at barriers take the core away from the thread that they wait for as
# soon as another program runs: training then runs at a tenth of its speed, not at half (LOG.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Likewise: GPU memory in segments that can grow, so that sizes which change (phases, documents, validation) do not fragment it.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

# Likewise: allocate CPU tensors in huge pages of 2 MB if Linux supports them, which causes fewer page faults and TLB misses.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_MODULES = {
    "Interrupted": "ui.terminal", "Model": "api.models", "Recipe": "api.recipes", "Run": "api.runs", "Tokenizer": "tokenizer.tokenizer",
    "TrainingSession": "api.steps", "UserError": "errors", "load_model": "api.models", "load_recipe": "api.recipes",
    "load_tokenizer": "api.models", "open_run": "api.runs",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lmworks.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
