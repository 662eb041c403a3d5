"""Values that follow from others, each with the formula and the reason.

There are two steps: `derive_from_size` fills an incomplete tree from `size` alone, before it is checked; `derive_missing` completes a typed
recipe, so that a resolved recipe has no None where a value is derived.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from math import gcd
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.recipe import scaling_laws
from lmworks.recipe.gguf_model import tokenizer_file
from lmworks.recipe.keys import Keys, get, put
from lmworks.recipe.parameters import count_active_parameters, count_parameters
from lmworks.recipe.schema.model import Model, Moe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.schema.units import Seconds, Tokens
from lmworks.recipe.tokenizer_files import instead_of

Reasons = dict[Keys, str]
_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
_FORWARD_TOKENS = 8192
_EVALUATION_SHARE = 0.05  # of the cost of training, for evaluations in the loop
_EVALUATIONS = (10, 5, 4, 2)  # in a run
_EPOCHS = 2  # of tuning on files
_CONTEXT: Keys = ("model", "max_position_embeddings")
_TOKENS_PER_ITEM = 400  # with all choices: the sets have 40 to 350 on average at 4 bytes per token (docs/evaluation.md)


def derive_from_size(tree: dict[str, Any], free: bool) -> Reasons:
    """Derive shape, budget, batch and context from `tree["size"]`, in place; returns why, by key.

    `free` is for a size given on the command line: shape, budgets, batches and rates of the file give way, and the
    budgets of its phases keep their proportions. Otherwise only what the file leaves out is filled in.
    """
    reasons: Reasons = {}

    def derive(keys: Keys, value: Any, why: str) -> None:
        if free or get(tree, keys) is None:
            put(tree, keys, value)
            reasons[keys] = why

    size, called = _size(tree)
    model = tree.setdefault("model", {})
    if model.get("mla"):
        raise UserError(
            "size derives no shape with model.mla; leave size out and write model.hidden_size, model.num_hidden_layers and "
            "model.num_attention_heads"
        )
    moe = model.get("moe")
    vocab = model.get("vocab_size") or vocabulary(tree)[0]
    sketch = Model(
        vocab_size=vocab,
        tie_word_embeddings=bool(model.get("tie_word_embeddings")),
        moe=Moe.model_validate({"moe_intermediate_size": 1, **moe}) if moe else None,
    )
    shape = scaling_laws.shape(size, sketch)
    expert_size = shape.pop("moe_intermediate_size", None)
    for key, value in shape.items():
        derive(
            ("model", key), value, f"nearest to size {called} at a hidden size of {scaling_laws.aspect(shape['hidden_size']):.0f} per layer"
        )
    if moe:
        derive(
            ("model", "moe", "moe_intermediate_size"),
            expert_size,
            "intermediate_size / (num_experts_per_tok + n_shared_experts), so that a token uses as much as in a dense layer",
        )
    built = Model.model_validate({**sketch.model_dump(), **{k: model[k] for k in shape}, "moe": model.get("moe") or None})
    active, total = count_active_parameters(built), count_parameters(built)

    train = tree.setdefault("train", {})
    listed = (tree.get("corpus") or {}).get("sources") or []
    sources = [str(source["name"]) for source in listed if isinstance(source, dict) and "name" in source]
    if not train.get("phases"):
        if not sources:
            raise UserError("a run from size alone needs corpus.sources to draw from; list at least one source")
        train["phases"] = [{"name": "general"}]
        reasons["train", "phases", 0, "name"] = "one phase when none is written"
    budget = scaling_laws.TOKENS_PER_PARAMETER * active
    phases = train["phases"]
    written = [_tokens(phase.get("tokens")) for phase in phases]
    known = sum(filter(None, written))
    missing = written.count(None)
    for index, phase in enumerate(phases):
        at: Keys = ("train", "phases", index)
        share = (written[index] or 0) / known if free and known and not missing else 1 / (missing or len(phases))
        goal = round(budget * share) if free or not known else max(0, budget - known) // (missing or 1)
        if phase.get("sequence_length") is None:
            derive(
                (*at, "sequence_length"),
                f"{scaling_laws.sequence_length(total)} tokens",
                f"context to begin with at {total / 1e6:.0f}M parameters",
            )
        length = _tokens(phase["sequence_length"]) or 1
        law = "0.58 tokens^0.571 as a power of two of sequences (arXiv:2503.04715)"
        derive((*at, "global_batch_tokens"), f"{scaling_laws.batch_tokens(max(budget, length), length)} tokens", law)
        batch = _tokens(phase["global_batch_tokens"]) or length
        why = f"{scaling_laws.TOKENS_PER_PARAMETER} tokens per active parameter ({active / 1e6:.1f}M), in whole steps (arXiv:2203.15556)"
        derive((*at, "tokens"), f"{max(1, round(goal / batch)) * batch} tokens", why)
        if phase.get("mixture") is None and sources:
            for name in sources:
                derive((*at, "mixture", name), 1 / len(sources), "equal weights when none are written")
        if free and phase.pop("batch_ramp", None):
            reasons[*at, "batch_ramp"] = "off: the batch follows from size"
    if free:
        for key in ("learning_rate", "adam_learning_rate"):
            (tree.get("optimizer") or {}).pop(key, None)
        for stage in ("tune", "dpo", "grpo"):
            (tree.get(stage) or {}).pop("learning_rate", None)
        train.pop("micro_batch_sequences", None)
    return reasons


def _size(tree: dict[str, Any]) -> tuple[int, str]:
    """The dial as a number of parameters, and what to call it."""
    if tree["size"] != "auto":
        return scaling_laws.parse_size(tree["size"]), str(tree["size"])
    if tree.get("time") is None:
        raise UserError("size: auto follows from the time that there is; add time: 10min, or write a size such as 125M")
    size = scaling_laws.optimal_size(Seconds._validate(tree["time"]), scaling_laws.NOMINAL_SPEED)
    return size, f"auto ({size / 1e6:.2g}M, for {scaling_laws.NOMINAL_SPEED / 1e9:.0f} GFLOP/s until the run has measured this machine)"


def _tokens(value: Any) -> int | None:
    try:
        return None if value is None else int(Tokens._validate(value))
    except ValueError:
        return None  # the type check after this one names it


def vocabulary(tree: dict[str, Any]) -> tuple[int, str]:
    """Size of the vocabulary of a raw tree, and how it is known: counted in an existing tokenizer, or as asked. Raises `UserError` for a
    tokenizer in another form."""
    tokenizer = tree.get("tokenizer") or {}
    if tokenizer.get("path"):
        given = Path(os.path.expanduser(str(tokenizer["path"])))
        path = tokenizer_file(given)
        if not os.path.isfile(path) and (said := instead_of(given)):
            raise UserError(f"tokenizer.path: {said}")
        if os.path.isfile(path):
            entries, wanted = count_entries(path) + len(tokenizer.get("add_tokens") or ()), tokenizer.get("vocab_size", 0)
            if not isinstance(wanted, int) or wanted <= entries:
                return entries, f"entries of {path}"
    size = tokenizer.get("vocab_size", 4096)
    return (size if isinstance(size, int) else 4096), "tokenizer.vocab_size"


def default_run_dir(name: str) -> str:
    """The run directory of a recipe that does not say one."""
    return f"runs/{name}"


def count_entries(path: Path) -> int:
    """The number of ids of a tokenizer.json. Raises `UserError` if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        pieces = content["model"]["vocab"]
        ordinary = range(len(pieces)) if isinstance(pieces, list) else pieces.values()
        ids = [*ordinary, *(token["id"] for token in content.get("added_tokens", []))]
        return int(max(ids)) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        said = instead_of(path) or f"{path} is not a tokenizer.json ({type(error).__name__}: {error})"
        raise UserError(f"tokenizer.path: {said}") from None


