"""The first operator whose result is not finite is named: forward, backward, in a run, and in a replay of its batch."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_bad_steps import nan_loss, poison
from torch import Tensor, nn

from lmworks.cli.main import main
from lmworks.errors import UserError
from lmworks.io.run_layout import of_model
from lmworks.model import Transformer, documents
from lmworks.model.init import initialize
from lmworks.model.layers import Linear
from lmworks.recipe.schema.model import Model
from lmworks.run.replay import replay
from lmworks.train.step_inspector import FirstNonFinite
from lmworks.watch.ledger import read_ledger
from saved_run import save_run
from small_config import small_config
from tiny_run import Tiny, before_each_step, checkpoint, curve, same_bits, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORT = ("train.phases.general.tokens=2048 tokens", "train.phases.long.tokens=1024 tokens")  # 10 and 4 steps
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def model(**options: Any) -> Transformer:
    shape = small_config(num_hidden_layers=3, num_key_value_heads=4, head_dim=12)
    return initialize(Transformer(Model(**shape, max_position_embeddings="64 tokens", **options)), 3)


def first(found: Transformer) -> str | None:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (2, 12)))
    with FirstNonFinite([found]) as seen:
        found.loss(tokens, tokens.roll(-1, 1), torch.tensor([0, 5, 12, 20, 24], dtype=torch.int32)).total.backward()
    return seen.found


@pytest.mark.parametrize("options", [
    {"use_qk_norm": True}, {"moe": MOE}, {"mla": MLA}, {"mtp": {"num_nextn_predict_layers": 1}}, {"sliding_window": "4 tokens",
    "final_logit_softcapping": 30.0},
    {"residual_dropout": 0.1, "attention_dropout": 0.1, "tie_word_embeddings": True},
])  # fmt: skip
@pytest.mark.parametrize("plain", [False, True])
def test_nothing_sound_is_blamed(options: dict[str, Any], plain: bool) -> None:
    """Masks of -inf, memory that nobody has written, and what they are copied into are part of every sound step."""
    assert first(model(**options).plain(plain)) is None


@pytest.mark.parametrize("where", ["layers.1.ffn.down", "layers.2.attention.query", "norm"])
def test_an_operator_inside_a_block_is_named(where: str) -> None:
    found = model()
    found.get_submodule(where).register_forward_hook(lambda module, inputs, output: output.mul(1e38).mul(1e38))
    assert first(found) == f"mul of {where}, forward pass: its result is infinite"


class ZeroDivision(torch.autograd.Function):
    """Nothing forward, and a division by zero backward."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.div(torch.zeros(()))


def test_an_operator_of_the_backward_pass_is_named() -> None:
    found = model()
    found.get_submodule("layers.1.ffn.gate").register_forward_hook(lambda module, inputs, output: ZeroDivision.apply(output))
    said = first(found)
    assert said is not None and said.startswith("div of layers.1.ffn.gate, backward pass: its result is ")


@pytest.mark.parametrize("by", [1.0, 1e38])
def test_attention_that_stays_compiled_is_one_operator(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """FlexAttention needs a GPU; here what stands in its place is compiled, forward and backward, and sees all keys."""
    compiled = torch.compile(lambda query, key, value: (query @ key.mT).softmax(-1) @ value * by * by, backend="aot_eager")
    calls: list[int] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, blocks: object) -> Tensor:
        calls.append(len(query))
        return compiled(query, key, value)

    monkeypatch.setattr(documents, "_BLOCKED", 1)
    monkeypatch.setattr(documents, "has_flex", lambda device: True)
    monkeypatch.setattr(documents, "attend_flex", attend)
    found = first(model())
    assert calls
    assert found == (None if by == 1 else "flex_attention of layers.0.attention, forward pass: its result is infinite")
    assert documents.attend_flex is attend


def test_a_weight_that_is_not_finite_is_named() -> None:
    found = model()
    with torch.no_grad():
        found.layers[0].ffn.down.weight[0, 0] = float("nan")
    assert first(found) == "layers.0.ffn.down.weight, before the step"


def test_watching_changes_nothing_and_leaves_nothing_behind() -> None:
    one, other = model(residual_dropout=0.1), model(residual_dropout=0.1)
    torch.manual_seed(1)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (2, 12)))
    other.loss(tokens, tokens.roll(-1, 1), torch.tensor([0, 5, 12, 20, 24], dtype=torch.int32)).total.backward()
    torch.manual_seed(1)
    first(one)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())


