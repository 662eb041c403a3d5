"""On paper: what a corpus of many tokens needs in machines, hours and disk, from speeds that were measured.

    python benchmarks/data_at_scale.py [--tokens 15e12] [--cores 4096]

Prints the table of docs/data-at-scale.md. Every assumption is an option with its default; the measured ones name their benchmark.
"""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=15e12, help="tokens wanted after everything")
    parser.add_argument("--bytes-per-token", type=float, default=4.2, help="of the finished vocabulary on mixed text (assumed)")
    parser.add_argument("--kept", type=float, default=0.25, help="share of the read text that is kept (assumed; web crawls 0.1 to 0.3)")
    parser.add_argument("--document", type=float, default=4000.0, help="bytes of text per document (assumed)")
    parser.add_argument("--read", type=float, default=1.74, help="MB per CPU-second: read, filter, sketch, write (benchmarks/corpus.py)")
    parser.add_argument("--encode", type=float, default=6.9, help="MB per CPU-second at 151,552 entries (benchmarks/tokenizer.py)")
    parser.add_argument("--keys", type=float, default=544.0, help="bytes on disk per document for deduplication (benchmarks/minhash.py)")
    parser.add_argument("--band", type=float, default=24.0, help="bytes of memory per document in one band's task (benchmarks/minhash.py)")
    parser.add_argument("--same", type=float, default=41.0, help="the same in the search for equal texts, the largest task of all")
    parser.add_argument("--sorting", type=float, default=0.7, help="CPU-seconds per million documents and band (benchmarks/minhash.py)")
    parser.add_argument("--snapshots", type=int, default=96, help="pieces of the corpus that are deduplicated each by itself")
    parser.add_argument("--cores", type=int, default=4096)
    given = parser.parse_args()
    text = given.tokens * given.bytes_per_token
    raw = text / given.kept
    documents = raw / given.document
    kept = documents * given.kept
    read, encode = raw / 1e6 / given.read, text / 1e6 / given.encode
    bands = documents / 1e6 * 32 * given.sorting
    piece = documents / given.snapshots

    def hours(seconds: float) -> str:
        return f"{seconds / 3600:,.0f} core-hours, {seconds / 3600 / given.cores:,.1f} hours on {given.cores:,} cores"

    def terabytes(size: float) -> str:
        return f"{size / 1e12:,.0f} TB"

    wanted = f"{given.tokens / 1e12:g}T tokens x {given.bytes_per_token} bytes"
    rows = [
        ("text wanted", wanted, f"{terabytes(text)}, {kept / 1e9:,.1f} billion documents"),
        ("text read", f"a share of {given.kept:g} is kept", f"{terabytes(raw)}, {documents / 1e9:,.0f} billion documents"),
        ("reading, steps, sketches, writing", f"{given.read} MB per CPU-second", hours(read)),
        ("near-duplicates", f"32 bands, {given.sorting} s per million documents each", hours(bands)),
        ("encoding and writing shards", f"{given.encode} MB per CPU-second", hours(encode)),
        ("disk: staged text, compressed about 0.4", "until the corpus is written", terabytes(0.4 * raw)),
        ("disk: keys and sketches", f"{given.keys:.0f} bytes per document", terabytes(given.keys * documents)),
        ("disk: corpus, compressed about 0.4", "", terabytes(0.4 * text)),
        ("disk: shards", "4 bytes per token, and as much again while they are made", terabytes(4 * given.tokens)),
        ("memory of the largest task", f"{given.same:.0f} bytes per document of a piece", f"{given.same * piece / 1e9:,.0f} GB"),
        ("memory of a band", f"{given.band:.0f} bytes per document of a piece", f"{given.band * piece / 1e9:,.0f} GB"),
    ]  # fmt: skip
    print("| | from | |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
