"""The recipe as text: the keys that matter for these files, each choice with its reason as a comment; and a file that replaces no other."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import yaml

from lmworks.errors import UserError
from lmworks.init.budgets import Budgets, continue_budget, dpo_budget, grpo_budget, tune_budget
from lmworks.init.meaning import Found
from lmworks.io.masking import mask
from lmworks.plan.layout import devices
from lmworks.recipe.load import Resolved, load_recipe_text
from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW
from lmworks.ui.amounts import amount
from lmworks.ui.amounts import size as size_text

_LORA = "lora: {rank: 16, alpha: 32, targets: [all-linear]}"
LICENSE = "not stated"
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off"}


def scalar(text: str) -> str:
    """A text as YAML on one line, inside a map in braces too: in quotes unless it is a plain word or path."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1 << 30).removesuffix("\n")


def one_line(text: str) -> str:
    """Text of a comment: one line of printable characters, without credentials."""
    return mask(
        "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text.encode("utf-8", "backslashreplace").decode())
    )


def shell(path: str) -> str:
    """A path as an argument of a command."""
    return shlex.quote(path if not path.startswith("-") else f"./{path}")


def recipe_text(
    name: str, folder: str, found: Sequence[Found], budgets: Budgets, start: str | None, start_note: str, notes: Sequence[str], output: str
) -> str:
    """The whole recipe."""
    by_use: dict[str, list[Found]] = {}
    for one in found:
        by_use.setdefault(one.use, []).append(one)
    used = {"pretrain": by_use.get("documents", []), "tune": by_use.get("conversations", []), "grpo": by_use.get("rewards", [])}
    used["dpo"] = by_use.get("preferences") or by_use.get("labels", [])
    lines = [
        *_comment(f"Written by lmworks init for the files in {folder}. See every value: lmworks show {shell(output)} --changed; what "
                  f"it will take: lmworks plan {shell(output)}; run it: lmworks run {shell(output)}. Paths start at the folder in which "
                  "you run these."),
        *(line for note in notes for line in _comment(note)),
        f"name: {scalar(name)}",
    ]  # fmt: skip
    if start is not None:
        lines += ["", *_comment(start_note), f"start_from: {scalar(start)}"]
    elif budgets.size:
        lines += [
            *_comment("The whole run may take this long: its speed is measured before the first step, and tokens are scaled to it."),
            f"time: {_time(budgets.seconds)}", *_comment(budgets.size_why), f"size: {budgets.size}",
        ]  # fmt: skip
    if devices(budgets.cluster) > 1:
        lines += ["layout: auto  # chosen when the number of devices is known"]
    if "pretrain" in budgets.stages:
        lines += ["", *_corpus(used["pretrain"], budgets, start is not None), *_pretraining(used["pretrain"], budgets, start is not None)]
    for stage in ("tune", "dpo", "grpo"):
        if stage in budgets.stages:
            lines += ["", *_SECTIONS[stage](used[stage], budgets, start is not None)]
    if find_spec("transformers") is None:
        lines += [
            "",
            "export: {huggingface: false}  # transformers, by which it is checked, is not installed: pip install 'lmworks[export]'",
        ]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str = "") -> list[str]:
    words, lines = one_line(text).split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 118 - len(indent):
            lines.append("")
        lines[-1] += f" {word}"
    return [f"{indent}#{line}" for line in lines] if text else []


def _about(one: Found) -> str:
    rows = "" if one.use == "documents" and one.kind not in ("jsonl", "parquet", "huggingface") else f", about {one.rows:,} rows"
    size = f", {size_text(one.text_bytes)} of text" if one.text_bytes else ""
    return ". ".join(filter(None, (f"{one.files:,} {'files' if one.files > 1 else 'file'}{rows}{size}", one.why, *one.notes))) + "."


def _time(seconds: float) -> str:
    return next((f"{seconds / unit:g}{name}" for unit, name in ((3600, "h"), (60, "min")) if seconds % unit == 0), f"{seconds:g}s")


def _corpus(sources: Sequence[Found], budgets: Budgets, continued: bool) -> list[str]:
    wanted = continue_budget(budgets)[0] if continued else budgets.tokens
    lines = ["corpus:"]
    if (count := sum(one.rows for one in sources)) < 100:
        lines += [f"  validation_fraction: {max(0.02, min(0.3, 2 / max(1, count))):.2g}  # about {count} documents: hold out two or so"]
    lines += ["  sources:"]
    for one in sorted(sources, key=lambda one: one.kind == "code"):  # which reads .md and .tex too: of two copies the first is kept
        lines += _comment(_about(one), "    ")
        path = one.path if not one.path.startswith("~") else f"./{one.path}"
        lines += [f"    - name: {scalar(one.name)}", f"      kind: {one.kind}", f"      path: {scalar(path)}"]
        if one.about and one.about != "text":
            lines += [f"      text_key: {scalar(one.about)}"]
            lines += [f"      markup: {{{scalar(one.about)}: html}}"] if one.about == "html" else []
        for key in ("document_format", "rules"):
            lines += [f"      {key}: {value}"] if (value := getattr(one, key)) else []
        lines += [f"      domain: {one.domain}", f"      language: {one.language}"]
        lines += [f"      license: {LICENSE}  # write that of your text: the model card shows it"]
        most = 2 * wanted * budgets.bytes_per_token * one.text_bytes / max(1, sum(other.text_bytes for other in sources))
        if one.text_bytes > 2 * most:
            lines += [f"      max_bytes: {max(1, round(most / 1e6))}MB  # twice what is trained on, drawn evenly from all of it"]
    return lines


