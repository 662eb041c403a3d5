"""Loading: presets, overrides, origins, and one clear line for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.errors import UserError
from lmworks.recipe.changes import fingerprint
from lmworks.recipe.document import parse, tree_of_json
from lmworks.recipe.load import load_cluster, load_recipe, load_resolved, shipped
from lmworks.recipe.parameters import count_parameters
from smollm2 import gguf_file

Write = Callable[..., Path]
RECIPES = ("dense-125m", "glm-15b-a3b", "glm45-air-106b-a12b", "glm46-355b-a32b", "quickstart", "smollm3-3b")


def refusal(path: Path, overrides: list[str] | None = None, size: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides or [], size)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_all_that_ships_is_known() -> None:
    assert set(RECIPES) <= set(shipped())
    assert {"2-cores", "1xh200", "64xh100", "8192xh800"} <= set(shipped("clusters"))


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipe_is_complete(name: str) -> None:
    if name == "assistant":
        gguf_file()  # without which there is no shape
    recipe = load_recipe(name).recipe
    model = recipe.model
    derived = (
        model.vocab_size,
        model.hidden_size,
        model.num_hidden_layers,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        model.intermediate_size,
        model.max_position_embeddings,
    )
    others = (
        recipe.run_dir,
        recipe.threads,
        recipe.optimizer.learning_rate,
        recipe.optimizer.adam_learning_rate,
        recipe.train.micro_batch_sequences,
    )
    assert None not in derived + others
    if recipe.train.phases:
        assert model.max_position_embeddings == max(phase.sequence_length for phase in recipe.train.phases)
    assert model.vocab_size >= recipe.tokenizer.vocab_size


def test_glm46_has_the_three_stages() -> None:
    """15T at 2K, 7T at 4K, and 1T in quarters at 32K, 64K, 128K and 200K, with a raised base."""
    recipe = load_recipe("glm46-355b-a32b").recipe
    stages = [(int(phase.tokens), int(phase.sequence_length)) for phase in recipe.train.phases]
    quarter = 250 * 10**9
    long = [(quarter, length) for length in (32_768, 65_536, 131_072, 202_752)]
    assert stages == [(15 * 10**12, 2048), (7 * 10**12, 4096), *long]
    assert recipe.model.rope.theta == 10_000
    change = recipe.train.phases[2].rope
    assert change is not None
    assert change.apply(recipe.model.rope).theta == 1_000_000


def test_origins(write: Write) -> None:
    resolved = load_recipe(
        write(), ["train.phases.anneal.global_batch_tokens=16Ki", "train.phases.0.tokens=3M", "optimizer.betas=[0.9, 0.99]"]
    )
    origins = {path: str(origin) for path, origin in resolved.origins.items()}
    assert origins["name"].startswith("recipe") and origins["name"].endswith("small.yaml:1")
    assert origins["train.phases.general.mixture.code"].endswith("small.yaml:12")
    assert origins["model.moe.n_routed_experts"] == "preset glm-tiny"
    assert origins["train.phases.anneal.global_batch_tokens"] == "override --set train.phases.anneal.global_batch_tokens=16Ki"
    assert origins["train.phases.general.tokens"] == "override --set train.phases.0.tokens=3M"
    assert origins["run_dir"].startswith("derived: ") and "arXiv" in origins["optimizer.learning_rate"]
    assert origins["seed"] == "default"
    assert resolved.recipe.train.phases[1].global_batch_tokens == 16_384
    assert resolved.recipe.optimizer.betas == (0.9, 0.99)


def test_a_preset_gives_way_key_by_key(write: Write) -> None:
    path = write(("preset: glm-tiny", "preset: glm-tiny\n  num_hidden_layers: 3\n  moe: {num_experts_per_tok: 4}"))
    model = load_recipe(path).recipe.model
    assert model.moe is not None
    assert (model.num_hidden_layers, model.moe.num_experts_per_tok, model.moe.n_routed_experts, model.hidden_size) == (3, 4, 16, 256)
    dense = load_recipe(path, ["model.moe=null"])
    assert dense.recipe.model.moe is None
    assert str(dense.origins["model.moe"]) == "override --set model.moe=null"


@pytest.mark.parametrize("name", shipped())
def test_resolved_json_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    resolved = load_recipe(name)
    resolved.save(tmp_path)
    again = load_resolved(tmp_path / "resolved.json")
    assert again == resolved.recipe
    assert fingerprint(again) == resolved.fingerprint
    assert load_recipe(tmp_path / "resolved.json").fingerprint == resolved.fingerprint
    assert load_recipe(tmp_path / "recipe.yaml").fingerprint == resolved.fingerprint
    assert json.loads((tmp_path / "resolved.json").read_text())["name"] == name


def test_a_resolved_recipe_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """As a folder may have it that somebody else has made."""
    endless, pipe = tmp_path / "endless.json", tmp_path / "pipe.json"
    endless.touch()
    os.truncate(endless, 1 << 40)
    os.mkfifo(pipe)
    for path, why in ((endless, "too many for what it should be"), (pipe, "is not a regular file")):
        with pytest.raises(UserError, match=why):
            load_resolved(path)


def test_misspelt_key(write: Write) -> None:
    path = write(("      tokens: 2M", "      token: 2M"))
    assert refusal(path).endswith("small.yaml:11: train.phases.general has no key 'token'; did you mean 'tokens'?")


def test_key_in_the_wrong_place(write: Write) -> None:
    path = write(("model:\n", "learning_rate: 0.001\nmodel:\n"))
    assert refusal(path).endswith(
        "small.yaml:6: the top has no key 'learning_rate'; use optimizer.learning_rate or tune.learning_rate or dpo.learning_rate or "
        "grpo.learning_rate"
    )


def test_unknown_override(write: Write) -> None:
    message = refusal(write(), ["optimizer.lerning_rate=1"])
    assert message == "--set optimizer.lerning_rate=1: optimizer has no key 'lerning_rate'; did you mean 'learning_rate'?"
    assert "there is no item 'generl' here; there are: general, anneal" in refusal(write(), ["train.phases.generl.tokens=1M"])
    assert refusal(write(), ["seed"]) == "--set 'seed' is not of the form a.b=c"
    assert "nothing can be set below it" in refusal(write(), ["seed.x=1"])


def test_weights_that_do_not_sum_to_one(write: Write) -> None:
    message = refusal(write(("code: 0.25", "code: 0.35")))
    assert message.endswith("small.yaml:10: train.phases.general: phase general: mixture weights sum to 1.1, not 1; scale them by 0.909091")


def test_budget_smaller_than_a_step(write: Write) -> None:
    message = refusal(write(("tokens: 2M", "tokens: 4Ki")))
    assert "small.yaml:10: train.phases.general: phase general: the budget of 4096 tokens is smaller than one step of 8192" in message


def test_units_are_asked_for(write: Write) -> None:
    message = refusal(write(("tokens: 2M", "tokens: 2M steps")))
    assert "small.yaml:11: train.phases.general.tokens: '2M steps' is not a number of tokens" in message
    assert "'2 parsecs' is not a number of tokens" in refusal(write(("tokens: 2M", "tokens: 2 parsecs")))
    assert "has no unit; write for example '2000 steps'" in refusal(write(), ["train.save_every=100"])


def test_a_bare_number_is_a_number_of_tokens(write: Write) -> None:
    phase = load_recipe(write(("tokens: 2M", "tokens: 65536")), ["train.phases.general.sequence_length=512"]).recipe.train.phases[0]
    assert (phase.tokens, phase.sequence_length) == (65536, 512)
    assert "tokens: 0 is too few" in refusal(write(("tokens: 2M", "tokens: 0"))).replace("'0 tokens'", "0")


def test_wrong_type(write: Write) -> None:
    message = refusal(write(("name: small", "name: small\nseed: many")))
    assert message.endswith("small.yaml:2: seed: input should be a valid integer, unable to parse string as an integer, not 'many'")
    assert "model.rope.theta: input should be a finite number, not 'nan'" in refusal(write(), ["model.rope.theta=nan"])


def test_a_list_where_names_are_needed(write: Write) -> None:
    message = refusal(write(("mixture: {prose: 0.75, code: 0.25}", "mixture: [prose, code]")))
    assert message.endswith("train.phases.general.mixture: should be a map of keys ({KEY: VALUE, ...}), not a list")


def test_unknown_source(write: Write) -> None:
    message = refusal(write(("{prose: 0.75, code: 0.25}", "{pros: 0.75, code: 0.25}")))
    assert message.endswith("small.yaml:12: train.phases.general.mixture.pros: no source is called 'pros'; did you mean 'prose'?")


def test_names_must_differ(write: Write) -> None:
    assert "two phases are called 'general'" in refusal(write(("name: anneal", "name: general")))
    assert "two sources are called 'code'" in refusal(
        write(("name: prose,", "name: code,"), ("{prose: 0.75, code: 0.25}", "{code: 1.0}"), ("{prose: 1.0}", "{code: 1.0}"))
    )


def test_vocabulary_that_does_not_match(write: Write) -> None:
    assert "model.vocab_size: 1000 rows are too few for tokenizer.vocab_size 4096" in refusal(write(), ["model.vocab_size=1000"])


def test_key_written_twice(write: Write) -> None:
    message = refusal(write(("name: small", "name: small\nseed: 1\nseed: 2")))
    assert message.endswith("small.yaml:3: 'seed' is written twice in this map (first on line 2); keep one")


def test_broken_yaml(write: Write) -> None:
    message = refusal(write(text="name: small\nmodel: {preset: glm-tiny\nseed: 1\n"))
    assert "small.yaml:3: not readable as YAML: " in message
    assert "must hold a map of keys, not list" in refusal(write(text="- 1\n"))


def test_bad_bytes(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    assert refusal(path) == f"{path} is not UTF-8 text (byte 9); save it as UTF-8"


def test_unfolding_aliases_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    path = tmp_path / "laughs.yaml"
    path.write_text("\n".join(lines))
    assert "unfolds to too many or too deep values" in refusal(path)


def test_yaml_means_what_it_says(write: Write) -> None:
    resolved = load_recipe(write(("    - {name: code, kind: code, path: src,", "    - {name: code, kind: code, path: no, language: on,")))
    assert (resolved.recipe.corpus.sources[1].path, resolved.recipe.corpus.sources[1].language) == ("no", "on")
    assert load_recipe(write(), ["optimizer.eps=1e-9"]).recipe.optimizer.eps == 1e-9


def test_no_such_recipe() -> None:
    assert "there is no recipe 'quikstart', as a file or by name; did you mean quickstart?" in refusal(Path("quikstart"))
    with pytest.raises(UserError, match="there is no cluster '9xh900'"):
        load_cluster("9xh900")
    with pytest.raises(UserError, match="there is no model preset 'glm-tinny', as a file or by name; did you mean glm-tiny"):
        load_recipe("quickstart", ["model.preset=glm-tinny"])


def test_a_model_needs_a_shape(write: Write) -> None:
    assert "the model has no hidden_size and no num_hidden_layers; write size: 125M, model.preset: NAME" in refusal(
        write(("  preset: glm-tiny", "  use_qk_norm: true"))
    )


def test_existing_tokenizer_is_counted(write: Write, tmp_path: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 4999, "content": "<|end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    resolved = load_recipe(write(), [f"tokenizer.path={tmp_path}"])
    assert resolved.recipe.model.vocab_size == 5000
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer.json" in refusal(write(), [f"tokenizer.path={tmp_path}"])


def test_cluster_files() -> None:
    for name in shipped("clusters"):
        cluster = load_cluster(name)
        assert cluster.name == name and cluster.mfu_source


@pytest.mark.parametrize("modules", ["recipe.load", "evaluate.protection, lmworks.corpus.pipeline, lmworks.corpus.transform.rule_table"])
def test_recipes_and_corpora_need_no_torch(modules: str) -> None:
    """`lmworks show` does not pay for it, nor does each process of a corpus: a second of the ten that 20 MB take."""
    code = f"import sys, lmworks.{modules}; from lmworks.recipe.load import load_recipe; load_recipe('quickstart')"
    assert subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], check=False).returncode == 0


def test_presets_count_what_they_are_called() -> None:
    sizes = {"dense-1b": 1.2e9, "dense-350m": 0.35e9, "dense-125m": 0.125e9, "glm-15b-a3b": 15e9, "smollm3-3b": 3.08e9}
    for name, size in {**sizes, "glm45-air-106b-a12b": 106.85e9, "glm46-355b-a32b": 352.8e9}.items():
        model = load_recipe("dense-125m", [f"model.preset={name}", "tokenizer.vocab_size=49152"]).recipe.model
        assert count_parameters(model) == pytest.approx(size, rel=0.1), name


def test_a_generator_is_named_alone_or_with_options_and_once(write: Write) -> None:
    mixed = ["evaluate.tasks=[chain_sum, {name: aiw, options: {max_entities: 3}}]"]
    recipe = load_recipe(write(), mixed).recipe
    assert [(task.name, task.options) for task in recipe.evaluate.tasks] == [("chain_sum", {}), ("aiw", {"max_entities": 3})]
    message = refusal(write(), ["evaluate.tasks=[chain_sum, {name: chain_sum, options: {max_digits: 2}}]"])
    assert "evaluate.tasks lists a generator twice" in message


@pytest.mark.parametrize("name", ["../../../etc/cron.d/x", "/etc/cron.d/x", "..", ".hidden", "a/b", "", "a b"])
def test_names_that_become_files_stay_in_their_folder(write: Callable[..., Path], name: str) -> None:
    data = json.dumps([{"name": name, "kind": "files", "path": "chats.jsonl"}])
    with pytest.raises(UserError, match=r"tune.data.*name: string should match pattern"):
        load_recipe(write(), [f"tune.data={data}"])
    for key in ("name", "corpus.sources.0.name", "train.phases.0.name"):
        with pytest.raises(UserError):
            load_recipe(write(), [f"{key}={json.dumps(name)}"])


def test_two_bodies_of_conversations_need_two_names(write: Callable[..., Path]) -> None:
    data = json.dumps([{"name": "mine", "kind": "files", "path": path} for path in ("a.jsonl", "b.jsonl")])
    with pytest.raises(UserError, match="two bodies of conversations are called 'mine'"):
        load_recipe(write(), [f"tune.data={data}"])


def test_a_rate_of_weights_that_the_model_has_not_is_refused(write: Write) -> None:
    message = refusal(write(), ["optimizer.lr_scales.experts=2", "model.moe=null"])
    assert message.endswith("lr_scales.experts: this model has embedding, head, matrices, vectors; it has no experts, so leave this out")
    message = refusal(write(), ["optimizer.lr_scales.head=2", "model.tie_word_embeddings=true"])
    assert message.endswith("matrices, router, vectors; its head is the embedding (tie_word_embeddings), so leave this out")
    assert "input should be 'embedding', 'head'" in refusal(write(), ["optimizer.lr_scales.body=2"])


@pytest.mark.parametrize(("key", "value"), [
    ("optimizer.betas", "[1, 1]"), ("optimizer.betas", "[0.9, 1.5]"), ("optimizer.betas", "[-0.5, 0.9]"),
    ("train.phases.0.lr_schedule.milestone_fractions", "[2.0, -1.0]"), ("train.phases.0.lr_schedule.milestone_fractions", "[0.9, 0.8]"),
])  # fmt: skip
def test_numbers_that_ruin_training_are_refused_with_their_key(write: Callable[..., Path], key: str, value: str) -> None:
    """Betas of 1 make every weight NaN in the first step, and the run used to finish."""
    with pytest.raises(UserError, match=key.rpartition(".")[2]):
        load_recipe(write(), [f"{key}={value}"])


def test_a_reader_that_changes_what_it_read_changes_nothing_for_the_next() -> None:
    first = parse("a: {b: [1]}\n", "x.yaml")
    first.tree["a"]["b"].append(2)
    assert parse("a: {b: [1]}\n", "x.yaml").tree == {"a": {"b": [1]}}
    assert parse("a: {b: [1]}\n", "y.yaml").place(("a", "b")) == "y.yaml:1"


@pytest.mark.parametrize("text", [
    '{"a": 1, "a": 2}', '{"a": 1e999}', '{"a": NaN}', '{"a": 99999999999999999999}', '{"a": "\\u0000"}', '{"a": "\\ud800"}',
    '{"a": "\x85"}', '{"a": "\x7f"}', '{"a": ' + "[" * 64 + "]" * 64 + "}", "[" * 100_000, "[1]", "a: 1", "",
])  # fmt: skip
def test_what_a_recipe_may_not_hold_is_left_to_the_parser_that_says_so(text: str) -> None:
    assert tree_of_json(text) is None


def test_json_is_read_as_the_parser_reads_it() -> None:
    text = json.dumps({"a": [1, -2, 0.5, 1e-7, 2e16, True, None, "é ☃ \n"], "b": {"c": {}, "d": []}})
    assert tree_of_json(text) == parse(text, "x").tree
