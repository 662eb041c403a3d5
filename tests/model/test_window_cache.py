"""The cache of layers with a window: it holds about the window, and every token has the logits of a forward pass without a cache.

Tolerance 2e-5 of the largest logit: fp32 sums in another order, in three layers. A window that is off by one costs more than 1e-3.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tests.model.test_attention_sinks import CONFIG as SINKS
from tests.model.test_attention_sinks import model as sinks_model
from torch import Tensor

from lmworks.inference.model import for_inference
from lmworks.model import Transformer
from lmworks.model.cache import Cache, JoinedCache, Piece
from lmworks.model.init import initialize
from lmworks.plan.memory import kv_cache_bytes
from lmworks.recipe.schema.model import Model, Rope

WINDOW, LONGEST = 6, 61
_SHAPE = Model(
    vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
    use_qk_norm=True, initializer_range=0.3, sliding_window="6 tokens",
)  # fmt: skip
CONFIGS = {
    "mixed": _SHAPE.model_copy(
        update={"layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "sliding_rope": Rope(theta=300.0)}
    ),
    "all slide": _SHAPE,
    "one": _SHAPE.model_copy(update={"sliding_window": 1, "layer_types": ("sliding_attention", "full_attention")}),
    "sinks": SINKS,
}


def model(name: str = "mixed") -> Transformer:
    made = sinks_model() if name == "sinks" else initialize(Transformer(CONFIGS[name]), 1)
    return for_inference(made.eval())


def texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(64) for _ in range(length)] for length in lengths]


@torch.no_grad()
def read(model: Transformer, cache: Cache, pieces: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits (tokens, V) of the next tokens of each row, which are padded to the length of the longest."""
    counts, width = [len(piece) for piece in pieces], max(len(piece) for piece in pieces)
    cache.expect(counts)
    found = model(torch.tensor([[*piece, *[0] * (width - len(piece))] for piece in pieces]), cache=cache)
    cache.finish(counts)
    return [logits[:count] for logits, count in zip(found, counts, strict=True)]


@torch.no_grad()
def whole(model: Transformer, text: Sequence[int]) -> Tensor:
    """The logits (tokens, V) of a text without a cache."""
    return model(torch.tensor([list(text)]))[0]


def near(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) <= 2e-5 * float(expected.abs().max())