def overflow(patch: pytest.MonkeyPatch, step: int, times: int = 99) -> list[int]:
    """From a step on, the feed-forward of layer 0 overflows in training, so often; the rows that go through it at a time are noted."""
    honest, now, rows = Linear.forward, {"step": -1, "left": times}, []
    chosen: list[nn.Module] = []
    built = Transformer.__init__

    def remember(self: Transformer, *given: Any) -> None:
        built(self, *given)
        chosen[:] = [self.layers[0].attention.output]

    def broken(self: Linear, x: Tensor) -> Tensor:
        out = honest(self, x)
        if not (chosen and self is chosen[0] and torch.is_grad_enabled()):
            return out
        rows.append(len(x))
        if now["step"] < step or not now["left"]:
            return out
        now["left"] -= 1
        return out.mul(1e38).mul(1e38)

    patch.setattr(Transformer, "__init__", remember)
    patch.setattr(Linear, "forward", broken)
    before_each_step(patch, lambda step: now.update(step=step))
    return rows


SAID = "mul of layers.0.attention.output, forward pass: its result is infinite"


def told(run: Tiny) -> list[dict[str, Any]]:
    return [event for event in read_ledger(run.run_dir / "ledger.jsonl") if event["event"] == "not_finite"]


def test_the_ledger_names_the_operator_that_a_bad_step_began_with(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by running the step again, in its own micro-batches: all of a rank's rows at once may not fit."""
    rows = overflow(monkeypatch, 6)
    with pytest.raises(UserError, match="not finite"):
        tiny_copy.pretrain("stability.max_bad_steps=2", "stability.max_rollbacks=0", "train.micro_batch_sequences=2")
    assert [(event["step"], event["first"], event["stage"]) for event in told(tiny_copy)] == [(6, SAID, "pretrain")]
    assert max(rows) == 4, "two of the longest sequences, or four of half the length; the step has eight"


@pytest.mark.parametrize("asked", [False, True])
def test_what_does_not_happen_again_is_seen_only_by_who_watches_every_step(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    overflow(monkeypatch, 2, times=1)
    tiny_copy.pretrain(f"stability.detect_anomaly={str(asked).lower()}", *SHORT)
    sound = "no operator: when the step was run again, forward and backward were finite"
    assert [event["first"] for event in told(tiny_copy)] == [SAID if asked else sound]


def test_looking_again_leaves_no_trace(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout: a run that looks at where a step went wrong ends with the bits of one that does not look."""
    other = tiny_copy.copy(tiny_copy.run_dir.parent / "other")
    for run, looks in ((tiny_copy, True), (other, False)):
        with monkeypatch.context() as patch:
            poison(patch, [4], nan_loss)
            if not looks:
                patch.setattr("lmworks.train.step_inspector.first_non_finite", lambda *given: None)
            run.pretrain("model.residual_dropout=0.1", *SHORT)
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(other.run_dir)) == []
    assert curve(tiny_copy.run_dir) == curve(other.run_dir)


@pytest.fixture
def lmworks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The command line, in this process; what it printed."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["lmworks", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as stop:  # as after --help
            code = stop.code
        assert not code
        return capsys.readouterr().out

    return call


def test_a_kept_batch_is_replayed(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, lmworks: Callable[..., str]) -> None:
    """Through the weights of before: what the step saw, loss and norm alike; and with the fault still there, the operator."""
    run = tiny_copy.run_dir
    more = ("model.moe.temperature=4", "model.moe.temperature_steps=18", "model.use_qk_norm=true",
            "train.phases.long.qk_norm_steps=6 steps")  # fmt: skip
    with monkeypatch.context() as patch:
        poison(patch, [6, 15], nan_loss)
        tiny_copy.walk(*more, "train.save_every=3 steps", "checkpoints.keep_last=99", last="pretrain")
    assert "replay" in lmworks("--help")
    before = checkpoint(run)
    found = json.loads(lmworks("replay", run, "15", "--json"))
    assert (found["step"], found["checkpoint"], found["first"]) == (15, "step-00000015", None)
    reference = tiny_copy.copy(run.parent / "reference")
    for path in (reference.run_dir / "checkpoints").glob("step-*"):
        if path.name > "step-00000015":
            shutil.rmtree(path)
    reference.pretrain(*more)  # goes on from step 15 without the fault, in the second phase
    line = next(line for line in curve(reference.run_dir) if line["step"] == 16)
    # an eager pass under watch against the trainer's: the same operators in the same order
    assert (found["loss"], found["grad_norm"]) == pytest.approx((line["train/loss"], line["optim/grad_norm"]), rel=1e-5)
    assert len(found["sequences"]) == 4 and found["sequences"][0]["loss"] >= found["sequences"][1]["loss"]
    with monkeypatch.context() as patch:
        overflow(patch, -1)
        said = lmworks("replay", run, 6, "--checkpoint", 9)
    assert f"first non-finite result: {SAID}" in said.replace("\n", " ")
    assert "the batch of step 6 through step-00000009" in said
    assert same_bits(checkpoint(run), before) == []


@pytest.mark.parametrize(("damage", "said"), [
    ("none", "has no saved bad batch of pretraining"), ("other step", "no batch of step 3 was saved; there are batches of the steps 6"),
    ("cut", "step-00000006.npz is damaged, or not a batch that a run has saved"), ("token", "is damaged, or of another run"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_one_line(tiny_copy: Tiny, damage: str, said: str) -> None:
    path = tiny_copy.run_dir / "bad_batches" / "step-00000006.npz"
    tokens, starts = np.zeros((2, 8), np.int32), np.array([0, 8, 16], np.int32)
    if damage != "none":
        path.parent.mkdir()
        np.savez_compressed(path, tokens=tokens + (10**6 if damage == "token" else 0), labels=tokens, cu_seqlens=starts)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    (tiny_copy.run_dir / "checkpoints" / "step-00000006").mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError, match=said):
        replay(tiny_copy.run_dir, "base", 3 if damage == "other step" else 6, 6)


@pytest.mark.parametrize(("model_name", "said"), [
    ("dpo", "batches of dpo cannot be computed again: its loss compares two answers"),
    ("grpo", "batches of grpo cannot be computed again: its batches are answers that the model sampled"),
])  # fmt: skip
def test_stages_with_another_objective_are_refused(tiny: Tiny, tmp_path: Path, model_name: str, said: str) -> None:
    save_run(tiny, tmp_path / "run")
    save_bad_batch(tmp_path / "run" / of_model(model_name).folder)
    with pytest.raises(UserError, match=said):
        replay(tmp_path / "run", model_name, None, None)


def test_a_batch_of_tuning_is_replayed(tiny: Tiny, tmp_path: Path) -> None:
    tuned = save_run(tiny, tmp_path / "run")["tuned"]
    tokens, starts = save_bad_batch(tmp_path / "run" / "tune")
    found = replay(tmp_path / "run", "tuned", None, None)
    loss = tuned.loss(*map(torch.from_numpy, (tokens, tokens, starts))).head.cross_entropy / tokens.size
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)


def save_bad_batch(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Two sequences of one document each, as the batch of step 6."""
    tokens, starts = np.arange(16, dtype=np.int32).reshape(2, 8), np.array([0, 8, 16], np.int32)
    (folder / "bad_batches").mkdir(parents=True)
    np.savez_compressed(folder / "bad_batches" / "step-00000006.npz", tokens=tokens, labels=tokens, cu_seqlens=starts)
    return tokens, starts


def culprit_of(tiny: Tiny) -> str:
    """As one of two ranks, of which the second alone meets an overflow."""
    import torch.distributed as dist

    from lmworks.parallel.mesh import Ranks
    from lmworks.train.pretrain import pretrain

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            overflow(patch, 2)
        recipe = tiny.resolve("layout.dp_shard=2", "layout.zero=3", "stability.max_bad_steps=2", "stability.max_rollbacks=0").recipe
        with pytest.raises(UserError, match="not finite") as stopped:
            pretrain(training_context(recipe, tiny.run_dir, ranks=Ranks(recipe.layout)))
        return str(stopped.value)


def test_the_rank_that_it_began_on_is_named(ranks: Any, tiny_copy: Tiny) -> None:
    ranks.run(culprit_of, 2, tiny_copy)
    (event,) = told(tiny_copy)
    assert event["first"] == f"{SAID}, on rank 1"
