"""Pieces with scores, as SentencePiece has them, and the list of merges of tokenizer.json that finds the same ones in a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from lmworks.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces, as SentencePiece and GGUF number them."""


def merges_of(texts: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """The merges that give the same pieces as the scores: of neighbors that make a piece, those with the highest score are merged first.

    Of equal scores SentencePiece takes the first pair in the text, which a list of merges cannot say. Where that makes a difference, a
    `UserError` is raised. It makes none for the runs of spaces in the vocabularies of Llama and Mistral.
    """
    number_of = {text: number for number, text in enumerate(texts)}
    found: list[tuple[float, int, list[str]]] = []
    equal: dict[float, list[str]] = defaultdict(list)
    for number, text in enumerate(texts):
        if kinds[number] != NORMAL or len(text) < 2:
            continue
        pairs = [[text[:at], text[at:]] for at in range(1, len(text)) if text[:at] in number_of and text[at:] in number_of]
        if pairs:
            equal[scores[number]].append(text)
        found += [(-scores[number], number, pair) for pair in sorted(pairs, key=lambda pair: (number_of[pair[0]], number_of[pair[1]]))]
    found.sort(key=lambda one: one[:2])
    for tied in equal.values():
        if len(tied) > 1 and not _same_cuts(tied, [text for others in equal.values() for text in others]):
            raise UserError(
                f"its tokenizer has entries of equal score ({tied[0][:30]!r} and {tied[1][:30]!r}), so that merges depend on their place "
                "in the text, which tokenizer.json cannot express; take a model that has a tokenizer.json"
            )
    return [pair for _, _, pair in found]


def _same_cuts(runs: Sequence[str], merged: Sequence[str]) -> bool:
    """Whether pieces are all the runs of one character among the merged ones, and longer runs are cut alike if the first pair is merged
    first, and if the pair of the first piece is."""
    if {*runs} != {text for text in merged if {*text} == {runs[0][0]}}:
        return False
    rank = {len(run): number for number, run in enumerate(runs)}

    def cut(length: int, order: Callable[[list[int], int], tuple[int, ...]]) -> list[int]:
        sizes = [1] * length
        while pairs := [at for at in range(len(sizes) - 1) if sizes[at] + sizes[at + 1] in rank]:
            at = min(pairs, key=lambda at: order(sizes, at))
            sizes[at : at + 2] = [sizes[at] + sizes[at + 1]]
        return sizes

    def by_rank(sizes: list[int], at: int) -> tuple[int, ...]:
        left, right = sizes[at : at + 2]
        return rank[left + right], rank.get(left, -1), rank.get(right, -1), at

    return all(cut(length, lambda _, at: (at,)) == cut(length, by_rank) for length in range(2 * max(rank) + 2))
