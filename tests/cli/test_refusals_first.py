"""What a later stage would refuse, `plan` and `run` refuse with one line and exit code 2 before a stage begins.

Each case breaks a recipe in one place and names the place in the source that has to refuse it. The cases together reach every function
that `tests/run/refusal_sites.py` lists as FIRST, except those of `ELSEWHERE`, which name the tests that do.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import Lmworks
from test_start_tuning import ROWS

from base_models import write_model, write_tokenizer
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.run.stages import STAGES
from refusal_sites import FIRST, listed

CHAT = {"messages": [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": "It is 3."}]}
PAIR = {"prompt": "What is 1 + 2?", "chosen": "It is 3.", "rejected": "It is 4."}
PROMPT = {"prompt": "What is 1 + 2?", "answer": "3"}
TEXT = "The user asks, and the assistant answers: what is the capital of France? It is Paris.\n"


@dataclass
class Project:
    """A folder with a base model, data files and texts, from which recipes are made: one that tunes, one that trains from nothing."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    hidden: str = ""  # a package that is not found
    held: socket.socket | None = None

    def rows(self, name: str, *rows: Any) -> str:
        path = self.folder / name
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return str(path)

    def data(self, name: str, *rows: Any, **keys: Any) -> list[dict[str, Any]]:
        return [{"name": "own", "kind": "files", "path": self.rows(name, *rows), **keys}]

    def tuning(self, **changes: Any) -> dict[str, Any]:
        tune = {"data": self.data("chats.jsonl", CHAT), "epochs": 1, "sequence_length": "64 tokens", "global_batch_tokens": "64 tokens"}
        return {
            "name": "mine", "threads": 1, "start_from": str(self.folder / "base"), "run_dir": str(self.folder / "run"), "tune": tune,
            "train": {"precision": "fp32", "compile": False, "micro_batch_sequences": 1}, "evaluate": {"benchmarks": []},
            "export": {"huggingface": True, "gguf": False},
        } | changes  # fmt: skip

    def tune(self, **changes: Any) -> dict[str, Any]:
        tree = self.tuning()
        return tree | {"tune": tree["tune"] | changes}

    def dpo(self, *rows: Any, **changes: Any) -> dict[str, Any]:
        stage = {"data": self.data("pairs.jsonl", *rows), "sequence_length": "64 tokens", "pairs_per_step": 2} | changes
        return {key: value for key, value in self.tuning(dpo=stage).items() if key != "tune"}

    def grpo(self, *rows: Any, reward: str = "numeric", of_set: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        data = self.data("prompts.jsonl", *rows, reward=reward, **(of_set or {}))
        stage = {"data": data, "sequence_length": "64 tokens", "max_new_tokens": 8, "validation_prompts": 0} | changes
        return {key: value for key, value in self.tuning(grpo=stage).items() if key != "tune"}

    def training(self, **changes: Any) -> dict[str, Any]:
        (self.folder / "texts").mkdir(exist_ok=True)
        (self.folder / "texts" / "one.txt").write_text(TEXT * 100)
        source = {"name": "web", "kind": "text", "path": str(self.folder / "texts"), "license": "mine"}
        phase = {
            "name": "only", "tokens": "1Ki", "mixture": {"web": 1.0}, "sequence_length": "32 tokens", "global_batch_tokens": "256 tokens",
        }  # fmt: skip
        model = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return {
            "name": "mine", "threads": 1, "run_dir": str(self.folder / "run"), "corpus": {"sources": [source]},
            "tokenizer": {"vocab_size": 512}, "model": model, "train": {"precision": "fp32", "compile": False, "phases": [phase]},
            "evaluate": {"benchmarks": [], "references": False}, "export": {"huggingface": False, "gguf": False},
        } | changes  # fmt: skip

    def corpus(self, source: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        tree = self.training()
        return tree | {"corpus": {"sources": [tree["corpus"]["sources"][0] | (source or {})], **changes}}

    def phase(self, **changes: Any) -> dict[str, Any]:
        tree = self.training()
        tree["train"]["phases"][0] |= changes
        return tree

    def base(self, name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Change a file of the base model; the function gets its JSON, or None for a deletion."""
        path = self.folder / "base" / name
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        return self.tuning()

    def template(self, text: str | None) -> dict[str, Any]:
        path = self.folder / "base" / "chat_template.jinja"
        path.unlink() if text is None else path.write_text(text)
        return self.tuning()

    def machine(self, **said: object) -> None:
        self.environment[machine.VARIABLE] = ",".join(["peak=1e11", *(f"{key}={value}" for key, value in said.items())])

    def adapter(self, config: dict[str, Any] | str | None, tensors: dict[str, Any] | bytes = b"", **lora: Any) -> dict[str, Any]:
        from safetensors.torch import save_file

        folder = self.folder / "adapter"
        folder.mkdir()
        if config is not None:
            (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
            place = folder / "adapter_model.safetensors"
            place.write_bytes(tensors) if isinstance(tensors, bytes) else save_file(tensors, place)
        return self.tune(lora={"rank": 4, "alpha": 8.0, "init_from": str(folder), **lora})


Make = Callable[[Project], dict[str, Any]]
WINDOW_AND_EXPERTS = {
    "sliding_window": "16 tokens",
    "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "use_qk_norm": True,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down.*": {"format": "marlin"}}}
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "bias": "none"}


def _python_step(text: str | None, **options: Any) -> Make:
    def make(project: Project) -> dict[str, Any]:
        if text is not None:
            (project.folder / "mine.py").write_text(text)
        return project.corpus(steps=[{"step": "python", "file": "mine.py", "function": "keep", **options}])

    return make


def _reward(text: str | None) -> Make:
    def make(project: Project) -> dict[str, Any]:
        path = project.folder / "reward.py"
        if text is not None:
            path.write_text(text)
        return project.grpo(PROMPT, reward="python", of_set={"file": str(path)})

    return make


def _small_machine(project: Project) -> dict[str, Any]:
    project.machine(memory=200e6, available=200e6)
    model = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 4096}
    return project.training(model=model)


def _only_imported(project: Project) -> dict[str, Any]:
    return project.phase(mixture={"more": 1.0}) | {"corpus": {}, "shards": {"imported": {"more": "nowhere"}}}


def _full_disk(project: Project) -> dict[str, Any]:
    project.machine(disk=1000)
    return project.tuning()


def _no_sandbox(project: Project) -> dict[str, Any]:
    project.machine(sandbox="no")
    return project.grpo({"prompt": "Add", "tests": "assert True"}, reward="unit_tests")


def _taken_port(project: Project) -> dict[str, Any]:
    project.held = socket.create_server(("127.0.0.1", 0))
    return project.tuning(metrics={"prometheus_port": project.held.getsockname()[1]})


def _one_id(project: Project) -> dict[str, Any]:
    row = {"id": "x", "question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
    return project.tuning(evaluate={"benchmarks": [{"name": "arc-easy", "path": project.rows("arc.jsonl", row, row)}]})


def _protect(project: Project, *rows: Any, **keys: Any) -> dict[str, Any]:
    return project.tuning(
        evaluate={"benchmarks": [], "protect": [{"name": "own", "path": project.rows("own.jsonl", *rows), "question": "q", **keys}]}
    )


def _imported(project: Project) -> dict[str, Any]:
    return project.training(shards={"imported": {"more": str(project.folder / "nowhere")}})


def _task(project: Project, rows: list[Any], **keys: Any) -> dict[str, Any]:
    path = project.folder / "mine.yaml"
    data = project.rows("items.jsonl", *rows)
    path.write_text(yaml.safe_dump({"file": data, "question": "{q}", "choices": "choices", "answer": "gold"} | keys))
    return project.tuning(evaluate={"benchmarks": [str(path)]})


def _many_texts(project: Project) -> dict[str, Any]:
    (project.folder / "texts").mkdir()
    (project.folder / "texts" / "book.txt").write_text(TEXT * 10_000)  # 0.85 MB, for 400M tokens
    return project.phase(tokens="400M")


def _hidden(package: str, **export: bool) -> Make:
    def make(project: Project) -> dict[str, Any]:
        project.hidden = package
        return project.tuning(export=export)

    return make


def _cut_weights(project: Project) -> dict[str, Any]:
    path = project.folder / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return project.tuning()


def _tiny_share(project: Project) -> dict[str, Any]:
    tree = project.phase(mixture={"web": 1 - 1e-7, "other": 1e-7})
    sources = tree["corpus"]["sources"]
    return tree | {"corpus": {"sources": [*sources, sources[0] | {"name": "other"}]}}


CASES: dict[str, tuple[str, str, Make]] = {
    "no sources": ("corpus.pipeline check_sources", "the recipe has no corpus.sources", _only_imported),
    "no transformers": ("run.refusals _export_packages", "needs transformers", _hidden("transformers", huggingface=True, gguf=False)),
    "cut weights": ("weights.huggingface _open", "is damaged", _cut_weights),
    "little memory": ("run.refusals _memory", "for its state alone", _small_machine),
    "an adopted tokenizer": (
        "tokenizer.train _adopt",
        "set it to",
        lambda p: p.training(tokenizer={"path": str(p.folder / "base"), "vocab_size": 320}),
    ),
    "an own task without its column": (
        "evaluate.sets.own_tasks _read_rows",
        "has no column",
        lambda p: _task(p, [{"q": "One?", "gold": 0}]),
    ),
    "a damaged set": (
        "evaluate.sets.sources local_rows",
        "cannot be read",
        lambda p: p.tuning(evaluate={"benchmarks": [{"name": "arc-easy", "path": p.rows("arc.parquet", "PAR1")}]}),
    ),
    # name: (the place in the source, what is said, the recipe)
    "no conversations": (
        "train.data.row_files _list_files",
        "nowhere.jsonl is no file",
        lambda p: p.tune(data=[{"name": "own", "kind": "files", "path": "nowhere.jsonl"}]),
    ),
    "another suffix": (
        "train.data.row_files _list_files",
        "is no such file; its name must end in",
        lambda p: p.tune(data=[{"name": "own", "kind": "files", "path": p.rows("chats.txt", CHAT)}]),
    ),
    "no path": (
        "train.data.row_files read_files",
        "kind files needs path",
        lambda p: p.tune(data=[{"name": "own", "kind": "files"}]),
    ),
    "no dataset": (
        "train.data.row_files read_dataset",
        "kind huggingface needs path",
        lambda p: p.tune(data=[{"name": "own", "kind": "huggingface"}]),
    ),
    "no data": ("train.data.sets require_sets", "tune.data is empty", lambda p: p.tune(data=[])),
    "rows of no form": ("train.data.chat _write", "yields no conversation", lambda p: p.tune(data=p.data("other.jsonl", {"foo": "bar"}))),
    "an empty file": ("train.data.chat _write", "it is empty", lambda p: p.tune(data=p.data("other.jsonl"))),
    "only an evaluation item": (
        "train.data.decontamination Decontamination._decide",
        "is asked by the evaluation",
        lambda p: _protect(p, {"q": "What is 1 + 2?"}) | {"corpus": {"decontaminate": {"action": "fail"}}},
    ),
    "a budget below a step": (
        "shards.validation check_batch",
        "leave no whole step",
        lambda p: p.tune(epochs=None, tokens="32 tokens"),
    ),
    "all replayed": (
        "train.data.mixture replayed_rows",
        "of 4 sequences in a step is none of them",
        lambda p: p.training(
            tune={
                "data": p.data("chats.jsonl", CHAT),
                "sequence_length": "64 tokens",
                "global_batch_tokens": "256 tokens",
                "replay": {"fraction": 0.01},
            }
        ),
    ),
    "unknown targets": (
        "model.lora _refuse_targets",
        "tune.lora.targets: 'q_proj' matches no matrix",
        lambda p: p.tune(lora={"rank": 4, "targets": ["q_proj"]}),
    ),
    "a rank too large": ("run.refusals _adapters.look", "tune.lora.rank 99 is larger", lambda p: p.tune(lora={"rank": 99})),
    "no adapter": ("export.peft read_peft", "is no PEFT adapter", lambda p: p.adapter(None)),
    "a damaged adapter": ("export.peft read_peft", "is damaged", lambda p: p.adapter(PEFT)),
    "an adapter of another base model": (
        "export.peft _require_targets",
        "has the tensor another, which is no adapter",
        lambda p: p.adapter(PEFT, {"another": torch.zeros(1)}),
    ),
    "no config of an adapter": ("export.peft _read_config", "is not the config of an adapter", lambda p: p.adapter("{")),
    "an adapter of another rank": (
        "export.peft _require_options",
        "has r 8, and the recipe has lora.rank 4",
        lambda p: p.adapter(PEFT | {"r": 8}),
    ),
    "an unmeasured metric": (
        "train.validation EarlyStopper.observe",
        "validation/accuracy is not measured",
        lambda p: p.tune(early_stopping={"metric": "validation/accuracy"}),
    ),
    "nothing held out": (
        "train.validation EarlyStopper.observe",
        "a validation loss is not measured by this run",
        lambda p: p.tune(early_stopping={}, validation_fraction=0.0),
    ),
    "a long warm-up": (
        "recipe.timeline _Curve._tokens",
        "warmup of 9 steps is longer",
        lambda p: p.tune(lr_schedule={"warmup": "9 steps"}),
    ),
    "warm-up and decay": (
        "recipe.timeline _Curve.__init__",
        "are together longer",
        lambda p: p.phase(lr_schedule={"kind": "wsd", "warmup": "60%", "decay": "60%"}),
    ),
    "a share of nothing": ("run.refusals _mixtures", "train.phases.only.mixture", _tiny_share),
    "no pairs": ("train.data.preferences build_preferences", "yields no pair", lambda p: p.dpo({"foo": "bar"})),
    "no held-out pairs": ("train.stage require_held_out", "needs held-out pairs", lambda p: p.dpo(PAIR, early_stopping={})),
    "no prompts": ("train.prompts read_prompts", "yields no prompt", lambda p: p.grpo({"foo": "bar"})),
    "a pipeline": ("train.prompts refusals", "layout.pp 2 cannot", lambda p: p.grpo(PROMPT) | {"layout": {"pp": 2}}),
    "no reward file": ("train.rewards check_file", "cannot be read", _reward(None)),
    "a reward without its function": ("train.rewards check_file", "does not define reward", _reward("x = 1\n")),
    "no sandbox": ("train.rewards make_judge", "only in a sandbox", _no_sandbox),
    "no generators": (
        "corpus.read.conversations generators_of",
        "kind tasks needs tasks",
        lambda p: p.tune(data=[{"name": "own", "kind": "tasks"}]),
    ),
    "an unknown generator": (
        "corpus.read.conversations create",
        "has no task 'chain_sun'",
        lambda p: p.tune(data=[{"name": "own", "kind": "tasks", "tasks": ["chain_sun"]}]),
    ),
    "too many tasks": (
        "train.data.sets task_share",
        "is too many",
        lambda p: p.tune(data=[{"name": "own", "kind": "tasks", "tasks": ["chain_sum"], "max_rows": 9_000_000}]),
    ),
    "no tokenizer": (
        "tokenizer.opening _source",
        "has no tokenizer.json",
        lambda p: ((p.folder / "base" / "tokenizer.json").unlink(), p.tuning())[1],
    ),
    "no file of a template": (
        "tokenizer.opening _template",
        "own.jinja does not exist",
        lambda p: p.tuning() | {"tokenizer": {"chat_template": "own.jinja"}},
    ),
    "no chat template": ("tokenizer.opening require_chat", "has no chat template", lambda p: p.template(None)),
    "a template without a stop": (
        "tokenizer.turns Turns.__init__",
        "ends no answer with a special token",
        lambda p: p.template("{{ messages }}"),
    ),
    "an unsafe template": ("tokenizer.chat Template.render", "is unsafe", lambda p: p.template("{{ messages.__class__.__mro__ }}")),
    "no template": ("tokenizer.chat Template.__init__", "is not a chat template", lambda p: p.template("{% if %}")),
    "a known token": (
        "tokenizer.opening kept_json",
        "is a token of",
        lambda p: p.tuning(tokenizer={"add_tokens": ["<|im_start|>"], "as_is": True}),
    ),
    "another shape": (
        "weights.huggingface map_weights",
        "but the config says",
        lambda p: p.base("config.json", lambda c: c | {"intermediate_size": 64}),
    ),
    "another form of AWQ": (
        "weights.int32 layout",
        "is quantized with awq (3 bits",
        lambda p: p.base("config.json", lambda c: c | {"quantization_config": {"quant_method": "awq", "bits": 3}}),
    ),
    "another form of single modules of GPTQ": (
        "weights.int32 _stated",
        "its dynamic gives '+:.*down.*' another format",
        lambda p: p.base("config.json", lambda c: c | {"quantization_config": GPTQ}),
    ),
    "a missing layer": (
        "weights.huggingface map_weights",
        "has no tensor",
        lambda p: p.base("config.json", lambda c: c | {"num_hidden_layers": 3}),
    ),
    "pickled weights": (
        "weights.huggingface files_of",
        "has no .safetensors file",
        lambda p: ((p.folder / "base" / "model.safetensors").rename(p.folder / "base" / "pytorch_model.bin"), p.tuning())[1],
    ),
    "an unknown set": (
        "evaluate.sets.benchmarks check_names",
        "did you mean arc-easy",
        lambda p: p.tuning(evaluate={"benchmarks": ["arc-esay"]}),
    ),
    "no rows of a set": (
        "evaluate.sets.sources files",
        "nowhere",
        lambda p: p.tuning(evaluate={"benchmarks": [{"name": "arc-easy", "path": "nowhere"}]}),
    ),
    "rows of one id": ("evaluate.sets.sources require_ids", "two rows of", lambda p: _one_id(p)),
    "protected set without items": ("evaluate.protection _questions", "has no items", lambda p: _protect(p)),
    "no class": (
        "recipe.families.registry family_of",
        "no Hugging Face class expresses this model",
        lambda p: p.training(export={"huggingface": True, "gguf": False}) | {"model": p.training()["model"] | WINDOW_AND_EXPERTS},
    ),
    "a taken port": ("metrics.log _taken", "cannot listen on port", _taken_port),
    "a full disk": ("run.prediction require_disk", "of disk space at least", _full_disk),
    "a layout that does not divide": ("run.refusals _layout", "layout: ", lambda p: p.tuning(layout={"tp": 3})),
    "missing text": ("corpus.read.listing find_files", "nowhere", lambda p: p.corpus({"path": "nowhere"})),
    "unknown rules": ("corpus.transform.rule_table rules_for", "unknown rules", lambda p: p.corpus({"rules": "best"})),
    "no step file": ("corpus.transform.steps _function", "is not a Python file", _python_step(None)),
    "options of a step": (
        "corpus.transform.steps _python",
        "see its arguments",
        _python_step("def keep(document): return document\n", options={"depth": 1}),
    ),
    "a missing fact": (
        "corpus.engine.reading_pass _check_facts",
        "needs the fact",
        _python_step("def keep(document): return document\nkeep.declared = {'needs': ('score',)}\n"),
    ),
    "no classifier": (
        "corpus.transform.quality Classifier.load",
        "there is no classifier",
        lambda p: p.corpus(steps=[{"step": "quality", "model": "nowhere"}]),
    ),
    "no embedding model": (
        "corpus.dedup.semantic _model_embedding",
        "has no config.json",
        lambda p: p.corpus(dedup={"semantic": {"model": "nowhere"}}),
    ),
    "no sbatch": ("corpus.pipeline refusals", "needs sbatch", lambda p: p.corpus(executor={"kind": "slurm"})),
    "no imported tokens": ("shards.manifest Manifest.load", "does not exist", _imported),
    "too little text": ("shards.order Order._check; run.refusals _enough_text", "too little text for the budget", _many_texts),
    "no phases": ("recipe.timeline Timeline.__init__", "train.phases is empty", lambda p: p.training(train={"phases": []})),
    "a small vocabulary": (
        "tokenizer.train check",
        "leaves no room for the bytes",
        lambda p: p.training(tokenizer={"vocab_size": 320, "kind": "sentencepiece"}),
    ),
    "more special tokens than memory": (
        "tokenizer.train check",
        "256000000000 special tokens; set it to at least 256000000256",
        lambda p: p.training(tokenizer={"num_special_tokens": 256_000_000_000}),
    ),
    "a context beyond all numbers": (
        "recipe.phases extended",
        "is too large; lower it",
        lambda p: p.training(export={"rope": {"scaling": "yarn", "factor": 1e95}}),
    ),
}


WEIGHTS = "tests/weights; the same call as a missing layer"
INSTALLED, TOKENIZERS, FAMILIES = (
    "a package or a right that the machine of the tests has",
    "tests/tokenizer",
    "tests/cli/test_start_bad_input.py",
)
ELSEWHERE = {
    "train.observe.sampling refusals": "tests/train/test_sampling.py; before all others only with a tokenizer that exists",
    "plan.stages later_phases": "a budget below a step, in `plan`; the run refuses it by its own rule before",
    "corpus.transform.filter_steps identifier": INSTALLED,
    "corpus.transform.steps _code": INSTALLED,
    "corpus.transform.rewrite rewrite_step": INSTALLED,
    "corpus.read.markup require": INSTALLED,
    "corpus.read.warc parts": INSTALLED,
    "corpus.read.repository parts": INSTALLED,
    "metrics.trackers import_package": INSTALLED,
    "parallel.zero_offload require_library": INSTALLED,
    "weights.gguf gguf_package": INSTALLED,
    "corpus.transform.rewrite _Rewriter.__init__": "tests/corpus/test_steps_rewrite.py; made by the same call as a step of your own",
    "corpus.read.__init__ parts": "a folder without the right to read it, which root has",
    "shards.order Order._mixture": "tests/run/test_staleness.py; the same call as too little text",
    "shards.order Order._plan": "tests/shards/test_order.py; the same call as too little text",
    "shards.mixture Mixture.__init__": "tests/shards/test_mixture.py; the same call as too little text",
    "shards.mixture _largest_remainder": "tests/shards/test_mixture.py; the same call as too little text",
    "shards.build check_imported": "tests/shards/test_import.py; the same call as no imported tokens",
    "tokenizer.tokenizer_json check_same_ids": TOKENIZERS,
    "tokenizer.tokenizer_json read_bpe.refuse": TOKENIZERS,
    "tokenizer.train _check_round_trip": TOKENIZERS,
    "tokenizer.foreign ForeignTokenizer.__init__": TOKENIZERS,
    "tokenizer.foreign ForeignTokenizer._template": TOKENIZERS,
    "tokenizer.turns Turns._require_answers": TOKENIZERS,
    "tokenizer.opening require_fit": FAMILIES,
    "export.peft _Joined.part": FAMILIES,
    "weights.names huggingface_name": FAMILIES,
    "weights.names refuse_foreign": FAMILIES,
    "weights.huggingface refuse_unequal_copies": FAMILIES,
    "weights.huggingface _refuse_duplicates": WEIGHTS,
    "verify.answers check_installed": INSTALLED,
    "weights.gguf _dequantize": WEIGHTS,
    "weights.gguf GgufWeights._found": WEIGHTS,
    "weights.gguf GgufWeights._info": WEIGHTS,
    "weights.gguf GgufWeights._check_rope": WEIGHTS,
    "weights.quantized _pair": WEIGHTS,
    "weights.quantized _unknown": WEIGHTS,
    "weights.quantized _forms": WEIGHTS,
    "weights.quantized dequantized": WEIGHTS,
    "weights.reference _place": WEIGHTS,
    "weights.reference find": WEIGHTS,
    "recipe.checks phase_refusals.end_of_warm_up": "tests/train/test_phases.py; the same list as a phase without a step",
    "train.rewards AnswerCheck.finish": "tests/train/test_grpo.py; the same call as no prompts",
    "export.export check": "tests/export; the same call as no class",
    "export.gguf_tokenizer find_rule": "tests/export; the same call as no class",
    "weights.gguf gguf_of": "tests/export; the same call as no class",
    "plan.layout choose": "tests/plan/test_plan.py; `plan` alone chooses layouts, and shows what the run would refuse first",
    "evaluate.sets.benchmarks _own_items": "tests/evaluate/test_own_tasks.py; the same call as an own task without its column",
    "evaluate.sets.own_tasks _meaning": "tests/evaluate/test_sources.py; the same call as an own task without its column",
    "evaluate.generation.interface Declared.open": "tests/evaluate/test_declared.py; the same call as an unknown set",
    "evaluate.generation.humaneval HumanEval.__init__": "tests/evaluate/test_humaneval.py; the same call as an unknown set",
}
"""FIRST places without a case, with where they are tested: they need another machine, or are met by a call that a case proves."""


def test_every_place_that_comes_first_is_met() -> None:
    first = set(listed(FIRST))
    met = {place for places, _, _ in CASES.values() for place in places.split("; ")}
    assert first - met - set(ELSEWHERE) == set()
    assert not set(ELSEWHERE) - first
    assert all(place in listed() or place.startswith("recipe.") for place in met)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    write_tokenizer(folder, "qwen")
    write_model(folder, ROWS)
    return folder


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places in the source that made an error, as `module function`."""
    found: list[str] = []
    honest = UserError.__init__

    def record(self: UserError, *what: object) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), UserError) and frame.f_back:
            frame = frame.f_back
        module = str(frame.f_globals["__name__"]).removeprefix("lmworks.")
        if module.startswith("corpus.read") and "." not in module.removeprefix("corpus.read"):
            module = "corpus.read.__init__"
        found.append(f"{module} {frame.f_code.co_qualname.replace('.<locals>', '')}")
        honest(self, *what)

    monkeypatch.setattr(UserError, "__init__", record)
    return found


@pytest.mark.parametrize("name", CASES)
def test_plan_and_run_refuse_before_a_stage_begins(
    lmworks: Lmworks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str], name: str
) -> None:
    import shutil

    place, said, make = CASES[name]
    shutil.copytree(base, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(make(project)))
    for key, value in project.environment.items():
        monkeypatch.setenv(key, value)
    honest, which = importlib.util.find_spec, shutil.which
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *more: None if one == project.hidden else honest(one, *more))
    monkeypatch.setattr(shutil, "which", lambda one, *more, **options: None if one == "sbatch" else which(one, *more, **options))
    for command in ("plan", "run"):
        raised.clear()
        error = lmworks(command, recipe).error
        assert said in error, command
        assert set(place.split("; ")) <= set(raised), (command, raised)
    assert not [stage.folder for stage in STAGES if (tmp_path / "run" / stage.folder).exists()]
