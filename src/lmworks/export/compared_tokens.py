"""The tokens on which an export is compared with the trained model: text as people write it, and random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.format.manifest import Manifest
from lmworks.shards.read.validation import Validation
from lmworks.tokenizer.tokenizer import Tokenizer

_ROWS, _RANDOM_ROWS = 4, 2  # sequences of text, at least, since each domain gives one or more; and of random tokens
_LONGEST, _RANDOM_LONGEST = 512, 256  # tokens of each
_MOST = 2048  # tokens of text, which bounds the time for many domains
_FEWEST = 64  # of one domain

TEXT = """\
The ferry left at 7:45, twelve minutes late, and nobody on the upper deck seemed to mind. "It's always like this in October," said the \
woman beside me; she'd crossed 1,204 times, she told us, and she wasn't counting. We'll see the lighthouse soon, won't we?

Die Brücke über den Fluß wurde 1897 gebaut und kostete 3.500.000 Mark. Où est la clé de l'atelier ? ¿Cuánto cuesta el billete de ida?
Поезд отходит в 6:30 с третьего пути. 列車は午前九時に京都駅を出発します。 今天的天气很好，我们去公园散步吧。 서울의 겨울은 춥다.
القطار يصل في الساعة الثامنة. रेलगाड़ी सुबह आठ बजे आती है। รถไฟออกเวลาเก้าโมง 🚂🌊 e\u0301té

    def area(width: float, height: float = 2.0) -> float:
        # both in metres
        return round(width * height, 3) if width > 0 else 0.0

{"id": 4711, "tags": ["a", "b"], "ratio": 0.125, "ok": true}\tx^2 + y^2 = r^2  <b>bold</b>  https://example.org/?q=1&r=2
"""
"""For a run without a corpus: several scripts, digits, code, marks and white space."""


def compared_tokens(recipe: Recipe, shards_dir: Path, tokenizer: Tokenizer) -> dict[str, list[Tensor]]:
    """Sequences of token ids (T,): held-out text of the run, or `TEXT` plain and as a conversation if it has none; and random ids."""
    text = list(held_out_tokens(recipe, shards_dir)) if recipe.has_text else bundled_tokens(recipe, tokenizer)
    return {"text": text, "random": list(drawn_tokens(recipe, tokenizer))}


def held_out_tokens(recipe: Recipe, shards_dir: Path) -> Tensor:
    """(B, T) token ids of held-out documents, the same number of sequences from every domain."""
    manifest = Manifest.load(shards_dir)
    rows = -(-_ROWS // len(manifest.domains()))
    longest = min(_LONGEST, max(_FEWEST, _MOST // (rows * len(manifest.domains()))))
    length = min([longest, *(int(phase.sequence_length) for phase in recipe.train.phases[-1:])])
    found = [Validation(shards_dir, manifest, domain, length, rows).batch(0) for domain in manifest.domains()]
    return torch.from_numpy(np.concatenate([batch.tokens for batch in found])).long()


def bundled_tokens(recipe: Recipe, tokenizer: Tokenizer) -> list[Tensor]:
    """`TEXT`, and a conversation about it if there is a chat template."""
    found = [tokenizer.encode(TEXT)]
    if tokenizer.has_chat_template:
        try:
            chat = [{"role": "user", "content": TEXT[:200]}, {"role": "assistant", "content": "A crossing by ferry."}]
            found.append(tokenizer.encode_chat([*chat, {"role": "user", "content": "What did it cost?"}], add_generation_prompt=True)[0])
        except UserError:  # a template that wants more than messages
            pass
    longest = min(_LONGEST, int(recipe.model.max_position_embeddings or _LONGEST))
    return [torch.tensor(ids[:longest]) for ids in found]


def drawn_tokens(recipe: Recipe, tokenizer: Tokenizer) -> Tensor:
    """(B, T) ids of random words, which reach rows and experts that text does not."""
    generator = torch.Generator().manual_seed(recipe.seed)
    length = min(_RANDOM_LONGEST, int(recipe.model.max_position_embeddings or _RANDOM_LONGEST))
    return torch.randint(tokenizer.vocab_size, (_RANDOM_ROWS, length), generator=generator)
