"""Preference optimization: losses by their formulas, the data, and the stage from start to end, killed and resumed."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.metrics.log import read
from lmworks.recipe.schema.align import Dpo
from lmworks.recipe.timeline import steps_of
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train import answers as reference
from lmworks.train.answers import Answer, pack
from lmworks.train.data.preference_forms import other_rows, prompt_key
from lmworks.train.data.preferences import build_preferences, encode_answer, read_preferences
from lmworks.train.dpo import Pairs, Preference, dpo, preference_loss
from saved_run import save_run
from tiny_run import Tiny, before_each_step, checkpoint, curve, same_bits, training_context

SUMS = [(a, b) for a in range(9) for b in range(9)]


def pair(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"What is {a} + {b}?", "chosen": f"{a} + {b} is {a + b}.", "rejected": f"No idea, perhaps {a}."}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def options_of(path: Path, **changes: Any) -> str:
    node = {
        "data": [{"name": "sums", "kind": "files", "path": str(path)}], "sequence_length": "64 tokens", "pairs_per_step": 16,
        "learning_rate": 0.001, "validation_fraction": 0.1,
    } | changes  # fmt: skip
    return f"dpo={json.dumps(node)}"


def stage(tiny: Tiny, run_dir: Path, path: Path, *overrides: str, **changes: Any) -> None:
    recipe = tiny.resolve(f"run_dir={run_dir}", options_of(path, **changes), *overrides).recipe
    dpo(training_context(recipe, run_dir))


# losses ---------------------------------------------------------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plain(options: Dpo, logp: list[list[float]], reference: list[list[float]], lengths: list[list[int]], labels: list[bool]) -> float:
    """The formulas of the papers, pair by pair."""
    total, divergence = 0.0, max(0.0, sum(p[1] - r[1] for p, r in zip(logp, reference, strict=True)) / len(logp))
    for p, r, n, label in zip(logp, reference, lengths, labels, strict=True):
        if options.loss == "sigmoid":
            margin = options.beta * ((p[0] - r[0]) - (p[1] - r[1]))
            total += -(1 - options.label_smoothing) * math.log(sigmoid(margin)) - options.label_smoothing * math.log(sigmoid(-margin))
        elif options.loss == "ipo":
            total += ((p[0] - r[0]) / n[0] - (p[1] - r[1]) / n[1] - 1 / (2 * options.beta)) ** 2
        elif options.loss == "simpo":
            total += -math.log(sigmoid(options.beta * (p[0] / n[0] - p[1] / n[1]) - options.simpo_gamma))
        else:
            reward = options.beta * (p[0] - r[0] - divergence)
            weight = options.desirable_weight if label else options.undesirable_weight
            total += weight * (1 - sigmoid(reward if label else -reward))
    return total / len(logp)


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "sigmoid"}, {"loss": "sigmoid", "label_smoothing": 0.2, "beta": 0.5}, {"loss": "ipo", "beta": 0.3},
        {"loss": "simpo", "beta": 2.0},
        {"loss": "kto", "desirable_weight": 1.3, "undesirable_weight": 0.7},
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_gradients_are_those_of_the_papers(options: dict[str, Any]) -> None:
    """In float64, against the formulas and their central differences."""
    draw = np.random.default_rng(3)
    node = Dpo.model_validate(options)
    logp, reference = -draw.uniform(2, 20, (6, 2)), -draw.uniform(2, 20, (6, 2))
    lengths, labels = draw.integers(2, 9, (6, 2)), np.array([True, False, True, True, False, False])

    def at(values: np.ndarray) -> float:
        return plain(node, values.tolist(), reference.tolist(), lengths.tolist(), labels.tolist())

    def ours(values: Tensor) -> Tensor:
        tensors = (torch.from_numpy(reference), torch.from_numpy(lengths).double(), torch.from_numpy(labels))
        return preference_loss(node, values, *tensors).loss

    values = torch.from_numpy(logp).requires_grad_()
    loss = ours(values)
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == pytest.approx(at(logp), abs=1e-12)
    for index in np.ndindex(6, 2):
        if node.loss == "kto" and index[1] == 1:
            assert gradient[index] == 0, "the estimate of the divergence is a constant"
            continue
        step = np.zeros_like(logp)
        step[index] = 1e-6
        assert float(gradient[index]) == pytest.approx((at(logp + step) - at(logp - step)) / 2e-6, abs=1e-7)


def test_accuracy_counts_larger_rewards_and_half_of_the_ties() -> None:
    reference = torch.zeros(3, 2)
    options, logp = Dpo.model_validate({"loss": "sigmoid"}), torch.tensor([[2.0, 1.0], [1.0, 2.0], [3.0, 1.0]])
    found = preference_loss(options, logp, reference, reference + 1)
    assert found.accuracy.tolist() == pytest.approx(2 / 3)
    tie = preference_loss(options, reference, reference, reference + 1)
    assert tie.accuracy.tolist() == 0.5


def test_what_rounding_makes_of_a_tie_counts_half() -> None:
    """Of labels of 3 nats each, 100 in an answer: a difference of 1e-5 is that of fp32 sums in another order, and in fp64 a decision."""
    scores, lengths = torch.full((4, 2), -300.0, dtype=torch.float64), torch.full((4, 2), 100.0)
    reference, logp = scores.clone(), scores.clone()
    logp[:, 0] += torch.tensor([1e-5, 1e-5, 1e-5, -1e-5], dtype=torch.float64)
    for loss, labels in (("sigmoid", None), ("ipo", None), ("kto", torch.ones(4, dtype=torch.bool))):
        options = Dpo.model_validate({"loss": loss})
        found = {
            dtype: float(preference_loss(options, logp, reference, lengths, labels, torch.finfo(dtype).eps).accuracy)
            for dtype in (torch.float32, torch.float64)
        }
        assert found[torch.float32] == 0.5 and found[torch.float64] == 0.75, loss
        logp_apart = torch.where(logp > reference, logp + 0.01, logp)
        apart = preference_loss(options, logp_apart, reference, lengths, labels, torch.finfo(torch.float32).eps)
        assert apart.accuracy > 0.5, "what has been learned is no rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_objective_knows_in_which_type_its_scores_are_rounded(dtype: torch.dtype) -> None:
    """Cross-entropies are computed in fp32 at least and handed on in fp64. Rounding of bf16 activations would hide what has been learned
    for long."""
    answer = Answer(np.arange(101, dtype=np.int32), np.arange(101) > 0)
    reference_12 = torch.full((1, 2), -300.0, dtype=torch.float64)
    model: Any = SimpleNamespace(compute_dtype=dtype)
    objective = Preference(Dpo(), model, Pairs([(answer, answer)], reference_12, None, 1, 1, 0), None, 128, 1)

    def accuracy(difference: float) -> float:
        packed = objective.packed(0)
        nats_BT = torch.full(packed.owner_BT.shape, 3.0, dtype=torch.float64)
        nats_BT[packed.owner_BT == 0] -= difference / 100
        return float(objective._score(packed, -nats_BT, objective._train, [0]).accuracy)

    assert accuracy(1e-5) == (1 if dtype == torch.float64 else 0.5)
    assert accuracy(0.01) == 1 and accuracy(-0.01) == 0


def test_the_reference_point_of_kto_is_not_negative() -> None:
    """Where answers to other prompts have become less likely, their mean is below 0, and a divergence is not."""
    logp, labels = torch.tensor([[30.0, -3.0], [30.0, -5.0]]), torch.tensor([True, False])
    found = preference_loss(Dpo.model_validate({"loss": "kto"}), logp, torch.zeros(2, 2), torch.ones(2, 2), labels)
    assert found.divergence is not None and found.divergence.item() == 0
    assert found.accuracy.item() == 0.5, "a good answer that has become more likely, and a bad one"


def test_answers_are_packed_with_their_own_labels(tiny: Tiny) -> None:
    tokenizer = load_tokenizer(tiny.run_dir / "tokenizer")
    conversations = [
        [{"role": "user", "content": "Say one."}, {"role": "assistant", "content": "One"}, {"role": "user", "content": "And?"},
         {"role": "assistant", "content": answer}]
        for answer in ("Two", "Three hundred", "Four")
    ]  # fmt: skip
    answers = [encode_answer(tokenizer, one) for one in conversations]
    packed = pack(answers, 64, 0)
    for number, (answer, text) in enumerate(zip(answers, ("Two", "Three hundred", "Four"), strict=True)):
        mine = packed.batch.labels[(packed.owner_BT == number).numpy()]
        assert tokenizer.decode(mine.tolist(), skip_special=True) == text, "the last answer only, in order"
        assert mine[-1] in tokenizer.stop_ids
        assert int(packed.lengths()[number]) == len(mine) == int(answer.learned.sum())
    values = [np.arange(int(answer.learned.sum())) + 10.0 * number for number, answer in enumerate(answers)]
    assert packed.sums(packed.place(values)).tolist() == [one.sum() for one in values]
    assert len(packed.batch.cu_seqlens) == len(answers) + 1 + len(packed.batch.tokens)


# data -----------------------------------------------------------------------------------------------------------------------------------


def build(tiny: Tiny, path: Path, out: Path, **changes: Any) -> dict[str, Any]:
    recipe = tiny.resolve(options_of(path, **changes)).recipe
    return build_preferences(recipe, load_tokenizer(tiny.run_dir / "tokenizer"), out)


def test_common_forms_are_one_pair_and_bad_rows_are_counted(tiny: Tiny, tmp_path: Path) -> None:
    user, good, bad = ({"role": role, "content": text} for role, text in (("user", "Hello?"), ("assistant", "Hi."), ("assistant", "No.")))
    forms: list[Any] = [
        {"prompt": "Hello?", "chosen": "Hi.", "rejected": "No."},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"input": {"messages": [user]}, "preferred_output": [good], "non_preferred_output": [bad]},
    ]
    wrong: list[Any] = [
        {"prompt": "x", "chosen": "same", "rejected": "same"}, {"prompt": "x", "chosen": " ", "rejected": "y"},
        {"prompt": "x", "chosen": "y"},
        {"prompt": "x", "chosen": "word " * 200, "rejected": "y"}, "{broken", "[1]", {"prompt": "x", "chosen": True, "rejected": "y"},
        {"chosen": [user, good], "rejected": [{"role": "user", "content": "Bye?"}, bad]},
    ]  # fmt: skip
    made = build(tiny, write(tmp_path / "pairs.jsonl", [*forms, *wrong, pair(1, 1)]), tmp_path / "out")
    assert made["data"]["sums"]["pairs"] == 2
    assert made["data"]["sums"]["left_out"] == {
        "repeated": 3, "equal answers": 1, "empty answer": 1, "no known form": 1, "longer than sequence_length": 1, "broken JSON": 1,
        "no object with columns": 1, "malformed": 1, "different prompts": 1,
    }  # fmt: skip
    assert len(made["data"]["sums"]["examples"]) == 5


def test_labeled_answers_get_another_rows_answer(tiny: Tiny, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n // 2}", "completion": f"Number {n}", "label": n % 2 == 0} for n in range(6)]
    path = write(tmp_path / "labeled.jsonl", [*rows, {"prompt": "x", "completion": "y", "label": "yes"}, pair(1, 2)])
    made = build(tiny, path, tmp_path / "out", loss="kto", validation_fraction=0.0)
    pairs, labels = read_preferences(tmp_path / "out", "train")
    assert made["data"]["sums"]["left_out"] == {"no label": 1}
    assert labels is not None and labels.sum() == 4 and len(pairs) == 8, "a pair is a good and a bad answer"
    tokenizer = load_tokenizer(tiny.run_dir / "tokenizer")
    for answer, other in pairs:
        prompts = [tokenizer.decode(one.ids[~one.learned].tolist()) for one in (answer, other)]
        texts = [tokenizer.decode(one.ids[one.learned].tolist()) for one in (answer, other)]
        assert prompts[0] == prompts[1], "its own prompt"
        own, other = (said(text) for text in texts)
        assert own != other, "and the answer to another one"


def said(answer: str) -> str:
    """The prompt that an answer of the rows above belongs to."""
    number = re.search(r"Number (\d)", answer)
    return f"Say {int(number[1]) // 2}" if number else "sum"


@pytest.mark.parametrize(
    ("sizes", "once"), [((2, 2, 2), True), ((3, 2, 1), True), ((9, 1), False), ((5, 1, 1), False), ((1,) * 7, True)], ids=str
)
def test_other_rows_have_other_prompts_in_any_order(sizes: tuple[int, ...], once: bool) -> None:
    """Neighbors of the file, and the row itself, are taken no more often than others; what is taken does not depend on their order."""
    prompts = [f"prompt {number}" for number, size in enumerate(sizes) for _ in range(size)]
    rows = [f"row {number}".encode() for number in range(len(prompts))]
    found = other_rows(prompts, rows, 1)
    assert found is not None and all(prompts[row] != prompts[other] for row, other in enumerate(found))
    assert (len(set(found)) == len(found)) == once
    shuffled = np.random.default_rng(len(rows)).permutation(len(rows)).tolist()
    again = other_rows([prompts[row] for row in shuffled], [rows[row] for row in shuffled], 1)
    assert again is not None
    taken = {rows[row]: rows[other] for row, other in enumerate(found)}
    assert {rows[shuffled[row]]: rows[shuffled[other]] for row, other in enumerate(again)} == taken
    if len(sizes) > 2:
        assert any(other_rows(prompts, rows, seed) != found for seed in (2, 3, 4)), "seeded"


def test_prompts_are_the_same_in_other_letters_and_under_other_systems() -> None:
    user, system = {"role": "user", "content": "What  is it?"}, {"role": "system", "content": "Be kind."}
    assert prompt_key([user]) == prompt_key([system, {"role": "user", "content": "what is it? "}])
    assert prompt_key([user]) != prompt_key([{"role": "user", "content": "What was it?"}])
    assert other_rows([prompt_key([user])] * 3, [b"a", b"b", b"c"], 1) is None


def test_generated_pairs_need_no_file(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    data = [{"name": "tasks", "kind": "tasks", "tasks": ["chain_sum"], "max_rows": 20}]
    made = build(tiny, tmp_path, tmp_path / "out", data=data, sequence_length="256 tokens")
    again = build(tiny, tmp_path, tmp_path / "again", data=data, sequence_length="256 tokens")
    assert made == again and made["data"]["tasks"]["pairs"] == 20
    assert (tmp_path / "out" / "train.bin").read_bytes() == (tmp_path / "again" / "train.bin").read_bytes()


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{"prompt": "x", "chosen": "a", "rejected": "a"}] * 3, {}, "yields no pair .*3 equal answers; first: .*pairs.jsonl:1"),
        ([], {}, "yields no pair .it is empty"),
        ([pair(1, 1)], {"data": []}, "dpo.data is empty"),
        ([pair(1, 1)], {"loss": "kto"}, "loss kto compares with answers to other prompts, and all 2 answers are to one prompt"),
        ([pair(1, 1)], {"data": [{"name": "a", "kind": "files", "path": "no/such.jsonl"}]}, "no/such.jsonl is no file"),
    ],
)  # fmt: skip
def test_data_without_pairs_is_refused(tiny: Tiny, tmp_path: Path, rows: list[Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tiny, write(tmp_path / "pairs.jsonl", rows), tmp_path / "out", **changes)


# steps ----------------------------------------------------------------------------------------------------------------------------------


def one(number: int) -> tuple[Answer, Answer]:
    answer = Answer(np.array([number, number], np.int32), np.array([False, True]))
    return answer, answer


@settings(deadline=None, max_examples=60)
@given(pairs=st.integers(1, 90), per_step=st.integers(2, 40), epochs=st.sampled_from([0.1, 0.5, 1, 1.5, 2, 2.7, 3]))
@example(pairs=63, per_step=32, epochs=1)
@example(pairs=1, per_step=32, epochs=1)
@example(pairs=30, per_step=7, epochs=0.1)
def test_each_pair_is_trained_as_often_as_epochs_says(pairs: int, per_step: int, epochs: float) -> None:
    """Exactly so many times; with a part of a pass some pairs once more. All steps but the last are full, and plans count the same."""
    train = Pairs([one(number) for number in range(pairs)], None, None, per_step, epochs, seed=3)
    steps = [train.numbers(step) for step in range(train.steps)]
    times = Counter(number for step in steps for number in step)
    assert {times[number] for number in range(pairs)} <= {math.floor(epochs), math.ceil(epochs)}
    assert sum(times.values()) == -(-pairs * round(epochs * 10) // 10)
    assert all(len(step) == per_step for step in steps[:-1]) and 0 < len(steps[-1]) <= per_step
    assert train.steps == steps_of(pairs, per_step, epochs)


# the stage ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run after the stage, and its pairs."""
    folder = tmp_path_factory.mktemp("dpo")
    path = write(folder / "pairs.jsonl", [pair(a, b) for a, b in SUMS])
    save_run(tiny, folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "PART", 40)
        stage(tiny, folder / "run", path)
    return folder / "run", path


