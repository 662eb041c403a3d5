"""Trains a tokenizer, or adopts a given one, and writes it so that `transformers` loads it; compares tokenizers by training them.

Several vocabulary sizes need one training: the merges of a small vocabulary are the first merges of a large one. Drift is the effect of new
sources on the tokenizer's fertility on the others, measured by training without and with them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json, write_text
from lmworks.recipe.gguf_model import tokenizer_file
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import special, tokenizer_json
from lmworks.tokenizer import tokenizer_json as spec_
from lmworks.tokenizer.chat import shipped_template
from lmworks.tokenizer.evaluate import draw_sample, evaluate, shares, source_weights, text_bytes
from lmworks.tokenizer.foreign import ForeignTokenizer
from lmworks.tokenizer.merges import GAP, WordCounts, count_words, learn_merges, to_symbols
from lmworks.tokenizer.named import TEMPLATE
from lmworks.tokenizer.opening import keep, kept_json, load
from lmworks.tokenizer.tokenizer_json import add_specials, complete_specials, truncated
from lmworks.ui.terminal import bar

if TYPE_CHECKING:
    from rich.table import Table


_LONGEST_TOKEN = 48  # bytes; without a limit, rules of dashes and indentation fill the vocabulary
_RARE = 2000  # SentencePiece's character coverage of 0.9995: the rarest characters, 1 in 2,000 of the text, are encoded as bytes


def train(
    recipe: Recipe, corpus_dir: Path, out_dir: Path, leave_out: Collection[str] = (), trained: str | None = None
) -> dict[str, Any]:
    """Make the tokenizer of `recipe` from `corpus_dir`/train, without the outputs `leave_out`, and write it into `out_dir`.

    Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and report.json (returned), the last with an evaluation on
    `corpus_dir`/validation. The vocabulary has exactly `recipe.tokenizer.vocab_size` entries. If the corpus is too small for that many
    merges, the rest are reserved tokens, and the report has their number. Equal input gives an equal file.

    `trained` is the hash of the tokenizer.json that weights were trained with, empty if it is unknown. Such a file is never replaced; only
    the files beside it are written again. If it is lost, the result must have the same hash; otherwise a UserError is raised.
    """
    corpus_dir, out_dir = Path(corpus_dir), Path(out_dir)
    started = time.monotonic()
    if recipe.tokenizer.as_is:
        return _keep(recipe, corpus_dir, out_dir, trained)
    path = out_dir / "tokenizer.json"
    if trained is not None and path.is_file():
        spec, report = read_json(path), read_json(out_dir / "report.json") if (out_dir / "report.json").exists() else {"origin": "kept"}
    else:
        spec, report = _adopt(recipe) if recipe.tokenizer.path else _learn(recipe, corpus_dir, leave_out)
        tokenizer_json.check_same_ids(tokenizer_json.read_bpe(spec, report["origin"]), report["origin"])
        text = json.dumps(spec, ensure_ascii=False, indent=1) + "\n"
        if trained and hashlib.sha256(text.encode()).hexdigest() != trained:
            raise UserError(
                f"{path} is lost, and the tokenizer trained on {corpus_dir} now is not the one of the weights of this run; "
                "restore that file (an export of the run has it too), or choose another run_dir"
            )
        write_text(path, text)
    write_text(out_dir / "chat_template.jinja", shipped_template(recipe.tokenizer.chat_template))
    write_json(out_dir / "tokenizer_config.json", _config(recipe, spec))
    report["seconds"] = round(time.monotonic() - started, 2)
    tokenizer = load(out_dir)
    _check_round_trip(tokenizer.encode, tokenizer.decode, report["origin"])
    report["evaluation"] = evaluate({"this": tokenizer}, corpus_dir / "validation", threads=recipe.threads)
    write_json(out_dir / "report.json", report)
    return report


def check(recipe: Recipe) -> None:
    """Raise `UserError` if a vocabulary of this size cannot be learned, whatever the text."""
    options = recipe.tokenizer
    least = options.num_special_tokens + (256 if options.kind == "bytes" else 320)
    if not options.path and options.vocab_size < least:
        raise UserError(f"tokenizer.vocab_size {options.vocab_size} leaves no room for the bytes, an alphabet and "
                        f"{options.num_special_tokens} special tokens; set it to at least {least}")


def _keep(recipe: Recipe, corpus_dir: Path, out_dir: Path, trained: str | None) -> dict[str, Any]:
    started, path = time.monotonic(), out_dir / "tokenizer.json"
    if trained and not path.is_file() and recipe.tokenizer.path and hashlib.sha256(kept_json(recipe)).hexdigest() != trained:
        raise UserError(f"{path} is lost, and {recipe.tokenizer.path} is not the tokenizer that the weights of this run were trained with")
    frozen = trained is not None and path.is_file()
    tokenizer, report = (load(out_dir), read_json(out_dir / "report.json")) if frozen else keep(recipe, out_dir)
    if not isinstance(tokenizer, ForeignTokenizer):  # ours, perhaps as tokenizer.json alone
        if not (out_dir / TEMPLATE).exists():
            write_text(out_dir / TEMPLATE, shipped_template(recipe.tokenizer.chat_template))
        if not (out_dir / "tokenizer_config.json").exists():
            write_json(out_dir / "tokenizer_config.json", _config(recipe, read_json(path)))
    report["seconds"] = round(time.monotonic() - started, 2)
    report["evaluation"] = evaluate({"this": tokenizer}, corpus_dir / "validation", threads=recipe.threads)
    write_json(out_dir / "report.json", report)
    return report


def _learn(recipe: Recipe, corpus_dir: Path, leave_out: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    check(recipe)
    options = recipe.tokenizer
    names = special.names(options.num_special_tokens)
    weights = source_weights(recipe, corpus_dir, leave_out)
    wanted = shares(corpus_dir, weights, options.language_balance, recipe.seed)
    sources, languages = Counter[str](), Counter[str]()
    with bar("tokenizer: counting", total=min(options.sample_bytes, text_bytes(corpus_dir, weights))) as progress:

        def texts() -> Iterator[str]:
            for source, language, text in draw_sample(corpus_dir, wanted, options.sample_bytes, recipe.seed):
                size = len(text.encode())
                sources[source] += size
                languages[language] += size
                progress.advance(size)
                yield text

        words = count_words(texts(), special.SPLIT if options.kind == "bytes" else special.SPLIT_DIGITS, options.max_words)
    if not words.counts:
        raise UserError(f"{corpus_dir / 'train'} holds no text to train a tokenizer on")
    spec = (_byte_level if options.kind == "bytes" else _sentencepiece)(words, options.vocab_size - len(names))
    merges = len(spec["model"]["merges"])
    added = add_specials(spec, names, options.vocab_size)
    return spec, {"origin": "trained", "kind": options.kind, "vocab_size": options.vocab_size, "merges": merges,
                  "special_tokens": len(added), "reserved_for_lack_of_text": len(added) - len(names),
                  "sample_bytes": dict(sorted(sources.items())), "language_bytes": dict(sorted(languages.items())),
                  "weights": weights, "distinct_words": len(words.counts), "words": words.occurrences, "words_forgotten": words.lost,
                  "seed": recipe.seed}


def _byte_level(words: WordCounts, ordinary: int) -> dict[str, Any]:
    table = np.zeros(256, dtype=np.int32)
    for number, stand_in in enumerate(sorted(tokenizer_json.BYTE_OF)):
        table[tokenizer_json.BYTE_OF[stand_in]] = number
    return spec_.byte_level_spec(_merges(words, table, "utf-8", [1] * 256, ordinary - 256))


def _sentencepiece(words: WordCounts, ordinary: int) -> dict[str, Any]:
    """The alphabet holds the most frequent characters, which cover all but one in `_RARE` of the text, in at most half of the entries."""
    seen: Counter[str] = Counter()
    for word, number in words.counts.items():
        for char in word:
            seen[char] += number
    covered = 0
    alphabet: list[str] = []
    for char, number in sorted(seen.items(), key=lambda item: (-item[1], item[0])):
        if covered * _RARE >= seen.total() * (_RARE - 1) or len(alphabet) >= (ordinary - 256) // 2:
            break
        alphabet.append(char)
        covered += number
    table = np.full(0x110000, GAP, dtype=np.int32)
    table[[ord(char) for char in alphabet]] = np.arange(256, 256 + len(alphabet))
    lengths = [1] * 256 + [len(char.encode()) for char in alphabet]
    return spec_.sentencepiece_spec("".join(alphabet), _merges(words, table, "utf-32-le", lengths, ordinary - len(lengths)))


def _merges(words: WordCounts, table: np.ndarray, encoding: str, lengths: list[int], most: int) -> list[tuple[int, int]]:
    texts = list(words.counts)
    symbols, owner = to_symbols(texts, table, encoding)
    counts = np.array([words.counts[text] for text in texts], dtype=np.int64)
    with bar("tokenizer: merging", total=most) as progress:
        return learn_merges(symbols, owner, counts, lengths, most, _LONGEST_TOKEN, progress.advance)


def _adopt(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    assert recipe.tokenizer.path
    path = tokenizer_file(Path(recipe.tokenizer.path).expanduser())
    spec = read_json(path)
    composes = spec.get("normalizer") == {"type": "NFC"}
    if composes:
        spec["normalizer"] = None  # composed text has the same ids; decomposed text is decoded exactly
    given = tokenizer_json.read_bpe(spec, str(path))
    renamed = complete_specials(spec)
    missing = [name for name in special.REQUIRED if name not in given.added and name not in renamed.values()]
    size, needed = recipe.tokenizer.vocab_size, given.vocab_size + len(missing)
    if needed > size:
        raise UserError(
            f"{path} has {given.vocab_size} entries{f' and lacks {len(missing)} special tokens' if missing else ''} but "
            f"tokenizer.vocab_size is {size}; set it to {needed} or more"
        )
    if spec.get("post_processor") and spec["post_processor"].get("type") != "ByteLevel":
        spec["post_processor"] = None  # it would add special tokens to every text; here the caller adds them
    spec["truncation"] = spec["padding"] = None
    add_specials(spec, missing, size)
    return spec, {
        "origin": str(path), "vocab_size": size, "merges": len(given.merges), "special_tokens_renamed": renamed,
        "special_tokens_added": missing, "normalizer_left_out": "NFC" if composes else None, "reserved_to_fill": size - needed,
    }


def _config(recipe: Recipe, spec: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json as `transformers` and the serving engines read it. The maximum length is part of the model's config."""
    entries = {str(token["id"]): {key: token[key] for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
               for token in spec["added_tokens"]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special.END,
        "pad_token": special.END,
        "additional_special_tokens": [token["content"] for token in spec["added_tokens"]
                                      if token["special"] and token["content"] != special.END],
        "added_tokens_decoder": entries,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": shipped_template(recipe.tokenizer.chat_template),
    }


# Examples of text that tokenizers lose: spaces at the ends, other scripts, joined emoji, control characters, digits.
_PROBE = "  Hello,\tworld! \r\n\n  don't 12345 naïve 你好，世界 日本語 привет 👩‍👩‍👧 \u0000\u200b\ufeff e\u0301 x = {'a': [1, 2]}  \n "


def _check_round_trip(encode: Any, decode: Any, where: str) -> None:
    if decode(encode(_PROBE)) != _PROBE:
        raise UserError(f"{where}: decoding does not restore the encoded text; this tokenizer is not lossless and cannot be used")


def evaluate_sizes(directory: Path, documents: Path, sizes: Sequence[int], weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Evaluate the tokenizer of `directory`, truncated to each of `sizes`, on the held-out text of `documents`, weighted by source.

    A row has `entries`, `tokens_per_byte`, `bytes_per_token` and `fertility`. Sizes outside the possible range are omitted; `UserError` if
    none is left. The tokenizer must be one that lmworks trained.
    """
    path = Path(directory) / "tokenizer.json"
    spec = read_json(path)
    merges, symbols = len(spec["model"]["merges"]), len(spec["model"]["vocab"]) - len(spec["model"]["merges"])
    named = [token for token in spec["added_tokens"] if not token["content"].startswith("<|reserved_")]
    spec = spec | {"added_tokens": named}  # reserved tokens that fill up a vocabulary are not part of a smaller one
    smallest, largest = symbols + len(named), symbols + merges + len(named)
    fitting = sorted({size for size in sizes if smallest <= size <= largest})
    if not fitting:
        raise UserError(f"{path} can be cut to {smallest} to {largest} entries; none of the requested sizes is in this range")
    rows = []
    for size in fitting:
        with tempfile.TemporaryDirectory() as folder:
            cut = json.dumps(truncated(spec, size), ensure_ascii=False)
            (Path(folder) / "tokenizer.json").write_text(cut, encoding="utf-8")
            rows.append({"entries": size, **_mean(evaluate({"cut": load(Path(folder))}, documents), weights)})
    return rows


def _mean(measured: list[dict[str, Any]], weights: Mapping[str, float]) -> dict[str, float]:
    """The mean over the mixture: each source counts by its weight, not by the size of its held-out text."""
    held: dict[str, int] = {}
    for row in measured:
        held[row["source"]] = held.get(row["source"], 0) + row["bytes"]
    share = {source: weights.get(source, 0.0) / size for source, size in held.items() if size}
    total = sum(share[source] * size for source, size in held.items() if size)
    if not total:
        raise UserError("no source of the mixture has held-out text to measure on; raise corpus.validation_fraction")
    tokens = sum(share[row["source"]] * row["tokens"] for row in measured if row["bytes"]) / total
    words = sum(share[row["source"]] * row["tokens"] / row["fertility"] for row in measured if row["fertility"]) / total
    return {"tokens_per_byte": tokens, "bytes_per_token": 1 / tokens, "fertility": tokens / words if words else 0.0}


def drift(recipe: Recipe, corpus_dir: Path, added: Sequence[str]) -> list[dict[str, Any]]:
    """Train the tokenizer of `recipe` without the sources `added` and with them; compare both on each held-out source and language.

    A row has `source`, `domain`, `language`, `added` (whether it is one of those), `fertility_before`, `fertility_after` and `change`,
    the relative change of the fertility: above 0 the text needs more tokens than before.
    """
    options = recipe.tokenizer.model_copy(update={"path": None})
    recipe = recipe.model_copy(update={"tokenizer": options})
    measured = []
    for leave_out in (added, ()):
        with tempfile.TemporaryDirectory() as folder:
            measured.append(train(recipe, corpus_dir, Path(folder), leave_out)["evaluation"])
    return [
        {"source": before["source"], "domain": before["domain"], "language": before["language"], "added": before["source"] in added,
         "fertility_before": before["fertility"], "fertility_after": after["fertility"],
         "change": after["fertility"] / before["fertility"] - 1 if before["fertility"] else 0.0}
        for before, after in zip(*measured, strict=True)
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `drift` for the terminal."""
    from rich.table import Table

    shown = Table(title="Tokens per word before and after the new text", title_justify="left")
    for column in ("source", "domain", "language"):
        shown.add_column(column)
    for column in ("before", "after", "change"):
        shown.add_column(column, justify="right")
    for row in rows:
        name = f"{row['source']} (new)" if row["added"] else row["source"]
        shown.add_row(name, row["domain"], row["language"], f"{row['fertility_before']:.3f}", f"{row['fertility_after']:.3f}",
                      f"{100 * row['change']:+.1f}%")
    return shown