def _pretraining(sources: Sequence[Found], budgets: Budgets, continued: bool) -> list[str]:
    total = sum(one.text_bytes for one in sources)
    weights = [max(0.001, round(one.text_bytes / max(1, total), 3)) for one in sources]
    weights[weights.index(max(weights))] += round(1 - sum(weights), 3)
    mixture = ", ".join(f"{scalar(one.name)}: {weight:.3g}" for one, weight in zip(sources, weights, strict=True))
    if continued:
        tokens, length, batch = continue_budget(budgets)
        return [
            "", "train:", "  phases:",
            *_comment(f"{tokens / max(1, budgets.text_tokens):.2g} readings of {amount(budgets.text_tokens)} tokens, as the time allows. "
                      "If general abilities suffer, add general text to the sources and to the mixture.", "    "),
            "    - name: domain", f"      tokens: {tokens} tokens", f"      sequence_length: {length} tokens",
            f"      global_batch_tokens: {batch} tokens", f"      mixture: {{{mixture}}}  # by amount of text",
        ]  # fmt: skip
    return [
        "", *_comment(f"{'The tokenizer found in the folder' if budgets.tokenizer else 'Entries of the vocabulary for this size'}; on a "
                      f"sample {budgets.bytes_per_token:.1f} bytes are one token."),
        f"tokenizer: {{path: {scalar(budgets.tokenizer)}, as_is: true}}" if budgets.tokenizer else
        f"tokenizer: {{vocab_size: {budgets.vocab_size}}}",
        *(["model: {tie_word_embeddings: true}  # in a small model the embedding is much of it"] if budgets.base < 5e8 else []),
        f"shards: {{max_epochs: {budgets.readings:g}}}  # of a source; {EPOCHS_AS_NEW} are nearly as good as new text (arXiv:2305.16264)",
        "", "train:", "  phases:", "    - name: general",
        f"      tokens: {amount(budgets.tokens)} tokens", f"      mixture: {{{mixture}}}  # by amount of text",
    ]  # fmt: skip


def _sets(rows: Sequence[Found], extra: Iterable[str] = ()) -> list[str]:
    lines = ["  data:"]
    for one in rows:
        path = one.path if not one.path.startswith("~") else f"./{one.path}"
        lines += _comment(_about(one), "    ")
        lines += [f"    - {{{', '.join((f'name: {scalar(one.name)}', 'kind: files', f'path: {scalar(path)}', *extra))}}}"]
    return lines


def _method(budgets: Budgets) -> list[str]:
    return [*_comment(f"Low-rank adapters: {budgets.lora_why}.", "  "), f"  {_LORA}"] if budgets.lora else []


def _tune(rows: Sequence[Found], budgets: Budgets, pretrained: bool) -> list[str]:
    keys, why = tune_budget(budgets, list(rows), pretrained)
    return ["tune:", *_sets(rows), *_comment(f"{why}.", "  "),
            *(f"  {key}: {value}" for key, value in keys.items()), *_method(budgets)]  # fmt: skip


def _dpo(rows: Sequence[Found], budgets: Budgets, pretrained: bool) -> list[str]:
    keys, used, why = dpo_budget(budgets, list(rows))
    counts = [f"max_rows: {max(8, -(-used // len(rows)))}"] if used is not None else []
    labels = ["  loss: kto  # answers with a label"] if rows[0].use == "labels" else []
    return ["dpo:", *_sets(rows, counts), *labels, *_comment(why, "  "), *(f"  {key}: {value}" for key, value in keys.items()),
            *_method(budgets)]  # fmt: skip


def _grpo(rows: Sequence[Found], budgets: Budgets, pretrained: bool) -> list[str]:
    keys, why = grpo_budget(budgets, list(rows))
    lines = ["grpo:", "  data:"]
    for one in rows:
        lines += [line for line in _sets([one], [f"reward: {one.about}"]) if line != "  data:"]
    return [*lines, *_comment(why, "  "), *(f"  {key}: {value}" for key, value in keys.items()), *_method(budgets)]


_SECTIONS = {"tune": _tune, "dpo": _dpo, "grpo": _grpo}


def check(text: str) -> Resolved:
    """Load the recipe as `lmworks show` does. Raises `UserError`."""
    return load_recipe_text(text)


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet, whole or not at all. Raises `UserError` if there is anything of that name."""
    handle, aside = -1, ""
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644 & ~_umask())
        os.link(aside, path)  # unlike a rename it replaces nothing
    except FileExistsError:
        raise UserError(f"{path} exists, and init replaces nothing; give another name with --output") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if aside:
            os.unlink(aside)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