def test_it_starts_at_the_reference_and_learns_the_pairs(trained: tuple[Path, Path]) -> None:
    lines = [line for line in read(trained[0] / "dpo") if "dpo/margin" in line]
    assert len(lines) == 5, "73 pairs, 16 a step: the last step has 9"
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5), "the policy is the reference"
    assert abs(lines[0]["dpo/margin"]) < 1e-5, "fp32 rounding of other rows"
    assert lines[-1]["dpo/margin"] > 1e-3
    assert "validation/reward_accuracy" in lines[-1] and "train/perplexity" not in lines[-1]


@pytest.mark.parametrize("loss", ["ipo", "simpo", "kto"])
def test_other_losses_train(tiny: Tiny, tmp_path: Path, loss: str) -> None:
    save_run(tiny, tmp_path / "run")
    stage(tiny, tmp_path / "run", write(tmp_path / "pairs.jsonl", [pair(a, b) for a, b in SUMS[:33]]), loss=loss, pairs_per_step=8)
    lines = [line for line in read(tmp_path / "run" / "dpo") if "dpo/margin" in line]
    assert lines[-1]["dpo/margin"] > lines[0]["dpo/margin"]
    assert ("dpo/divergence" in lines[0]) == (loss == "kto")
    assert (tmp_path / "run" / "dpo" / "reference").exists() == (loss != "simpo")


