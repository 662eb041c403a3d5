"""Tuning with low-rank adapters: small checkpoints, resume, merging on load, and input that is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.export.export import find_adapter, write_adapter
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.model.lora import adapters, attach, merge
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.model import Lora, Model, is_adapter
from lmworks.weights.run_models import load_model
from patience import PATIENCE
from rank_pool import FORKS
from saved_run import save_run
from small_config import small_config
from tiny_run import Tiny, checkpoint, curve, same_bits, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LORA = ("tune.lora.rank=4", "tune.lora.targets=[all-linear,experts]", "tune.learning_rate=0.01", "tune.tokens=1Ki")


@pytest.fixture
def based(tiny: Tiny, tmp_path: Path) -> Tiny:
    """A run whose pretraining is done."""
    save_run(tiny, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "tune")
    return Tiny(tiny.recipe, tmp_path / "run")


def tune(tiny: Tiny, *overrides: str) -> None:
    """The stage alone."""
    from lmworks.export.peft import read_adapter
    from lmworks.train.tune import tune

    recipe = tiny.resolve(*LORA, *overrides).recipe
    from lmworks.io.files import write_json
    from lmworks.recipe.changes import as_tree

    write_json(tiny.run_dir / "resolved.json", as_tree(recipe))
    tune(training_context(recipe, tiny.run_dir, load_adapter=read_adapter))


def test_checkpoints_hold_the_adapters_and_the_loaded_model_is_merged(based: Tiny) -> None:
    tune(based)
    saved = checkpoint(based.run_dir, folder="tune/checkpoints")
    of_model = {name.removeprefix("model/"): value for name, value in saved.items() if name.startswith("model/")}
    assert of_model and all(map(is_adapter, of_model))
    assert {name.split(".", 1)[1] for name in saved if name.startswith("optimizer/first")} == set(of_model)
    assert any(value.any() for name, value in of_model.items() if name.endswith("B")), "something was learned"
    path = listing.directories(based.run_dir / "tune" / "checkpoints")[-1]
    base = listing.directories(based.run_dir / "checkpoints")[-1]
    about = listing.read_meta(path)["meta"]["lora"]
    assert (about["base"], about["hash"]) == (f"checkpoints/{base.name}", listing.content_of(base))
    merged, before = load_model(based.run_dir, "tuned"), load_model(based.run_dir, "base")
    assert merged.state_dict().keys() == before.state_dict().keys()
    changed = {name for name, value in merged.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert changed == {name.replace(".lora.A", ".weight").replace("_lora.A", "") for name in of_model if name.endswith("A")}
    name = "layers.1.attention.query"
    plain = before.state_dict()[f"{name}.weight"] + 8.0 * of_model[f"{name}.lora.B"] @ of_model[f"{name}.lora.A"]  # alpha 32 / rank 4
    assert torch.allclose(merged.state_dict()[f"{name}.weight"], plain, atol=1e-6)
    losses = [line["train/loss"] for line in curve(based.run_dir / "tune")]
    assert losses[-1] < losses[0]


def _live(tiny: Tiny, overrides: tuple[str, ...], kill_at: int) -> None:
    from tiny_run import before_each_step

    with pytest.MonkeyPatch.context() as patch:
        if kill_at:
            before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == kill_at else None)
        tune(tiny, *overrides)


def in_a_process(tiny: Tiny, *overrides: str, kill_at: int = 0) -> int | None:
    process = FORKS.Process(target=_live, args=(tiny, overrides, kill_at))
    process.start()
    process.join(PATIENCE)
    return process.exitcode


def test_killed_it_resumes_bit_for_bit(based: Tiny, tmp_path: Path) -> None:
    options = ("tune.lora.dropout=0.1", "train.save_every=1 steps", "tune.tokens=1536 tokens")
    whole = based.copy(tmp_path / "whole")
    tune(whole, *options)
    assert in_a_process(based, *options, kill_at=3) == -signal.SIGKILL
    assert in_a_process(based, *options) == 0
    assert same_bits(checkpoint(based.run_dir, folder="tune/checkpoints"), checkpoint(whole.run_dir, folder="tune/checkpoints")) == []
    assert [line["step"] for line in curve(based.run_dir / "tune")] == list(range(1, 7))


def test_other_adapters_and_another_base_are_refused(based: Tiny) -> None:
    tune(based)
    with pytest.raises(UserError, match=r"lora\.rank is 4 there and 2 here"):
        tune(based, "tune.lora.rank=2")
    path = listing.directories(based.run_dir / "checkpoints")[-1]
    other = listing.directories(based.run_dir / "checkpoints")[0]
    shutil.rmtree(path)
    with pytest.raises(UserError, match="which does not exist"):
        load_model(based.run_dir, "tuned")
    shutil.copytree(other, path)
    with pytest.raises(UserError, match="adapters of another base model"):
        load_model(based.run_dir, "tuned")


def test_an_adapter_in_pefts_format_goes_out_and_comes_back(based: Tiny, tmp_path: Path) -> None:
    tune(based)
    recipe = based.resolve(*LORA).recipe
    adapter = find_adapter(recipe, based.run_dir)
    assert adapter is not None
    write_adapter(recipe, adapter, tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 32.0, "LORA")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    saved = checkpoint(based.run_dir, folder="tune/checkpoints")
    assert torch.equal(
        tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"], saved["model/layers.1.attention.query.lora.A"]
    )
    assert torch.equal(
        tensors["base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"], saved["model/layers.1.ffn.experts.up_lora.B"][3]
    )
    shutil.move(based.run_dir / "tune", tmp_path / "first")
    tune(based, f"tune.lora.init_from={tmp_path / 'peft'}", "tune.learning_rate=1e-11")
    again = checkpoint(based.run_dir, folder="tune/checkpoints")
    for name, value in saved.items():
        if name.startswith("model/"):
            assert torch.allclose(again[name], value, atol=1e-7)


def _config(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        change(config)
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    return edit


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), (), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("["), (), "is not the config of an adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), (), "is damaged"),
        (_config(lambda config: config.update(peft_type="IA3")), (), "lmworks reads LORA"),
        (_config(lambda config: config.update(use_dora=True)), (), "use_dora true, which lmworks does not support"),
        (_config(lambda config: config.update(lora_alpha=9)), (), r"lora_alpha 9, and the recipe has lora\.alpha 32"),
        (
            lambda folder: None, ("tune.lora.targets=[attention]",),
            r"of other matrices than lora\.targets names; set lora\.targets to its own: \[",
        ),
        (lambda folder: None, ("tune.lora.rank=2",), r"has r 4, and the recipe has lora\.rank 2"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    based: Tiny, tmp_path: Path, damage: Callable[[Path], None], options: tuple[str, ...], message: str
) -> None:
    from lmworks.export.peft import read_peft, write_peft

    recipe = based.resolve(*LORA).recipe
    model, lora = recipe.model, recipe.tune.lora  # type: ignore[union-attr]
    assert lora is not None
    whole = Transformer(model)
    attach(whole, lora)
    state = {name: value for name, value in initialize(whole, 1).state_dict().items() if is_adapter(name)}
    from lmworks.checkpoint import Checkpoints

    with Checkpoints(tmp_path / "saved", recipe.checkpoints, {}) as checkpoints:
        checkpoints.save(1, {"model": state}, {}, wait=True)
    write_peft(listing.directories(tmp_path / "saved")[-1], lora, model, family_of(model), "base", "abc", tmp_path / "peft")
    damage(tmp_path / "peft")
    other = based.resolve(*LORA, *options).recipe
    found = Transformer(model)
    attach(found, other.tune.lora)  # type: ignore[union-attr, arg-type]
    into = {name: value for name, value in found.state_dict().items() if is_adapter(name)}
    with pytest.raises(UserError, match=message):
        read_peft(tmp_path / "peft", into, model, family_of(model), other.tune.lora, "abc")  # type: ignore[union-attr, arg-type]


def test_an_adapter_of_another_base_is_refused(based: Tiny, tmp_path: Path) -> None:
    from lmworks.export.peft import read_peft

    tune(based)
    recipe = based.resolve(*LORA).recipe
    adapter = find_adapter(recipe, based.run_dir)
    assert adapter is not None
    write_adapter(recipe, adapter, tmp_path / "peft")
    lora = recipe.tune.lora  # type: ignore[union-attr]
    for changes, message in (({}, "has the hash other"), ({"hidden_size": 64}, "another base model: .* has the shape")):
        model = recipe.model.model_copy(update=changes)
        with torch.device("meta"):
            found = Transformer(model)
            attach(found, lora)  # type: ignore[arg-type]
        state = {name: torch.zeros(value.shape) for name, value in found.state_dict().items() if is_adapter(name)}
        here = listing.content_of(listing.directories(based.run_dir / "checkpoints")[-1]) if changes else "other"
        with pytest.raises(UserError, match=message):
            read_peft(tmp_path / "peft", state, model, family_of(model), lora, here)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tune.lora.rank=0", r"tune\.lora\.rank"),
        ("tune.lora.rank=64", r"lora\.rank 64 is larger than the matrix layers\.0\.attention\.query \(32 x 32\); use at most 32"),
        ("tune.lora.targets=[q_proj]", r"'q_proj' matches no matrix of this model; known are attention, mlp, experts, all-linear, "),
        ("tune.lora.targets=[]", r"tune\.lora\.targets"),
        ("tune.ewc.weight=1", r"tune\.ewc.*leave"),
    ],
)
def test_bad_options_end_before_anything_is_trained(tiny_copy: Tiny, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_copy.walk("tune.lora.targets=[attention]", override)
    assert not listing.directories(tiny_copy.run_dir / "checkpoints")


@pytest.mark.parametrize("experts", [False, True])
def test_adapters_equal_the_plain_formula(experts: bool) -> None:
    """Loss and gradients of adapters are those of W + scale B A with respect to A and B, within 1e-5 of the largest (fp32)."""
    moe = {"moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
                   "balance": {"sequence_aux_loss_weight": 0.0}}} if experts else {}  # fmt: skip
    lora = Lora(rank=4, alpha=8, rslora=experts, targets=("all-linear", "experts") if experts else ("all-linear",))
    assert lora.scale == (4.0 if experts else 2.0)
    model, plain = (Transformer(Model.model_validate(small_config(**moe))) for _ in range(2))
    attach(model, lora)
    initialize(model, 3)
    for *_, adapter in adapters(model):
        torch.nn.init.normal_(adapter.B, std=0.1)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not is_adapter(name)})
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = model.loss(tokens, tokens).total
    loss.backward()
    factors = {name: (adapter.A.detach().clone().requires_grad_(), adapter.B.detach().clone().requires_grad_())
               for name, _, _, adapter in adapters(model)}  # fmt: skip
    weights = dict(plain.named_parameters())
    merged = {}
    for name, (a, b) in factors.items():
        key = name if name in weights else f"{name}.weight"
        merged[key] = weights[key].detach() + lora.scale * b @ a
    expected = torch.func.functional_call(plain, {**{k: v.detach() for k, v in weights.items()}, **merged}, (tokens,))
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), tokens.flatten(), reduction="sum")
    assert torch.allclose(loss.detach(), expected_loss.detach(), rtol=1e-5)
    expected_loss.backward()
    for name, _, _, adapter in adapters(model):
        for ours, theirs in zip((adapter.A, adapter.B), factors[name], strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max().clamp_min(1.0), name
    frozen = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert frozen and not any(map(is_adapter, frozen))
    model.eval()
    logits = model(tokens)
    assert torch.allclose(merge(model)(tokens), logits, atol=1e-5)


def test_epochs_and_the_best_weights_by_held_out_loss(based: Tiny) -> None:
    """A rate that rises until the loss does: the stage ends with the weights of the lowest held-out loss, which are kept."""
    options = ("tune.epochs=2", "tune.tokens=null", "tune.final_weights=best", "tune.validation_fraction=0.1",
               "train.validate_every=3 steps",
               "tune.learning_rate=3.0", "tune.lr_schedule.warmup=20 steps", "tune.lr_schedule.decay=1 steps",
               "checkpoints.keep_last=1", "checkpoints.keep_best=false")  # fmt: skip
    tune(based, *options)
    manifest = json.loads((based.run_dir / "tune" / "data" / "manifest.json").read_text(encoding="utf-8"))["data"]["sums"]
    assert manifest["validation"]["conversations"] == 10
    lines = curve(based.run_dir / "tune")
    losses = {line["step"]: line["validation/loss"] for line in lines if "validation/loss" in line}
    best = min(losses, key=lambda step: losses[step])
    last = lines[-1]["step"]
    assert best < last, losses
    kept = [listing.step_of(path) for path in listing.directories(based.run_dir / "tune" / "checkpoints")]
    assert kept == [best, last]
    from lmworks.weights.run_models import final_checkpoint

    assert listing.step_of(final_checkpoint(based.run_dir, "tuned")) == best
    events = [json.loads(line) for line in (based.run_dir / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    found = next(event for event in events if event["event"] == "best_weights")
    assert (found["used_step"], found["step"], found["lowest"]) == (best, last, losses[best])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("tune.epochs=2",), r"tune\.epochs.*leave one of the two out"),
        (("tune.epochs=2", "tune.tokens=null", "tune.data.0.weight=2"), r"tune\.data\.0\.weight.*equally often"),
        (("tune.final_weights=best", "tune.validation_fraction=0"), r"tune\.final_weights.*nothing is held out"),
        (("train.deepspeed={}", "optimizer.kind=adamw", "layout.zero=2", "tune.lora.rank=2"), r"tune\.lora.*DeepSpeed"),
    ],
)
def test_what_contradicts_itself_is_refused(tiny: Tiny, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.resolve(*overrides)


def test_a_later_stage_starts_from_the_merged_weights(based: Tiny) -> None:
    """`start` of alignment loads what evaluation loads."""
    from lmworks.io.run_layout import of_stage
    from lmworks.train.stage import weights_before

    tune(based)
    recipe = based.resolve(*LORA, "dpo.data=[{name: pairs, kind: files, path: pairs.jsonl}]").recipe
    begun = weights_before(training_context(recipe, based.run_dir), of_stage("dpo"))
    expected = load_model(based.run_dir, "tuned").state_dict()
    found = begun.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_run_starts_from_a_checkpoint_of_adapters(based: Tiny) -> None:
    """`start_from` merges them, as evaluation does."""
    from lmworks.checkpoint.communicator import world_communicator
    from lmworks.run.start_weights import load_start_weights
    from lmworks.train.build import build_model
    from lmworks.weights.run_models import final_checkpoint

    tune(based)
    recipe = based.resolve(f"start_from={final_checkpoint(based.run_dir, 'tuned')}", "tokenizer.vocab_size=null", "tune=null").recipe
    model = build_model(recipe)
    load_start_weights(recipe, model, world_communicator())
    expected, found = load_model(based.run_dir, "tuned").state_dict(), model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    (data,) = final_checkpoint(based.run_dir, "tuned").glob("data-*.bin")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(UserError, match="other content than was written"):
        load_start_weights(recipe, model, world_communicator())
