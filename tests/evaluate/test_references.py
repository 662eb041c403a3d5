from __future__ import annotations

import argparse
import ast
import inspect
import math
import random
import shutil
import subprocess
import tarfile
import typing
import zipfile
from pathlib import Path

import numpy as np
import pytest

from lmworks.evaluate.bits_per_byte import byte_counts, missing, ppm_bits, references, unigram_bits, xz_bits

PROSE = ("We hold these truths to be self-evident, that all men are created equal. " * 3
         + "".join(random.Random(5).choices("etaoin shrdlu cmfwyp,.\n", k=20_000)))  # fmt: skip


def test_unigram_of_an_untrained_model_is_eight_bits() -> None:
    assert unigram_bits(np.zeros(256, np.int64), b"any bytes") == pytest.approx(8 * 9)


def test_unigram_by_hand() -> None:
    counts = byte_counts(["aab", "a"])
    assert counts[ord("a")] == 3
    # add-one: p(a) = 4 / 260, p(z) = 1 / 260
    assert unigram_bits(counts, b"aaz") == pytest.approx(-2 * math.log2(4 / 260) - math.log2(1 / 260))


def test_unigram_fitted_on_its_own_text_is_the_entropy() -> None:
    counts = byte_counts([PROSE]) * 1000  # so many that add-one does not matter
    frequency = byte_counts([PROSE])[byte_counts([PROSE]) > 0] / len(PROSE)
    assert unigram_bits(counts, PROSE.encode()) / len(PROSE) == pytest.approx(-(frequency * np.log2(frequency)).sum(), rel=1e-4)


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz program is not installed")
def test_xz_equals_the_program_within_its_container() -> None:
    # the source of some modules is long and repetitive enough for -9e to differ from -6
    data = b"".join(Path(module.__file__).read_bytes() for module in (argparse, ast, inspect, tarfile, typing, zipfile))
    packed = len(subprocess.run(["xz", "-9e", "--stdout"], input=data, check=True, capture_output=True).stdout)
    ours = xz_bits(data) / 8
    assert 0 < packed - ours <= 100  # stream header 12, block header 12 to 16, check 8, index and footer about 24 to 40, padding


@pytest.mark.skipif("PPMd" in missing(), reason="pyppmd is not installed")
def test_ppm_stream_decodes_to_the_text() -> None:
    import pyppmd

    data = PROSE.encode()
    sizes = []
    for order in (6, 8, 16):
        encoder = pyppmd.Ppmd8Encoder(order, 256 << 20)
        packed = encoder.encode(data) + encoder.flush()
        decoder = pyppmd.Ppmd8Decoder(order, 256 << 20)
        assert decoder.decode(packed, len(data)) == data  # what is counted is enough to get the text back
        sizes.append(8 * len(packed))
    assert ppm_bits(data) == min(sizes)


def test_table_has_every_domain_and_one_overall_stream() -> None:
    held_out = {"a": ["first text. " * 20, "second"], "b": ["first text. " * 20]}
    table = references(held_out, ["some training text"])
    for name, marks in table.items():
        assert set(marks) == {"a", "b", "overall"}, name
        assert all(0 < bits < 10 for bits in marks.values())
    joined = "".join(held_out["a"] + held_out["b"]).encode()
    assert table["xz -9e"]["overall"] == xz_bits(joined) / len(joined)
    # one stream over both remembers `a` when it codes `b`
    assert table["xz -9e"]["overall"] < table["xz -9e"]["b"]