def derive_missing(
    recipe: Recipe, base: Path, corpus_only: bool = False, taken: Collection[Keys] = ()
) -> tuple[Recipe, Reasons]:  # fmt: skip
    """Complete a typed recipe. `base` is where its relative tokenizer path starts. Raises `UserError` where too little is given.

    With `corpus_only` a recipe without a model is complete when its corpus can be made. `taken` are the keys whose values are those of the
    weights that it starts from.
    """
    tree = recipe.model_dump()
    reasons: Reasons = {}

    def derive(keys: Keys, value: Any, why: str) -> Any:
        if get(tree, keys) is None:
            put(tree, keys, value)
            reasons[keys] = why
        return get(tree, keys)

    derive(("run_dir",), default_run_dir(recipe.name), "runs/ and the name")
    derive(("threads",), machine.threads(), "the CPU cores this process may use, or OMP_NUM_THREADS")

    if corpus_only and not (recipe.model.hidden_size and recipe.model.num_hidden_layers):
        return Recipe.model_validate(tree), reasons
    _fill_model(tree, derive)
    of_weights = int(recipe.model.max_position_embeddings or 0) if _CONTEXT in taken else 0
    context, why = _context(recipe, of_weights)
    if context > of_weights > 0:
        put(tree, _CONTEXT, None)  # the weights state less than they are trained on here
    derive(_CONTEXT, f"{context} tokens", why)
    model = Model.model_validate(tree["model"])
    hidden = scaling_laws.outside_embeddings(model)
    tokens = sum(phase.tokens for phase in recipe.train.phases) or scaling_laws.TOKENS_PER_PARAMETER * count_active_parameters(model)
    rate, law = scaling_laws.rate_from_random(hidden, tokens) if recipe.start_from is None else scaling_laws.rate_from_pretrained(hidden)
    muon = recipe.optimizer.kind == "muon"
    if muon and recipe.optimizer.update_scale == "spectral":
        derive(("optimizer", "learning_rate"), scaling_laws.SPECTRAL_RATE, "the usual rate of Muon with spectral scaling")
    else:
        why = "; Muon's updates are scaled to AdamW's size, so the rate carries over (arXiv:2502.16982)" if muon else ""
        derive(("optimizer", "learning_rate"), rate, law + why)
    derive(
        ("optimizer", "adam_learning_rate"),
        rate if muon else tree["optimizer"]["learning_rate"],
        law if muon else "optimizer.learning_rate",
    )
    for stage, section in recipe.later_stages.items():
        peak = tree["optimizer"][recipe.replaced_rate(section)]
        derive(
            (stage, "learning_rate"),
            *scaling_laws.rate_of_stage(stage, peak, section.lora is not None, recipe.start_from is not None, muon),
        )

    tune = recipe.tune
    if tune is not None and tune.tokens is None and all(data.kind in ("files", "huggingface") and data.weight == 1 for data in tune.data):
        derive(("tune", "epochs"), _EPOCHS, "whole passes over conversations of your own; published recipes make 1 to 4")

    for index, phase in enumerate(recipe.train.phases):
        if (ramp := phase.loss_ramp) is not None and ramp.losses is None:
            critical, exponent = ramp.critical_batch_tokens, ramp.critical_batch_exponent
            law = f"({critical:g} tokens / size)^{exponent:g}, where the critical batch is that size (arXiv:2001.08361, equation 1.4)"
            derive(("train", "phases", index, "batch_ramp", "losses"), tuple(ramp.loss_of(int(size)) for size in ramp.sizes), law)

    replicas = recipe.layout.data_ranks
    stages = recipe.micro_batch_stages
    most = max(1, _FORWARD_TOKENS // max((int(stage.sequence_length) for stage in stages), default=_FORWARD_TOKENS))
    batches = [stage.global_batch_tokens // stage.sequence_length for stage in stages if isinstance(stage, Phase | Tune)]
    per_rank = gcd(*(max(1, batch // replicas) for batch in batches)) or most  # the rows of other stages' steps vary
    micro = max(n for n in range(1, min(most, per_rank) + 1) if per_rank % n == 0)
    derive(("train", "micro_batch_sequences"), micro, f"the most sequences within {_FORWARD_TOKENS} tokens that divide every step")
    derive(("evaluate", "every"), *_evaluation_interval(recipe))
    return Recipe.model_validate(tree), reasons


def _evaluation_interval(recipe: Recipe) -> tuple[str, str]:
    """The shortest interval between evaluations in the loop that costs less than `_EVALUATION_SHARE` of training, and why.

    A forward pass costs a third of a training step per token.
    """
    sets, items, budget = len(recipe.evaluate.benchmarks), recipe.evaluate.every_items, sum(phase.tokens for phase in recipe.train.phases)
    if not sets or not budget:
        return "never", "no benchmark sets" if not sets else "no training budget"
    once = sets * items * _TOKENS_PER_ITEM / 3 / budget
    said = f"{sets} sets of {items} items cost {once:.1%} of training at most"
    for times in _EVALUATIONS:
        if times * once < _EVALUATION_SHARE:
            return f"{100 // times}%", f"{said} each time; all together less than {_EVALUATION_SHARE:.0%}"
    return "never", f"{said}, too much for this budget; set it, or reduce evaluate.every_items"


def _fill_model(tree: dict[str, Any], derive: Any) -> None:
    model = tree["model"]
    vocab, how = vocabulary(tree)
    derive(("model", "vocab_size"), vocab, how)
    missing = [key for key in ("hidden_size", "num_hidden_layers") if not model[key]]
    if missing:
        raise UserError(
            f"the model has no {' and no '.join(missing)}; write size: 125M, model.preset: NAME, or model.hidden_size and "
            f"model.num_hidden_layers"
        )
    hidden = model["hidden_size"]
    if model["mla"]:
        mla = model["mla"]
        derive(("model", "num_attention_heads"), max(1, hidden // mla["qk_nope_head_dim"]), "hidden_size / mla.qk_nope_head_dim")
        derive(("model", "num_key_value_heads"), model["num_attention_heads"], "every head has a key of its own out of the latent")
        derive(("model", "head_dim"), mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"], "mla.qk_nope_head_dim + mla.qk_rope_head_dim")
    if model["num_attention_heads"]:
        derive(("model", "head_dim"), max(1, hidden // model["num_attention_heads"]), "hidden_size / num_attention_heads")
    else:
        derive(("model", "head_dim"), scaling_laws.head_dim(hidden), "128 from a hidden size of 2048, 64 below")
    derive(("model", "num_attention_heads"), max(1, hidden // model["head_dim"]), "hidden_size / head_dim")
    derive(
        ("model", "num_key_value_heads"),
        scaling_laws.kv_heads(model["num_attention_heads"]),
        "the divisor of heads nearest to a quarter of them (GQA)",
    )
    derive(("model", "intermediate_size"), scaling_laws.ffn_size(hidden), "8/3 of hidden_size, a multiple of 64")


def _context(recipe: Recipe, of_weights: int) -> tuple[int, str]:
    """The context length that the trained model states, and why: that of the weights that training starts from (0: there are none), unless
    the recipe trains longer sequences or a phase extends RoPE further."""
    parts = [*recipe.train.phases, *recipe.later_stages.values()]
    names = [*(phase.name for phase in recipe.train.phases), *recipe.later_stages]
    found = [(of_weights, "of the weights of start_from")] if of_weights else []
    found += [(int(part.sequence_length), f"sequence_length of {name}, the longest") for name, part in zip(names, parts, strict=True)]
    rope, changes = recipe.model.rope.model_dump(), [phase.rope.model_dump() for phase in recipe.train.phases if phase.rope]
    for change in changes:
        rope |= {key: value for key, value in change.items() if value is not None}
    # Of weights whose positions no phase changes, it stays as they state it, which may be less than their scaling reaches.
    if rope["scaling"] != "none" and rope["original_max_position_embeddings"] and (changes or not of_weights):
        reach = int(Tokens.parse(rope["original_max_position_embeddings"]) * rope["factor"])
        found.append((reach, "rope.original_max_position_embeddings * rope.factor at the end"))
    return max(found, key=lambda one: one[0], default=(2048, "nothing is trained"))