@pytest.mark.parametrize("dense", [0, 1])
def test_models_with_experts_in_layers_of_multi_token_prediction_are_trained(tiny: Tiny, tmp_path: Path, dense: int) -> None:
    """Those layers are not used, so they count no tokens: the counts of the others are theirs, in the checkpoint and in the metrics."""
    sparse = ("model.mtp={num_nextn_predict_layers: 1}", f"model.moe.first_k_dense_replace={dense}")
    save_run(tiny, tmp_path / "run", *sparse)
    stage(tiny, tmp_path / "run", write(tmp_path / "pairs.jsonl", [pair(a, b) for a, b in SUMS[:17]]), *sparse, pairs_per_step=16)
    counts = checkpoint(tmp_path / "run" / "dpo")["experts/counts"]
    assert counts.shape == (3 - dense, 4)
    assert counts[:-1].sum(-1).tolist() == [counts[0].sum()] * (2 - dense) and counts[0].sum() > 0 and counts[-1].sum() == 0
    line = next(line for line in read(tmp_path / "run" / "dpo") if "dpo/margin" in line)
    assert [name for name in line if name.startswith("experts/load_cv/")] == [f"experts/load_cv/{layer}" for layer in range(dense, 2)]
    assert line["experts/dead"] < 4


class Killed(Exception):
    pass


