"""Train a byte-level BPE tokenizer, or take over a given one, and write it so that `transformers` loads it."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.files import read_json, write_json, write_text
from lmworks.progress import bar
from lmworks.recipe.recipe import Recipe
from lmworks.tokenizer import bpe, special
from lmworks.tokenizer.chat import default_template
from lmworks.tokenizer.evaluate import evaluate
from lmworks.tokenizer.sample import draw, source_weights
from lmworks.tokenizer.tokenizer import load

_LONGEST_TOKEN = 48  # bytes; without a limit, rules of dashes and indentation fill the vocabulary
_BATCH = 256  # documents handed over at a time


def train(recipe: Recipe, corpus_dir: Path, out_dir: Path) -> dict[str, Any]:
    """Make the tokenizer of `recipe` from `corpus_dir`/train and write it into `out_dir`.

    Writes tokenizer.json, tokenizer_config.json, chat_template.jinja and report.json (returned), the last with an evaluation on
    `corpus_dir`/validation. The vocabulary has exactly `recipe.tokenizer.vocab_size` entries; a corpus too small for that many
    merges leaves the rest as reserved tokens, and the report says how many. Equal input gives an equal file.
    """
    corpus_dir, out_dir = Path(corpus_dir), Path(out_dir)
    started = time.monotonic()
    spec, report = _adopt(recipe) if recipe.tokenizer.path else _learn(recipe, corpus_dir)
    bpe.check_same_ids(bpe.read(spec, report["origin"]), report["origin"])
    write_text(out_dir / "tokenizer.json", json.dumps(spec, ensure_ascii=False, indent=1) + "\n")
    write_text(out_dir / "chat_template.jinja", default_template())
    write_json(out_dir / "tokenizer_config.json", _config(recipe, spec))
    report["seconds"] = round(time.monotonic() - started, 2)
    tokenizer = load(out_dir)
    _check_round_trip(tokenizer.encode, tokenizer.decode, report["origin"])
    report["evaluation"] = evaluate({"this": tokenizer}, corpus_dir / "validation", threads=recipe.threads)
    write_json(out_dir / "report.json", report)
    return report


def _learn(recipe: Recipe, corpus_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import tokenizers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    options = recipe.tokenizer
    names = [*special.SPECIAL, *(special.reserved(n) for n in range(options.reserved_tokens))]
    ordinary = options.vocab_size - len(names)
    if ordinary < 256:
        raise UserError(f"tokenizer.vocab_size {options.vocab_size} leaves no room for 256 bytes and {len(names)} special tokens; "
                        f"set it to at least {256 + len(names)}")
    weights = source_weights(recipe, corpus_dir)
    used: Counter[str] = Counter()
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(special.SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=ordinary, min_frequency=2, show_progress=False, max_token_length=_LONGEST_TOKEN,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    with bar("tokenizer", total=options.sample_bytes) as progress:

        def batches() -> Any:
            batch: list[str] = []
            for source, text in draw(corpus_dir, weights, options.sample_bytes, recipe.seed):
                size = len(text.encode())
                used[source] += size
                progress.advance(size)
                batch.append(text)
                if len(batch) == _BATCH:
                    yield batch
                    batch = []
            yield batch
            progress.note("merging")

        learner.train_from_iterator(batches(), trainer)
    if not used.total():
        raise UserError(f"{corpus_dir / 'train'} holds no text to train a tokenizer on")
    spec = json.loads(learner.to_str())
    names = _add_specials(spec, names, options.vocab_size)
    return spec, {"origin": "trained", "vocab_size": options.vocab_size, "merges": len(spec["model"]["merges"]),
                  "special_tokens": len(names),
                  "reserved_for_lack_of_text": max(0, len(names) - len(special.SPECIAL) - options.reserved_tokens),
                  "sample_bytes": dict(sorted(used.items())), "weights": weights, "seed": recipe.seed, "tokenizers": tokenizers.__version__}


def _adopt(recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    assert recipe.tokenizer.path
    path = Path(recipe.tokenizer.path)
    path = path / "tokenizer.json" if path.is_dir() else path
    spec = read_json(path)
    given = bpe.read(spec, str(path))
    missing = [name for name in special.REQUIRED if name not in given.added]
    if missing:
        raise UserError(f"{path} lacks the special token {missing[0]} that chat and document ends need; add it or leave tokenizer.path out")
    size = recipe.tokenizer.vocab_size
    if given.vocab_size > size:
        raise UserError(f"{path} has {given.vocab_size} entries but tokenizer.vocab_size is {size}; set it to {given.vocab_size} or more")
    if spec.get("post_processor") and spec["post_processor"].get("type") != "ByteLevel":
        spec["post_processor"] = None  # it would put special tokens around every text; here the caller does
    spec["truncation"] = spec["padding"] = None
    _add_specials(spec, [], size)
    return spec, {"origin": str(path), "vocab_size": size, "merges": len(given.merges), "reserved_to_fill": size - given.vocab_size}


def _add_specials(spec: dict[str, Any], names: list[str], size: int) -> list[str]:
    """Put `names` and as many reserved tokens as reach `size` behind the ordinary ids, as in GLM-4.x. Returns all added now."""
    taken = {token["content"] for token in spec["added_tokens"]}
    start = max([*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]) + 1
    names, number = list(names), 0
    while start + len(names) < size:
        if (name := special.reserved(number)) not in {*taken, *names}:
            names.append(name)
        number += 1
    spec["added_tokens"] += [
        {"id": start + n, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": name not in special.MARKUP} for n, name in enumerate(names)]
    return names


def _config(recipe: Recipe, spec: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json as `transformers` and the serving engines read it."""
    lengths = [int(phase.sequence_length) for phase in recipe.train.phases]
    entries = {str(token["id"]): {key: token[key] for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}
               for token in spec["added_tokens"]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(recipe.model.max_length or max(lengths, default=131_072)),
        "eos_token": special.END,
        "pad_token": special.END,
        "additional_special_tokens": [token["content"] for token in spec["added_tokens"]
                                      if token["special"] and token["content"] != special.END],
        "added_tokens_decoder": entries,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": default_template(),
    }


# Every way a byte-level tokenizer can lose text has an example here: spaces at ends, other scripts, broken emoji, controls, digits.
_PROBE = "  Hello,\tworld! \r\n\n  don't 12345 naïve 你好，世界 日本語 привет 👩‍👩‍👧 \u0000\u200b\ufeff e\u0301 x = {'a': [1, 2]}  \n "


def _check_round_trip(encode: Any, decode: Any, where: str) -> None:
    if decode(encode(_PROBE)) != _PROBE:
        raise UserError(f"{where}: text does not come back from its ids; this tokenizer loses something and cannot be used")
