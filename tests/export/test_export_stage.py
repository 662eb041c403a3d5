"""The export stage on a small real run: what is written, and what the gate lets through."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from small_models import MODELS, recipe_for

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.export import export as module
from lmworks.export.card import write_card
from lmworks.export.export import check, export, write_huggingface
from lmworks.export.parity import compare, held_out_tokens, require_parity
from lmworks.io.files import read_json, write_json
from lmworks.model import Transformer
from lmworks.model.router import Router
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import RopeChange
from lmworks.recipe.schema.units import Tokens
from lmworks.weights.huggingface import read_model

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'lmworks[export]'")

CORPUS = {"sources": [
    {"name": "code", "domain": "code", "language": "code", "license": "PSF-2.0", "train": {"documents": 8, "bytes": 1_200_000}},
    {"name": "docs", "domain": "docs", "language": "no", "license": "MIT | own", "train": {"documents": 30, "bytes": 300_000}},
    {"name": "unused", "domain": "docs", "language": "fr", "license": "secret", "train": {"documents": 0, "bytes": 0}},
]}  # fmt: skip
_SCORE = {"n": 50, "score": 0.34, "interval": [0.22, 0.48], "verdict": "at chance", "chance": 0.25, "baseline": 0.3}
RESULTS = {
    "models": {"base": {"bits_per_byte": {"code": {"bits_per_byte": 1.234}, "all": {"bits_per_byte": 1.5}},
                        "scores": {"piqa/cloze/0-shot": _SCORE, "chain_sum/generate/0-shot": {**_SCORE, "n": 0}}}},
    "references": {"bits_per_byte": {"xz -9e": {"code": 2.1, "all": 2.2}}},
}  # fmt: skip


@pytest.fixture
def glm(make_run: Callable[..., Any], tmp_path: Path) -> Any:
    """The run of a mixture of experts, in a folder of its own that a test may add to."""
    run = make_run("glm4moe")
    directory = tmp_path / "run"
    directory.mkdir()
    for part in ("tokenizer", "shards", "checkpoints", "resolved.json"):
        (directory / part).symlink_to(run.directory / part)
    return type(run)(run.recipe, directory, run.tokenizer, run.model)


def with_export(recipe: Recipe, **values: Any) -> Recipe:
    return recipe.model_copy(update={"export": recipe.export.model_copy(update=values)})


def printed(report: Any) -> str:
    console = Console(width=220, file=io.StringIO())
    console.print(report)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_end_to_end(glm: Any, tmp_path: Path) -> None:
    for file, document in (("corpus/report.json", CORPUS), ("evaluate/results.json", RESULTS)):
        (glm.directory / file).parent.mkdir()
        write_json(glm.directory / file, document)
    out = tmp_path / "export"
    (out / "huggingface").mkdir(parents=True)
    (out / "huggingface" / "model-00001-of-00009.safetensors").write_bytes(b"left by a try that was killed")
    report = export(glm.recipe, glm.directory, out)

    names = {file.name for file in (out / "huggingface").iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                     "chat_template.jinja", "parity.json"}  # fmt: skip
    assert {file.stat().st_mode & 0o777 for file in (out / "huggingface").iterdir()} == {(out / "huggingface").stat().st_mode & 0o666}
    stops = [glm.tokenizer.special[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    assert read_json(out / "huggingface" / "generation_config.json")["eos_token_id"] == stops
    assert read_json(out / "huggingface" / "config.json")["eos_token_id"] == stops
    parity = read_json(out / "parity.json")
    assert parity["model"] == "base" and parity["huggingface"]["relative"] < 1e-5 and parity["tensors"] == len(glm.model.state_dict())
    assert parity["huggingface"]["tokens"] == 4 * 128 + 2 * 256 and parity["sequences"] == 6
    assert (out / "gguf" / "model.gguf").stat().st_size == report.bytes["gguf"] > 4 * 1_300_000
    shown = printed(report)
    assert "Glm4MoeForCausalLM" in shown and "glm4moe" in shown and "100.00% same next token, over 1,024 tokens" in shown

    card = (out / "huggingface" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers" and front["language"] == ["no"]
    assert "| docs | docs | no | 0.3 | MIT \\| own |" in card and "secret" not in card
    assert "| code | 1.234 | 2.100 |" in card
    assert "| piqa/cloze/0-shot | 50 | 25 | 30 | 34.0 [22, 48] at chance |" in card and "not measured" in card
    assert "65,536 tokens" in card and "do not rely on its statements" in card


def test_transformers_uses_it_as_the_card_says(glm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = glm.recipe.model_copy(update={"tune": Recipe.model_validate({"name": "t", "tune": {}}).tune})
    write_huggingface(glm.model, glm.tokenizer, tmp_path / "hf", torch.float32)
    monkeypatch.chdir(tmp_path / "hf")
    for recipe in (glm.recipe, tuned):
        write_card(recipe, glm.model, glm.directory, tmp_path / "hf", gguf=True)
        program = (tmp_path / "hf" / "README.md").read_text().split("```python\n")[1].split("```")[0]
        exec(compile(program, "README.md", "exec"), {})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": "user", "content": "Hello, 你好!"}]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == glm.tokenizer.encode_chat(chat, add_generation_prompt=True)[0]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == list(glm.tokenizer.stop_ids)


def test_the_card_counts_whole_steps(glm: Any, tmp_path: Path) -> None:
    """Budgets that are no multiple of the batch: 64 steps of 1,024 tokens in pretraining, 3 of 8,192 in tuning."""
    phase = glm.recipe.train.phases[0].model_copy(update={"tokens": Tokens(66_000)})
    train = glm.recipe.train.model_copy(update={"phases": [phase]})
    tune = Recipe.model_validate({"name": "t", "tune": {"tokens": "30000 tokens"}}).tune
    write_card(glm.recipe.model_copy(update={"train": train, "tune": tune}), glm.model, glm.directory, tmp_path, gguf=False)
    card = (tmp_path / "README.md").read_text()
    assert "only 65,536 tokens at" in card and "on 24,576 tokens of conversations" in card and "pretrained on 65,536 tokens." in card


def test_bf16_halves_the_files_and_keeps_the_selection_bias(glm: Any, tmp_path: Path) -> None:
    report = export(with_export(glm.recipe, dtype="bf16"), glm.directory, tmp_path / "export")
    assert report.huggingface.relative < 1e-5 and report.bytes["huggingface"] < 2.3 * 1_325_696
    found = load_file(tmp_path / "export" / "huggingface" / "model.safetensors")
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    torch.testing.assert_close(bias, glm.model.state_dict()["layers.1.ffn.router.bias"], rtol=0, atol=0)
    assert found["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


def test_the_name_that_the_gguf_file_has_in_place_of_a_models_is_told(glm: Any, tmp_path: Path) -> None:
    """llama.cpp would take it for that of a model with another tokenizer."""
    recipe = with_export(glm.recipe, huggingface=False).model_copy(update={"name": "my-phi3"})
    told = "the file names the model my-phi_3, because llama.cpp takes my-phi3 for one with another tokenizer"
    assert export(recipe, glm.directory, tmp_path / "named").notes[-1:] == (told,)
    assert export(with_export(glm.recipe, huggingface=False), glm.directory, tmp_path / "plain").notes == ()


@pytest.mark.parametrize(
    ("name", "architecture", "gguf"),
    [
        ("qwen3moe", "Qwen3MoeForCausalLM", "qwen3moe"),
        pytest.param("olmo2", "Olmo2ForCausalLM", "olmo2", marks=pytest.mark.slow),
        ("llama-llama3", "LlamaForCausalLM", "llama"),
    ],
)
def test_other_families_go_through_the_stage(
    make_run: Callable[..., Any], tmp_path: Path, name: str, architecture: str, gguf: str
) -> None:
    run = make_run(name)
    report = export(run.recipe, run.directory, tmp_path / "export")
    assert (report.architecture, report.gguf_architecture) == (architecture, gguf)
    assert report.huggingface.relative < 1e-5 and report.huggingface.same_choice == 1
    exported = read_model(tmp_path / "export" / "huggingface").state_dict()
    for key, tensor in run.model.state_dict().items():
        torch.testing.assert_close(exported[key], tensor, rtol=0, atol=0)


def test_latent_attention_and_multi_token_prediction_go_through_the_stage(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("deepseek")
    check(run.recipe)
    report = export(run.recipe, run.directory, tmp_path / "export")
    assert report.architecture == "DeepseekV3ForCausalLM" and report.huggingface.relative < 1e-5
    assert report.gguf_architecture == "deepseek2"
    card = (tmp_path / "export" / "huggingface" / "README.md").read_text()
    without = sum(tensor.numel() for name, tensor in run.model.named_parameters() if not name.startswith("mtp."))
    assert f"| parameters | {without:,} (" in card and "latents of 48 and 16" in card
    exported = read_model(tmp_path / "export" / "huggingface").state_dict()
    torch.testing.assert_close(exported["mtp.0.projection.weight"], run.model.state_dict()["mtp.0.projection.weight"], rtol=0, atol=0)


def test_the_tuned_model_goes_out_where_there_is_one(glm: Any, tmp_path: Path) -> None:
    recipe = with_export(glm.recipe, gguf=False).model_copy(update={"tune": Recipe.model_validate({"name": "t", "tune": {}}).tune})
    (glm.directory / "resolved.json").unlink()  # a link into the shared run
    write_json(glm.directory / "resolved.json", as_tree(recipe))
    assert export(recipe, glm.directory, tmp_path / "first").model == "base"
    tuned = {name: tensor + 0.01 for name, tensor in glm.model.state_dict().items()}
    with Checkpoints(glm.directory / "tune" / "checkpoints", recipe.checkpoints, {}) as checkpoints:
        checkpoints.save(7, {"model": tuned}, {})
    report = export(recipe, glm.directory, tmp_path / "second")
    assert report.model == "tuned" and not (tmp_path / "second" / "gguf").exists()
    exported = read_model(tmp_path / "second" / "huggingface").state_dict()
    torch.testing.assert_close(exported["head.weight"], tuned["head.weight"], rtol=0, atol=0)


CHANGED = (
    "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.bias", "model.layers.1.mlp.experts.5.up_proj.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "lm_head.weight", "model.norm.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.2.self_attn.k_norm.weight",
        "model.layers.3.mlp.gate.weight", "model.layers.2.mlp.shared_experts.gate_proj.weight",
    )),
)  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_corrupted_export_is_refused(glm: Any, tmp_path: Path, name: str) -> None:
    """One row of one tensor loses its sign: the gate measures it, whichever tensor it is. Of a router all rows do, and its bias makes one
    expert the first choice: another row may be that of an expert which is never chosen."""
    directory = tmp_path / "hf"
    write_huggingface(glm.model, glm.tokenizer, directory, torch.float32)
    tokens = held_out_tokens(glm.recipe, glm.directory / "shards")
    tensors = load_file(directory / "model.safetensors")
    rows = {"model.embed_tokens.weight": int(tokens[0, 5]), "model.layers.3.mlp.gate.weight": slice(None)}
    row, moved = rows.get(name, 1), 1.0 if name.endswith("e_score_correction_bias") else -0.25
    tensors[name][row] = moved - tensors[name][row]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    parity = compare(glm.model, directory, tokens, torch.float32)
    assert parity.relative > 1e-5 > 1000 * parity.bound
    with pytest.raises(UserError, match=rf"differs from the trained model: tensor {name} of the files is not the model's"):
        require_parity(parity, directory)


def test_an_export_that_does_not_load_is_refused(glm: Any, tmp_path: Path) -> None:
    tokens = held_out_tokens(glm.recipe, glm.directory / "shards")
    whole = tmp_path / "whole"
    write_huggingface(glm.model, glm.tokenizer, whole, torch.float32)

    cut = shutil.copytree(whole, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"transformers cannot load the export in .*cut .*export again"):
        compare(glm.model, cut, tokens, torch.float32)

    other = shutil.copytree(whole, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.0}))
    assert compare(glm.model, other, tokens, torch.float32).relative > 1e-5

    less = shutil.copytree(whole, tmp_path / "less")
    tensors = load_file(less / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.down_proj.weight"]
    save_file(tensors, less / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError):
        require_parity(compare(glm.model, less, tokens, torch.float32), less)


def test_a_near_tie_of_two_experts_is_no_fault(glm: Any, tmp_path: Path) -> None:
    """Two experts with the same gate, whose choice hangs on the last bit: each library may take another one, and the gate must not mind."""
    model = Transformer(glm.recipe.model)
    model.load_state_dict(glm.model.state_dict())
    with torch.no_grad():
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.weight[1] = router.weight[0] * (1 + 1e-7)
            router.bias[:2] = 0.5  # so that exactly these two stand at the border of top_k for many tokens
            router.bias[2] = 0.7
    write_huggingface(model, glm.tokenizer, tmp_path / "hf", torch.float32)
    parity = compare(model, tmp_path / "hf", held_out_tokens(glm.recipe, glm.directory / "shards"), torch.float32)
    assert parity.relative < 1e-5


def test_positions_of_the_last_phase_are_refused_before_work(tmp_path: Path) -> None:
    recipe = recipe_for(MODELS["qwen3"], tmp_path)
    check(recipe)
    rope = RopeChange(scaling="llama3", factor=4, original_max_position_embeddings="128 tokens")
    phase = recipe.train.phases[0].model_copy(update={"rope": rope})
    later = recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": [*recipe.train.phases, phase]})})
    with pytest.raises(UserError, match=r"rope\.scaling llama3, which llama\.cpp supports for its architecture llama and not for qwen3"):
        check(with_export(later, gguf=True))
    check(later)


def test_models_that_no_format_expresses_are_refused_before_work(glm: Any, tmp_path: Path) -> None:
    moe = glm.recipe.model.moe.model_copy(update={"scoring_func": "softmax"})
    recipe = glm.recipe.model_copy(update={"model": glm.recipe.model.model_copy(update={"moe": moe})})
    with pytest.raises(UserError, match=r"no Hugging Face class expresses this model: its gates are softmax .* export.huggingface=false"):
        export(recipe, glm.directory, tmp_path / "out")
    with pytest.raises(UserError, match=r"no architecture of llama.cpp expresses this model: its gates are softmax .* export.gguf=false"):
        check(with_export(recipe, huggingface=False))
    check(with_export(recipe, huggingface=False, gguf=False))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("of_weights", "stated"), [(None, 256), (64, 256), (256, 64)])
def test_a_longer_context_is_that_of_the_tokenizer_too(
    glm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_weights: int | None, stated: int
) -> None:
    """A tokenizer of others states the length of its model; where the model has grown, vLLM would serve it with the former one."""
    write, place = module.write_huggingface, tmp_path / "export" / "huggingface" / "tokenizer_config.json"

    def of_others(model: Any, tokenizer: Any, directory: Path, dtype: torch.dtype) -> None:
        write(model, tokenizer, directory, dtype)
        write_json(directory / place.name, read_json(directory / place.name) | {"model_max_length": 64})

    monkeypatch.setattr(module, "write_huggingface", of_others)
    monkeypatch.setattr(module, "start_context", lambda recipe: of_weights)
    export(with_export(glm.recipe, gguf=False), glm.directory, tmp_path / "export")
    assert read_json(place)["model_max_length"] == stated and read_json(place.with_name("config.json"))["max_position_embeddings"] == 256


def test_rounded_weights_of_the_base_are_told(glm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_dtype", lambda recipe: "float16")
    report = export(with_export(glm.recipe, huggingface=False, gguf=True, dtype="bf16"), glm.directory, tmp_path / "export")
    assert report.stored == read_json(tmp_path / "export" / "parity.json")["stored"] == "float16"
    assert "The weights of start_from are in float16; bf16 rounds them" in " ".join(printed(report).split())


@pytest.fixture
def other_split(glm: Any) -> Any:
    """The run with a tokenizer that splits text as no rule of llama.cpp does."""
    path = glm.directory / "tokenizer"
    shared = path.resolve()
    path.unlink()
    shutil.copytree(shared, path)
    spec = read_json(path / "tokenizer.json")
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    write_json(path / "tokenizer.json", spec)
    return glm


def test_what_llama_cpp_cannot_express_does_not_keep_the_other_formats(other_split: Any, tmp_path: Path) -> None:
    run, out = other_split, tmp_path / "export"
    report = export(run.recipe, run.directory, out)
    assert (out / "huggingface" / "model.safetensors").exists() and not (out / "gguf").exists()
    assert "splits text by another rule" in report.no_gguf and "splits text by another rule" in printed(report)
    assert "llama-server" not in (out / "huggingface" / "README.md").read_text()
    with pytest.raises(UserError, match=r"splits text by another rule.*kept: .*huggingface"):
        export(with_export(run.recipe, gguf=True), run.directory, out)
    assert (out / "huggingface" / "model.safetensors").exists()
    with pytest.raises(UserError, match="splits text by another rule"):
        export(with_export(run.recipe, huggingface=False), run.directory, out)


def test_a_known_tokenizer_is_refused_before_the_first_stage(other_split: Any, tmp_path: Path) -> None:
    recipe = other_split.recipe
    own = recipe.tokenizer.model_copy(update={"path": str(other_split.directory / "tokenizer"), "as_is": True})
    recipe = recipe.model_copy(update={"tokenizer": own})
    check(recipe)
    with pytest.raises(UserError, match="splits text by another rule"):
        check(with_export(recipe, gguf=True))
    with pytest.raises(UserError, match="splits text by another rule"):
        check(with_export(recipe, huggingface=False))


def test_a_refused_format_is_put_aside_and_the_others_are_kept(glm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.export import parity as gate
    from lmworks.weights.verified import verify_export

    load, out = gate._load_in_transformers, tmp_path / "export"

    def wrong(directory: Path) -> Any:
        theirs = load(directory)
        with torch.no_grad():
            theirs.model.layers[3].input_layernorm.weight[0] *= 1.01
        return theirs

    with monkeypatch.context() as patch:
        patch.setattr(gate, "_load_in_transformers", wrong)
        with pytest.raises(UserError) as caught:
            export(glm.recipe, glm.directory, out)
    said = str(caught.value)
    assert "huggingface differs from the trained model: logits by" in said and "first in layer 3 of 4" in said
    assert f"it is in {out / 'refused' / 'huggingface'}" in said and f"kept: {out / 'gguf'}" in said
    assert (out / "refused" / "huggingface" / "model.safetensors").exists() and not (out / "huggingface").exists()
    whole = read_json(out / "parity.json")
    assert whole["verdict"] == "refused" and whole["refused"].keys() == {"huggingface"} and "gguf/model.gguf" in whole["files"]
    one = read_json(out / "refused" / "huggingface" / "parity.json")
    assert one["parity"]["first_difference"] == "layer 3 of 4" and "position" in one["parity"]["where"]
    verify_export(out / "gguf")
    with pytest.raises(UserError, match="was refused by the export"):
        verify_export(out / "refused" / "huggingface")
    export(glm.recipe, glm.directory, out)
    assert not (out / "refused").exists() and (out / "huggingface" / "model.safetensors").exists()


@pytest.mark.parametrize(("package", "formats"), [("transformers", {"gguf": False}), ("gguf", {"huggingface": False})])
def test_a_missing_package_is_named(
    glm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, formats: dict[str, bool]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs? .*{package}.*pip install 'lmworks\[export\]'"):
        export(with_export(glm.recipe, **formats), glm.directory, tmp_path / "out")