def test_killed_and_resumed_it_ends_with_the_same_bits(
    tiny: Tiny, trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while reference scores are written, and in two steps of the training."""
    run_dir, path = tmp_path / "run", trained[1]
    save_run(tiny, run_dir)
    honest, written = reference.write_bytes, []

    def kill_second(where: Path, data: bytes) -> None:
        written.append(where)
        if len(written) == 2:
            raise Killed
        honest(where, data)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "PART", 40)
        patch.setattr(reference, "write_bytes", kill_second)
        with pytest.raises(Killed):
            stage(tiny, run_dir, path)
        stage_dir = run_dir / "dpo" / "reference" / "train"
        assert sorted(one.name for one in stage_dir.glob("*.npy")) == ["00000.npy"]
        patch.setattr(reference, "write_bytes", honest)
        for fatal in (1, 3):
            with monkeypatch.context() as at:
                before_each_step(at, lambda step, fatal=fatal: (_ for _ in ()).throw(Killed) if step == fatal else None)  # type: ignore[misc]
                with pytest.raises(Killed):
                    stage(tiny, run_dir, path)
        stage(tiny, run_dir, path)
    assert not same_bits(checkpoint(run_dir, folder="dpo/checkpoints"), checkpoint(trained[0], folder="dpo/checkpoints"))
    assert curve(run_dir / "dpo") == curve(trained[0] / "dpo")


def test_kept_reference_scores_are_used_with_their_weights_only(
    tiny: Tiny, trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "PART", 40)
    kept = tmp_path / "run" / "dpo" / "reference" / "train"
    losses = []
    for key in (None, "of other weights"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(trained[0], tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "dpo" / "checkpoints")
        for path in kept.glob("*.npy"):
            scores = np.load(path)
            scores[0::2] += 5  # of the chosen answers
            np.save(path, scores)
        if key:
            write_json(kept / "manifest.json", read_json(kept / "manifest.json") | {"key": key})
        stage(tiny, tmp_path / "run", trained[1])
        losses.append(next(line["train/loss"] for line in read(tmp_path / "run" / "dpo") if "train/loss" in line))
    assert losses[0] > 0.8 and losses[1] == pytest.approx(math.log(2), abs=1e-5)
