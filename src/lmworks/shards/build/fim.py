"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): a document is split into three pieces, and the model learns to write the
middle last.

A split document is stored in one of two orders, with the tokenizer's special tokens between the pieces:

    <|code_prefix|> prefix <|code_suffix|> suffix <|code_middle|> middle            PSM, the prompt format of editors
    <|code_prefix|> <|code_suffix|> suffix <|code_middle|> prefix middle            SPM, in which the middle follows the prefix

Whether a document is split, where, and in which order follow from the seed and its id alone. The special tokens are inserted as ids after
encoding: text never becomes a special token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Fim

if TYPE_CHECKING:
    from lmworks.tokenizer import Tokenizer

PREFIX, MIDDLE, SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"


def encode_documents(
    tokenizer: Tokenizer, ids: Sequence[str], texts: Sequence[str], fim: Fim | None, seed: int, threads: int | None
) -> list[np.ndarray]:
    """The tokens of each text, (T,) uint32 without the closing token; documents drawn for FIM are in one of its orders."""
    if fim is None:
        return tokenizer.encode_batch(texts, threads=threads)
    prefix, middle, suffix = (_special(tokenizer, name) for name in (PREFIX, MIDDLE, SUFFIX))
    cuts = [split_document(identity, text, fim, seed) for identity, text in zip(ids, texts, strict=True)]
    pieces = [piece for text, found in zip(texts, cuts, strict=True) for piece in (found[:3] if found else (text,))]
    encoded = iter(tokenizer.encode_batch(pieces, threads=threads))
    documents = []
    for found in cuts:
        if found is None:
            documents.append(next(encoded))
            continue
        before, between, after = next(encoded), next(encoded), next(encoded)
        psm = [[prefix], before, [suffix], after, [middle], between]
        spm = [[prefix, suffix], after, [middle], before, between]
        documents.append(np.concatenate([np.asarray(part, np.uint32) for part in (spm if found[3] else psm)]))
    return documents


def split_document(identity: str, text: str, fim: Fim, seed: int) -> tuple[str, str, str, bool] | None:
    """(prefix, middle, suffix, whether the suffix comes first) of a document; None for a document that is not split.

    The two positions are drawn uniformly over characters, as the paper found best: pieces may begin inside a word, or be empty.
    """
    digest = hashlib.blake2b(identity.encode(), key=f"{seed}/infill".encode()[:64], digest_size=32).digest()
    chosen, order, *places = (int.from_bytes(digest[start : start + 8], "little") for start in range(0, 32, 8))
    if chosen >= fim.rate * 2**64:
        return None
    first, last = sorted(place % (len(text) + 1) for place in places)
    return text[:first], text[first:last], text[last:], order < fim.spm_rate * 2**64


def _special(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.special:
        raise UserError(f"the tokenizer in {tokenizer.directory} has no {name}, which fim needs: set fim to null, or train a new tokenizer")
    return tokenizer.special[name]
