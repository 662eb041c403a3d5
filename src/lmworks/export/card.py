"""Writes the model card: architecture, training data, evaluation, usage and limitations. It states only what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.io.files import read_json, write_text
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.model import Transformer
from lmworks.recipe.families.registry import class_for
from lmworks.recipe.parameters import count_active_parameters, count_parameters
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import PhaseSteps
from lmworks.watch.ledger import LEDGER, read_ledger
from lmworks.weights.chat import TAG, base_is_chat


def write_card(recipe: Recipe, model: Transformer, run_dir: Path, directory: Path, gguf: bool) -> None:
    """Write README.md beside the weights, from the recipe and the reports of the run that exist."""
    corpus = _optional(run_dir / "corpus" / "report.json")
    chat = bool(recipe.later_stages) or base_is_chat(run_dir, recipe)
    results = _optional(run_dir / "evaluate" / "results.json")
    parts = [_front_matter(corpus, chat), f"# {recipe.name}", _what(recipe, model), _ended_early(run_dir), _sources(corpus)]
    parts += [_scores(results), _use(recipe, chat, gguf), _limits(recipe)]
    write_text(directory / "README.md", "\n\n".join(part for part in parts if part) + "\n")


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _front_matter(corpus: dict[str, Any], chat: bool) -> str:
    languages = sorted({source["language"] for source in _used(corpus)} - {"code"})
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- lmworks"]
    lines += [f"- {TAG}"] if chat else []
    # a string in quotes: bare `no` (Norwegian) is false in YAML
    lines += ["language:", *(f"- {json.dumps(language)}" for language in languages)] if languages else []
    return "\n".join([*lines, "---"])


def _used(corpus: dict[str, Any]) -> list[dict[str, Any]]:
    return [source for source in corpus.get("sources", []) if source["train"]["documents"]]


def _what(recipe: Recipe, model: Transformer) -> str:
    config = model.config
    kind = "dense"
    if config.moe is not None:
        kind = (
            f"mixture of experts: {config.moe.n_routed_experts} routed experts, {config.moe.num_experts_per_tok} active per token; "
            f"shared experts: {config.moe.n_shared_experts}; leading dense layers: {config.moe.first_k_dense_replace}"
        )
    trained = map(PhaseSteps.of, recipe.train.phases)  # whole steps rarely use a budget exactly
    phases = [f"{phase.name} {phase.tokens:,} tokens at sequence length {phase.sequence_length:,}" for phase in trained]
    tuned = ""
    if recipe.tune:
        epochs, batch = recipe.tune.epochs, recipe.tune.global_batch_tokens
        amount = f"for {epochs} epochs" if epochs else f"on {recipe.tune.planned_tokens // batch * batch:,} tokens"
        tuned = f" It was then fine-tuned {amount} of conversations, with loss on the assistant's tokens only."
        tuned += " The weights are those with the lowest loss on held-out conversations." if recipe.tune.final_weights == "best" else ""
        tuned += _adapted(recipe, "tune")
    for stage in MODEL_STAGES:
        if stage.stage in ("dpo", "grpo") and (section := getattr(recipe, stage.stage)) is not None:
            tuned += f" {stage.title} with the loss `{section.loss}` followed." + _adapted(recipe, stage.stage)
    rows = [
        ("class", f"`{class_for(config)}`"),
        ("parameters", f"{count_parameters(config):,} ({count_active_parameters(config):,} active per token)"), ("feed-forward", kind),
        ("layers, hidden size", f"{config.num_hidden_layers}, {config.hidden_size}"),
        ("attention", _attention(config)),
        ("vocabulary", f"{config.vocab_size:,}"), ("context length", f"{int(config.max_position_embeddings or 0):,} tokens"),
    ]  # fmt: skip
    begun = f"from the weights of `{recipe.start_from}`" if recipe.start_from else "from scratch"
    text = f"A language model trained {begun} with lmworks {__version__}: " + ", ".join(phases) + "." + tuned
    if recipe.start_from and not phases:
        text = f"The base model is `{recipe.start_from}`, as it is; the run was made with lmworks {__version__}.{tuned}"
    return text + "\n\n" + _markdown(("", ""), rows)


def _adapted(recipe: Recipe, stage: str) -> str:
    return f" Low-rank adapters of rank {recipe.loras[stage].rank} were trained, and merged." if stage in recipe.loras else ""


def _ended_early(run_dir: Path) -> str:
    """Which stages were stopped early, and after how many tokens."""
    lines, events = [], read_ledger(run_dir / LEDGER)
    for stage in (one.stage for one in MODEL_STAGES):
        last = [event for event in events if event["event"] in ("early_stop", "finish") and event["stage"] == stage]
        ended = next((event for event in last if event["event"] == "early_stop" and event["step"] == last[-1]["step"]), None)
        if ended is not None:
            used, step = ended.get("used_step", ended["step"]), ended["step"]
            best = "" if used == step else f"; the weights are the best ones, of step {used:,} of {step:,}"
            lines.append(f"Early stopping ended `{stage}` after {ended['tokens']:,} tokens{best}.")
    return " ".join(lines)


def _attention(config: Model) -> str:
    if config.mla is None:
        return f"{config.num_attention_heads} query heads, {config.num_key_value_heads} key-value heads, head dimension {config.head_dim}"
    latents = f"{config.mla.kv_lora_rank} and {config.mla.qk_rope_head_dim}"
    return f"multi-head latent attention, {config.num_attention_heads} heads of dimension {config.head_dim}, latents of {latents}"


def _sources(corpus: dict[str, Any]) -> str:
    used = _used(corpus)
    if not used:
        return ""
    heads = ("source", "domain", "language", "MB after cleaning", "license")
    rows = [(one["name"], one["domain"], one["language"], f"{one['train']['bytes'] / 1e6:.1f}", one["license"]) for one in used]
    return "## Training data\n\n" + _markdown(heads, rows)


def _scores(results: dict[str, Any]) -> str:
    models = results.get("models", {})
    if not models:
        return ""
    parts = ["## Evaluation"]
    marks = results.get("references", {}).get("bits_per_byte", {})
    domains = next(iter(models.values()))["bits_per_byte"]
    columns = [{domain: value["bits_per_byte"] for domain, value in model["bits_per_byte"].items()} for model in models.values()]
    shown = [*columns, *marks.values()]
    rows = [(domain, *(f"{column[domain]:.3f}" if domain in column else "-" for column in shown)) for domain in domains]
    if rows:
        parts.append("Bits per byte of held-out text and of the answers in held-out conversations (lower is better):")
        parts.append(_markdown(("domain", *models, *marks), rows))
    scored = list(dict.fromkeys(one for model in models.values() for one in model["scores"]))
    if scored:
        rows = [(one, *_chances(models, one), *(_score(model["scores"].get(one)) for model in models.values())) for one in scored]
        parts.append(
            "Accuracy in % with 95% confidence interval. A score is named SET/FORM/SHOTS-shot: in cloze form the text of each choice is "
            "scored, in letter form its letter, and free and generated answers are read from a reply. Baseline: the best constant answer "
            "that ignores the question."
        )
        parts.append(_markdown(("score", "items", "chance", "baseline", *models), rows))
        if doubts := results.get("not_clean"):
            lines = "\n".join(f"- {one}: {why}" for one, why in doubts.items())
            parts.append(f"Scores that are not clean, because the training text may contain the items:\n\n{lines}")
    return "\n\n".join(parts)


def _chances(models: dict[str, Any], one: str) -> tuple[str, str, str]:
    known = next(model["scores"][one] for model in models.values() if model["scores"].get(one))
    return str(known["n"]), f"{100 * known['chance']:.0f}" if known["chance"] else "-", f"{100 * known['baseline']:.0f}"


def _score(score: dict[str, Any] | None) -> str:
    if score is None or not score["n"]:
        return "not measured"
    low, high = score["interval"]
    return f"{100 * score['score']:.1f} [{100 * low:.0f}, {100 * high:.0f}] {score['verdict']}"


def _use(recipe: Recipe, talk: bool, gguf: bool) -> str:
    ask = 'ids = tokenizer("Once upon a time", return_tensors="pt")'
    if talk:
        ask = (
            'chat = [{"role": "user", "content": "Hello!"}]\n'
            'ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)'
        )
    blocks = [
        "## Use",
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")\n'
        'model = AutoModelForCausalLM.from_pretrained(".")\n'
        f"{ask}\n"
        "out = model.generate(**ids, max_new_tokens=64)\n"
        'print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:], skip_special_tokens=True))\n'
        "```",
        "```\nvllm serve .\n```",
    ]
    if gguf:
        blocks.append("```\nllama-server -m ../gguf/model.gguf --jinja\n```")
    if talk:
        whose = "the base model's own" if recipe.tokenizer.as_is else "that of GLM-4.x"
        if added := recipe.tokenizer.add_tokens:
            blocks.append(f"The tokenizer is the base model's with {len(added)} added tokens.")
        blocks.append(f"The chat template is {whose}. Generation stops at any of the ids in `generation_config.json`.")
    return "\n\n".join(blocks)


def _limits(recipe: Recipe) -> str:
    seen = sum(PhaseSteps.of(phase).tokens for phase in recipe.train.phases)
    text = f"The model was pretrained on {seen:,} tokens{', after those of the base model' if recipe.start_from else ''}."
    if recipe.start_from:
        text = text if seen else "The limitations of the base model apply."
    elif seen < 10**9:
        text += " This is enough to learn the style of its training texts but not their facts: do not rely on its statements."
    return f"## Limitations\n\n{text} It was not trained to avoid harmful or wrong answers."


def _markdown(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