@pytest.mark.parametrize(("name", "behind"), [("mixed", 0), ("mixed", 5), ("all slide", 0), ("one", 0), ("sinks", 5)])
@pytest.mark.parametrize("size", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, LONGEST])
def test_pieces_of_every_size_have_the_logits_of_the_whole_text(name: str, behind: int, size: int) -> None:
    """Rows of very different lengths, which begin together and end in different pieces; and then token by token."""
    one, rows, written = model(name), texts(LONGEST, 9, 34, 3), texts(*[2 * WINDOW + 3] * 4, seed=2)
    cache = one.cache(4, LONGEST + 2 * WINDOW + 4, behind)
    expected = [whole(one, [*row, *after]) for row, after in zip(rows, written, strict=True)]
    for start in range(0, LONGEST, size):
        ends = [min(start + size, len(row)) for row in rows]
        for found, logits, end in zip(read(one, cache, [row[start : start + size] for row in rows]), expected, ends, strict=True):
            if end > start:
                near(found, logits[start:end])
    for at in range(2 * WINDOW + 3):
        for found, logits, row in zip(read(one, cache, [[after[at]] for after in written]), expected, rows, strict=True):
            near(found, logits[len(row) + at : len(row) + at + 1])


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_grow_move_and_leave_see_their_own_tokens(seed: int) -> None:
    """Any order of what a batch does with its caches, among them caches of other sizes and beginnings of other rows."""
    one, draw = model(("mixed", "sinks", "all slide", "mixed")[seed]), random.Random(seed)
    cache, rows = one.cache(0, 90, draw.choice([0, 4])), list[list[int]]()

    def advance(given: Cache, of: list[list[int]], most: int) -> None:
        pieces = texts(*[draw.randint(1, most) for _ in of], seed=draw.randrange(1000))
        for row, piece, found in zip(of, pieces, read(one, given, pieces), strict=True):
            row += piece
            near(found, whole(one, row)[-len(piece) :])

    for _ in range(40):
        longest = max(map(len, rows), default=0)
        what = draw.choice(["join", "join", "token", "token", "piece", "remove", "keep", "begin"])
        if what == "join":
            reading = one.cache(2, draw.choice([12, 40]), draw.choice([0, 4, 30]))
            new = [list[int](), list[int]()]
            for _ in range(draw.randint(1, 3)):
                advance(reading, new, 4 if reading.capacity == 12 else 13)
            for number in (1, 0):
                cache.add(reading, number)
                rows.append(list(new[number]))
        elif not rows:
            continue
        elif what == "begin":
            row = draw.randrange(len(rows))
            pieces, needed = _pieces(cache, row, size := draw.choice([1, 3, 4])), -(-(WINDOW - 1) // size)
            while any(piece.sliding is None for piece in pieces[-needed:]):
                pieces.pop()
            begun = one.cache(1, 90, draw.choice([0, 7]))
            begun.write(0, pieces)
            shared = [rows[row][: len(pieces) * size]]
            advance(begun, shared, 5)
            cache.add(begun, 0)
            rows += shared
        elif what == "remove":
            row = draw.randrange(len(rows))
            cache.remove(row)
            rows[row] = rows[-1]
            rows.pop()
        elif what == "keep":
            kept = draw.sample(range(len(rows)), draw.randint(1, len(rows)))
            cache.keep(kept)
            rows = [rows[row] for row in kept]
        elif longest < 75:
            advance(cache, rows, 1 if what == "token" else 15)
    assert [len(row) for row in rows] == cache.lengths


def _pieces(cache: Cache, row: int, size: int) -> list[Piece]:
    return [cache.read(row, start, start + size) for start in range(0, cache.lengths[row] - size + 1, size)]


def test_caches_that_are_one_batch() -> None:
    one, rows = model(), texts(4, 40, 7)
    parts = [one.cache(1, 8), one.cache(2, 64)]
    read(one, parts[0], rows[:1])
    read(one, parts[1], rows[1:])
    cache = JoinedCache(parts)
    for at in range(3):
        with torch.no_grad():
            found = one(torch.tensor([[at], [at + 1], [at + 2]]), cache=cache)
        cache.finish(1)
        for row, (text, logits) in enumerate(zip(rows, found, strict=True)):
            text.append(at + row)
            near(logits, whole(one, text)[-1:])


def test_layers_with_a_window_hold_no_more_than_it() -> None:
    """And a plan says how much that is."""
    for name, full in (("mixed", 1), ("all slide", 0), ("sinks", 1)):
        config = CONFIGS[name]
        window, token = int(config.sliding_window or 0), 4 * 2 * (config.num_key_value_heads or 0) * (config.head_dim or 0)
        sizes = {capacity: Cache(config, 3, capacity, torch.device("cpu"), torch.float32).bytes for capacity in (4, window, 64, 128)}
        for capacity, size in sizes.items():
            assert size == 3 * kv_cache_bytes(config, capacity, 4)
        sliding = (config.num_hidden_layers or 0) - full
        assert sizes[64] == 3 * token * (64 * full + window * sliding)
        assert sizes[128] - sizes[64] == 3 * token * 64 * full
    more = Cache(CONFIGS["mixed"], 3, 64, torch.device("cpu"), torch.float32, behind=5)
    assert more.bytes == 3 * 4 * 2 * 2 * 8 * (64 + 2 * (WINDOW + 5))


@pytest.mark.parametrize("behind", [0, 5])
def test_the_latest_tokens_of_a_row_can_be_read(behind: int) -> None:
    one, (text,) = model(), texts(LONGEST)
    cache, everything = one.cache(1, LONGEST + 3, behind), one.cache(1, LONGEST + 3, LONGEST)
    for end in (4, WINDOW + 3, 30, 31, 32, LONGEST):
        for held in (cache, everything):
            read(one, held, [text[held.lengths[0] : end]])
        assert everything.first_held(0) == 0
        first = cache.first_held(0)
        assert first == max(0, end - WINDOW - behind + 1), "the next token sees one token less than the window"
        for start in range(end):
            found, expected = cache.read(0, start, end), everything.read(0, start, end)
            assert expected.sliding is not None
            torch.testing.assert_close(found.full, expected.full)
            assert (found.sliding is None) == (start < first)
            if found.sliding is not None:
                torch.testing.assert_close(found.sliding, expected.sliding)


def test_a_row_goes_on_where_its_window_is_known_and_nowhere_else() -> None:
    one, (text,) = model(), texts(40)
    source = one.cache(1, 40, behind=3)
    read(one, source, [text[:32]])
    pieces = _pieces(source, 0, 4)
    assert [piece.sliding is None for piece in pieces] == [True] * 6 + [False] * 2
    for count in (1, 7):
        with pytest.raises(AssertionError, match="all that the next token sees is there"):
            one.cache(1, 40).write(0, pieces[:count])
    cache = one.cache(1, 40, behind=20)
    cache.write(0, pieces)
    assert (cache.lengths, cache.first_held(0)) == ([32], 24), "what it was not given it does not hold, whatever there is room for"
    (found,) = read(one, cache, [text[32:]])
    near(found, whole(one, text)[32:])
    copied = one.cache(0, 64, behind=30)
    copied.add(cache, 0)
    assert copied.first_held(0) == 24


def test_no_other_token_of_a_piece_takes_the_slot_of_one_that_is_held() -> None:
    """A GPU writes in any order."""
    cache = model().cache(3, 60)
    for counts in ([20, 3, 6], [20, 1, 20]):
        cache.expect(counts)
        positions = cache.begin(20)
        for row, count, slots in zip(range(3), counts, cache._sliding._slots_BT.tolist(), strict=True):
            for token in range(max(0, count - WINDOW + 1), count):
                assert slots[token] == int(positions[row, token]) % WINDOW and slots.count(slots[token]) == 1
        cache.finish(counts)


def test_padding_that_was_not_announced_is_refused() -> None:
    """It could have taken the place of tokens that a window shows."""
    one = model()
    cache = one.cache(2, 40)
    with torch.no_grad():
        one(torch.zeros(2, 9, dtype=torch.long), cache=cache)
        with pytest.raises(AssertionError, match="states and windows hold all tokens that were expected"):
            cache.finish([9, 4])
        short = one.cache(2, WINDOW)  # in which no token takes the place of another
        one(torch.zeros(2, 5, dtype=torch.long), cache=short)
        short.finish([5, 4])
