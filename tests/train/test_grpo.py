"""Reinforcement learning: losses by their formulas, rewards, sampling filters in the score, and the stage, killed and resumed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.sampling import GenerateOptions, drawn_chunk_loss, filter_logits
from lmworks.metrics.log import read
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import with_adapters
from lmworks.recipe.schema.align import Grpo, RewardTask
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, Batch
from lmworks.train import trainer as trainer_module
from lmworks.train.answers import Answer, pack
from lmworks.train.grpo import PolicyGradient, Sampled, advantages, grpo, policy_loss
from lmworks.train.prompts import Prompts
from lmworks.train.rewards import Drawn, Reward, make_judge, score, score_all
from lmworks.train.rollouts import Rollout, RolloutChecks
from lmworks.train.step import StepResult, Update
from lmworks.train.trainer import Trainer
from lmworks.watch.ledger import events_of
from lmworks.watch.policy import load_bad_batch
from saved_run import save_run
from small_config import small_config
from tiny_run import Tiny, before_each_step, checkpoint, curve, same_bits, training_context

OWN = "def reward(prompt, answer, row):\n    return len(set(answer)) / max(1, len(answer))\n"


def options_of(folder: Path, reward: str = OWN, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(30)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "reward.py").write_text(reward)
    data = {"name": "own", "kind": "files", "path": str(folder / "prompts.jsonl"), "reward": "python", "file": str(folder / "reward.py")}
    return {
        "data": [data], "group_size": 3, "prompts_per_step": 3, "steps": 4, "max_new_tokens": 16, "sequence_length": "64 tokens",
        "validation_prompts": 3, "learning_rate": 0.001, "temperature": 0.8, "top_p": 0.95, "updates_per_rollout": 2, "beta": 0.02,
        "resample_rounds": 1, "clip_high": 0.28,
    } | changes  # fmt: skip


def stage(tiny: Tiny, run_dir: Path, options: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    recipe = tiny.resolve(f"run_dir={run_dir}", f"grpo={json.dumps(options)}", *overrides).recipe
    grpo(training_context(recipe, run_dir))
    return [line for line in read(run_dir / "grpo") if "grpo/reward" in line]


# losses ---------------------------------------------------------------------------------------------------------------------------------


Tokens = list[np.ndarray]  # a value for each token of each answer


def plain(options: Grpo, logp: Tokens, old: Tokens, rollout: Tokens, ref: Tokens, adv: Any) -> float:
    """The formulas of the papers, token by token."""
    totals, lengths = [], [len(one) for one in logp]
    for n, length in enumerate(lengths):
        mean = float((logp[n] - old[n]).mean())
        total = 0.0
        for t in range(length):
            ratio = math.exp(mean if options.loss == "gspo" else logp[n][t] - old[n][t])
            clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
            loss = -min(ratio * adv[n], clipped * adv[n])
            if options.importance_cap is not None:
                loss *= min(options.importance_cap, math.exp(old[n][t] - rollout[n][t]))
            away = ref[n][t] - logp[n][t]
            total += loss + options.beta * (math.exp(away) - away - 1)
        totals.append(total)
    if options.loss == "dapo":
        return sum(totals) / sum(lengths)
    if options.loss == "dr_grpo":
        return sum(totals) / (len(totals) * options.max_new_tokens)
    return sum(total / length for total, length in zip(totals, lengths, strict=True)) / len(totals)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_losses_and_gradients_are_those_of_the_papers(loss: str) -> None:
    """In float64, against the formulas and their central differences; ratios reach beyond both bounds and the cap."""
    draw = np.random.default_rng(5)
    node = {"loss": loss, "group_size": 3, "beta": 0.05, "clip_high": 0.28, "importance_cap": 1.2, "max_new_tokens": 9}
    options = Grpo.model_validate(node)
    lengths = [3, 7, 5, 2, 8, 4]
    answers = [Answer(np.arange(n + 2, dtype=np.int32), np.arange(n + 2) >= 2) for n in lengths]
    packed = pack(answers, 24, 0)
    old = [-draw.uniform(0.1, 3, n) for n in lengths]
    logp, rollout, ref = ([one + draw.normal(0, scale, len(one)) for one in old] for scale in (0.4, 0.3, 0.5))
    rewards = torch.tensor([1.0, 0, 0, 0.5, 0.25, 1])
    adv = advantages(options, rewards)
    groups = rewards.view(2, 3).double()
    centered = groups - groups.mean(1, keepdim=True)
    expected = centered if loss == "dr_grpo" else centered / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(adv, expected.flatten(), atol=1e-12, rtol=0)

    values = packed.place(logp).requires_grad_()
    found = policy_loss(options, packed, values, Sampled(packed.place(old), packed.place(rollout), packed.place(ref)), adv)
    (gradient,) = torch.autograd.grad(found.loss, values)
    assert found.loss.item() == pytest.approx(plain(options, logp, old, rollout, ref, adv.tolist()), abs=1e-12)
    assert 0 < float(found.clipped) < 1
    for n, t in [(0, 0), (1, 6), (2, 2), (3, 1), (4, 5), (5, 3)]:
        ends = []
        for sign in (1, -1):
            moved = [one.copy() for one in logp]
            moved[n][t] += sign * 1e-6
            ends.append(plain(options, moved, old, rollout, ref, adv.tolist()))
        at = [np.zeros(len(one)) for one in logp]
        at[n][t] = 1
        ours = float(gradient[packed.place(at) == 1])
        assert ours == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6, "temperature": 1.3}, {"min_p": 0.2}, {"top_k": 9, "min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_the_score_replays_the_sampling_filters(options: dict[str, Any], softcap: float) -> None:
    """Log-probabilities and gradients against autograd through `filter_logits`. Gradients in fp32: 1e-6 of their largest."""
    config = Model.model_validate(small_config(final_logit_softcapping=softcap, initializer_range=0.3))
    model = initialize(Transformer(config), seed=1).eval()
    given = GenerateOptions(**{"temperature": 1.0} | options)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (3, 20)))
    logits = model(tokens)
    filtered = filter_logits(logits.flatten(0, 1), given)
    labels = filtered.softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(3))[:, 0]
    labels[::7] = IGNORE
    weights = torch.linspace(-1, 2, len(labels))
    nats = torch.nn.functional.cross_entropy(filtered, labels, ignore_index=IGNORE, reduction="none")
    (nats * weights).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    model.logit_chunk_size = 7
    model._chunk_loss = drawn_chunk_loss(model._chunk_loss, given)
    loss = model.loss(tokens, labels.view(tokens.shape), weights_BT=weights.view(tokens.shape))
    loss.total.backward()
    torch.testing.assert_close(loss.head.of_tokens_N, nats.detach(), atol=2e-6, rtol=0)
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-9, rtol=0, msg=name)
    kept = torch.isfinite(filtered).sum(-1)
    assert options.keys() == {"temperature"} or int(kept.max()) < 64


_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
_MLA = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}


@pytest.mark.parametrize(
    ("changes", "targets"),
    [
        ({"moe": _MOE, "use_qk_norm": True}, None), ({"moe": _MOE, "mla": _MLA, "num_key_value_heads": 4, "head_dim": 32}, None),
        ({"sliding_window": "8 tokens", "norm_position": "post", "final_logit_softcapping": 20.0}, None),
        ({"moe": _MOE}, ["all-linear", "experts"]),
    ],
    ids=["experts", "latents", "window", "adapters"],
)  # fmt: skip
def test_a_token_has_one_probability_among_any_rows(changes: dict[str, Any], targets: list[str] | None) -> None:
    """At width 128, drawn with filters among rows that come and go, and scored in packed rows. The promise is 1e-6. Rounding is 1e-13 in
    fp64, in which nothing may be rounded to fp32 on the way; without it, it is some 3e-6."""
    config = Model.model_validate(small_config(hidden_size=128, num_hidden_layers=3, head_dim=32, initializer_range=0.1) | changes)
    model = initialize(with_adapters(Transformer(config), Lora(rank=4, targets=targets) if targets else None), seed=2).eval()
    for name, value in model.named_parameters():
        if name.endswith("lora.B"):
            torch.nn.init.normal_(value, std=0.05)
    parallel = ParallelModel([model])
    options = GenerateOptions(temperature=0.8, top_k=40, top_p=0.95, max_new_tokens=12)
    parallel.set_sampling(options)
    draw = np.random.default_rng(3)
    prompts = [draw.integers(0, 64, size).tolist() for size in draw.integers(3, 40, 32)]
    with parallel.exact_logprobs():
        batch = ContinuousBatch(model, max_rows=7)
        drawn: dict[int, list[Any]] = {batch.add(prompt, options, seed): [] for seed, prompt in enumerate(prompts)}
        while batch.busy:
            for one in batch.step():
                drawn[one.id].append(one.token)
        whole = [np.array([*prompts[n], *(token.id for token in tokens)], np.int32) for n, tokens in drawn.items()]
        packed = pack([Answer(ids, np.arange(len(ids)) >= len(prompts[n])) for n, ids in enumerate(whole)], 96, 0)
        scored = -parallel.token_cross_entropy(packed.batch)
    assert model.compute_dtype == torch.float32, "outside, nothing has changed"
    rollout = packed.place([np.array([token.drawn_logprob for token in tokens]) for tokens in drawn.values()])
    away = ((scored - rollout).exp() - 1).abs()[packed.mask_BT]
    assert away.numel() == 32 * 12 and float(away.max()) < 1e-10


def test_a_label_on_the_border_of_a_filter_keeps_a_finite_score() -> None:
    config = Model.model_validate(small_config())
    model = initialize(Transformer(config), seed=1).eval()
    parallel = ParallelModel([model])
    parallel.set_sampling(GenerateOptions(temperature=1.0, top_k=1))
    tokens = torch.arange(12)[None]
    least = model(tokens)[0].argmin(-1)[None]
    with torch.no_grad():
        scores: Tensor = model.loss(tokens, least).head.of_tokens_N
    assert torch.isfinite(scores).all() and (scores > 0).all()


# rewards --------------------------------------------------------------------------------------------------------------------------------


def task(**changes: Any) -> RewardTask:
    return RewardTask.model_validate({"name": "a", "kind": "files"} | changes)


@pytest.mark.parametrize(
    ("kind", "text", "row", "value", "outcome"),
    [
        ("exact", "The answer is 12", {"answer": "12"}, 1, "judged"), ("exact", "12 of them", {"answer": "12"}, 0, "judged"),
        ("numeric", "I get 3 + 4 = 7.0", {"answer": 7}, 1, "judged"), ("numeric", "It is 8.", {"answer": 7}, 0, "judged"),
        ("numeric", "No idea", {"answer": 7}, 0, "unparsed"), ("exact", "  \n", {"answer": ""}, 0, "empty"),
        ("exact", "Paris.", {"answer": "Paris"}, 1, "judged"), ("numeric", "\\boxed{3\\sqrt{2}}", {"answer": 3}, 0, "unparsed"),
        ("numeric", "72", {"answer": "He has 70 + 2 = 72.\n#### 72"}, 1, "judged"),
        ("exact", "<think>12</think>13", {"answer": "12"}, 0, "judged"), ("numeric", "<think>7", {"answer": 7}, 0, "empty"),
        ("math", "\\boxed{\\sqrt{18}}", {"solution": "Hence $\\boxed{3\\sqrt{2}}$."}, 1, "judged"),
        ("math", "\\boxed{3}", {"answer": "3\\sqrt{2}"}, 0, "judged"),
    ],
)  # fmt: skip
def test_rewards_of_stated_answers(kind: str, text: str, row: dict[str, Any], value: float, outcome: str) -> None:
    found = score(make_judge(task(reward=kind), "key", {}), text, row, truncated=False)
    assert (found.value, found.outcome) == (value, outcome)
    assert score(make_judge(task(reward=kind), "key", {}), text, row, truncated=True).outcome == "truncated"


def test_a_verifier_judges_and_its_failures_are_counted_apart() -> None:
    pytest.importorskip("reasoning_gym")
    from lmworks.corpus.read.conversations import create
    from lmworks.recipe.schema.evaluate import Generator

    items = create(Generator(name="chain_sum"), 1, 3)
    judge = make_judge(task(kind="tasks", reward="verifier"), "key", {"chain_sum": items})
    row = {"generator": "chain_sum", "entry": items[0]}
    assert judge(f"The answer is {items[0]['answer']}.", row).value == 1
    assert judge("x" * 20_000, row).outcome == "unparsed"

    class Broken:
        def score_answer(self, answer: str, entry: Any) -> float:
            raise IndexError("no such digit")

    broken = make_judge(task(kind="tasks", reward="verifier"), "key", {"chain_sum": Broken()})(str(items[0]["answer"]), row)
    assert (broken.value, broken.outcome) == (0, "unparsed")


def test_programs_earn_by_their_unit_tests_in_the_sandbox() -> None:
    from lmworks.untrusted.sandbox import run_python

    if run_python("").outcome != "passed":
        pytest.skip("no sandbox here")
    judge = make_judge(task(reward="unit_tests", timeout="2.0 s"), "key", {})
    row = {"tests": "assert double(4) == 8"}
    assert judge("Here:\n```python\ndef double(x):\n    return 2 * x\n```", row).value == 1
    assert judge("def double(x):\n    return x", row).value == 0
    assert judge("import os\nos._exit(0)", row).value == 0, "ends before the tests"
    assert judge("def double(x) return", row).outcome == "unparsed"
    assert judge("while True: pass", row).value == 0


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("def reward(prompt, answer, row):\n    raise KeyError('no')\n", "KeyError"),
        ("def reward(prompt, answer, row):\n    while True: pass\n", "takes too much time"),
        ("import time\ndef reward(prompt, answer, row):\n    time.sleep(100)\n", "takes too much time"),
        ("def reward(prompt, answer, row):\n    return float('nan')\n", "is nan"),
        ("def reward(prompt, answer, row):\n    return 'much'\n", "ValueError"),
        ("import os\ndef reward(prompt, answer, row):\n    os._exit(0)\n", "the reward ended its own process with exit code 0"),
        ("import sys\ndef reward(prompt, answer, row):\n    sys.exit('no')\n", "SystemExit: no (reward.py, line 3"),
        ("import os\ndef reward(prompt, answer, row):\n    os.kill(os.getpid(), 11)\n", "the reward crashed (SIGSEGV)"),
        ("import os\ndef reward(prompt, answer, row):\n    os.kill(os.getpid(), 9)\n", "the reward was killed (SIGKILL)"),
        ("def reward(prompt, answer, row):\n    return len(bytes(4 << 30))\n", "the reward takes too much memory (MemoryError) (reward.py"),
        ("1 / 0\ndef reward(prompt, answer, row):\n    return 1.0\n", "ZeroDivisionError"),
    ],
)
def test_a_reward_that_fails_earns_nothing(tmp_path: Path, code: str, detail: str) -> None:
    (tmp_path / "reward.py").write_text(code)
    judge = make_judge(task(reward="python", file=str(tmp_path / "reward.py"), timeout="0.2 s"), "key", {})
    for _ in range(2):  # the next answer is judged by a new process
        found = score(judge, "text", {"prompt": "x"}, truncated=False)
        assert (found.value, found.outcome) == (0, "failed") and detail in found.detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "group_size 1: an answer is compared with the others of its group; use 2 or more"),
        ({"data": []}, "grpo.data is empty"),
        ({"data": [{"name": "a", "kind": "files", "reward": "exact", "path": "no/such.jsonl"}]}, "no/such.jsonl is no file"),
        ({"data": [{"name": "a", "kind": "files", "reward": "python", "path": "x.jsonl", "file": "no.py"}]}, "no.py cannot be read"),
        ({"data": [{"name": "a", "kind": "tasks", "tasks": ["chain_som"]}]}, "no task 'chain_som'; did you mean chain_sum"),
        ({"data": [{"name": "a", "kind": "files", "reward": "verifier"}]}, "reward verifier is not for kind files"),
        ({"max_new_tokens": 63}, "grpo.data.own yields no prompt .*no room for an answer in sequence_length and the model's context"),
    ],
)
def test_bad_input_is_one_line(tiny: Tiny, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_run(tiny, tmp_path / "run")
    with pytest.raises(UserError, match=message):
        stage(tiny, tmp_path / "run", options_of(tmp_path) | changes)


def test_a_row_that_is_no_json_fails_for_itself(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(prompt, answer, row):\n    return 1.0\n")
    judge = make_judge(task(reward="python", file=str(tmp_path / "reward.py")), "key", {})
    bad, good = judge.all(["text", "text"], [{"prompt": "x", "raw": b"x"}, {"prompt": "x"}])
    assert (bad.value, bad.outcome) == (0, "failed") and "cannot be given the row: Object of type bytes" in bad.detail
    assert good.value == 1


def test_a_file_without_the_function_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run")
    with pytest.raises(UserError, match=r"reward.py does not define reward\(prompt, answer, row\); it defines score"):
        stage(tiny, tmp_path / "run", options_of(tmp_path, "def score(answer):\n    return 1.0\n"))


WORKED = "She sells 9 eggs for 8 each, which makes 72 in all. She has 10 left"


@pytest.mark.parametrize(
    ("reward", "answers", "message"),
    [
        ("numeric", ["72"] * 4 + [WORKED] * 4, r"grpo.data.own: reward numeric cannot read 4 of 8 right answers, .*prompts.jsonl:5"),
        ("numeric", [WORKED] * 3 + ["72"], r"grpo.data.own: reward numeric cannot read 3 of 4 right answers, .*prompts.jsonl:1 'She sells "
         r"9 eggs.*ends in #### and a number; for expressions use reward math"),
        ("math", [f"{WORKED}.\nSo.", "3"], r"reward math cannot read 1 of 2 right answers"),
        ("exact", [f"{WORKED}.\nSo.", "3"], r"reward exact cannot read 1 of 2 right answers"),
    ],
)  # fmt: skip
def test_right_answers_that_cannot_be_read_are_refused_before_the_first_stage(
    tiny: Tiny, tmp_path: Path, reward: str, answers: list[str], message: str
) -> None:
    """From the runner's checks, which no stage precedes; of all rows, since `count` draws from all."""
    from lmworks.run.refusals import Before, require_possible

    rows = [{"prompt": f"Say {n}", "answer": answer} for n, answer in enumerate(answers)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {"name": "own", "kind": "files", "path": str(tmp_path / "prompts.jsonl"), "reward": reward, "max_rows": 2}
    recipe = tiny.resolve(f"run_dir={tmp_path}", f"grpo={json.dumps(options_of(tmp_path, data=[data]))}").recipe
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    with pytest.raises(UserError, match=message):
        require_possible(Before(recipe, tmp_path, tmp_path), ["grpo"])


def test_a_few_unreadable_right_answers_are_left_out_and_counted(tiny: Tiny, tmp_path: Path) -> None:
    from lmworks.tokenizer import load
    from lmworks.train.prompts import read_prompts

    options = options_of(tmp_path)
    rows = [{"prompt": f"Say {n}", "answer": f"It is {n}.\n#### {n}" if n else WORKED} for n in range(30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    options["data"] = [{"name": "own", "kind": "files", "path": str(tmp_path / "prompts.jsonl"), "reward": "numeric"}]
    found = read_prompts(tiny.resolve(f"grpo={json.dumps(options)}").recipe, load(tiny.run_dir / "tokenizer"))
    assert found.sets["own"]["left_out"] == {"unreadable answer": 1} and len(found.train) + len(found.held_out) == 29
    assert all(found.judges[0](f"The answer is {one.row['prompt'].split()[-1]}.", one.row).value == 1 for one in found.train)


def test_a_reward_in_the_form_of_trl_judges_a_batch_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "calls = []\ndef reward(prompts, completions, answer, **columns):\n    calls.append(1)\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    assert len(prompts) == len(completions) == len(columns['level'])\n"
        "    return [None if t == 'skip' else float(t == a) + len(calls) / 8 for t, a in zip(texts, answer)]\n"
    )
    judge = make_judge(task(reward="python", file=str(tmp_path / "reward.py")), "key", {})
    rows = [{"prompt": "x", "answer": "a", "level": 1}, {"prompt": [{"role": "user", "content": "x"}], "answer": "b"}]
    drawn = [Drawn("a", rows[0]), Drawn("b", rows[1]), Drawn("skip", rows[0]), Drawn("c", rows[0]), Drawn("c", rows[0], truncated=True)]
    found = score_all(judge, drawn)
    assert found == [Reward(1.125), Reward(1.125), Reward(0.0, "unparsed"), Reward(0.125), Reward(0.0, "truncated")]
    (tmp_path / "reward.py").write_text("def reward(completions, **columns):\n    return [1.0]\n")
    judge = make_judge(task(reward="python", file=str(tmp_path / "reward.py")), "key", {})
    assert "returns 1 values for 2 answers" in score_all(judge, [Drawn("a", rows[0])] * 2)[1].detail


@pytest.mark.parametrize("layout", ["layout.pp=2", "layout.tp=2"])
def test_layouts_that_cannot_generate_or_replay_are_refused(tiny: Tiny, tmp_path: Path, layout: str) -> None:
    from lmworks.train.prompts import refusals

    recipe = tiny.resolve(layout, f"grpo={json.dumps(options_of(tmp_path))}").recipe
    (error,) = refusals(recipe)
    assert re.search("grpo generates with the weights|no rank has all logits", str(error))


# the stage ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """A run after the stage, its options and its metrics."""
    folder = tmp_path_factory.mktemp("grpo")
    save_run(tiny, folder / "run")
    options = options_of(folder)
    return folder / "run", options, stage(tiny, folder / "run", options)


def test_training_and_rollout_give_a_token_one_probability(trained: tuple[Path, dict[str, Any], list[dict[str, Any]]]) -> None:
    """In fp32, with experts, a temperature and a filter, in every step: the promise is 1e-6, and rounding in fp64 is 1e-13."""
    _, options, lines = trained
    assert len(lines) == options["steps"]
    assert max(line["grpo/mismatch_max"] for line in lines) < 1e-9
    assert all(line["grpo/divergence"] >= 0 for line in lines) and lines[-1]["grpo/divergence"] > 0
    assert "validation/reward" in lines[-1] and "train/perplexity" not in lines[-1]
    shares = [sum(line[f"grpo/{name}"] for name in ("wrong", "solved", "empty", "truncated", "unparsed", "failed")) for line in lines]
    assert shares == pytest.approx([1.0] * len(lines)), "each answer is counted once"


class Killed(Exception):
    pass


def test_killed_and_resumed_it_ends_with_the_same_bits(
    tiny: Tiny, trained: tuple[Path, dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Killed before an update, and between the two updates of a step."""
    save_run(tiny, tmp_path / "run")
    for fatal in (2, 5):
        seen: list[int] = []

        def kill(step: int, seen: list[int] = seen, fatal: int = fatal) -> None:
            seen.append(step)
            if len(seen) == fatal:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            before_each_step(patch, kill)
            with pytest.raises(Killed):
                stage(tiny, tmp_path / "run", trained[1])
    stage(tiny, tmp_path / "run", trained[1])
    assert not same_bits(checkpoint(tmp_path / "run", folder="grpo/checkpoints"), checkpoint(trained[0], folder="grpo/checkpoints"))
    assert curve(tmp_path / "run" / "grpo") == curve(trained[0] / "grpo")


def test_models_with_experts_in_layers_of_multi_token_prediction_are_trained(tiny: Tiny, tmp_path: Path) -> None:
    sparse = ("model.mtp={num_nextn_predict_layers: 1}", "model.moe.first_k_dense_replace=0")
    save_run(tiny, tmp_path / "run", *sparse)
    (line,) = stage(tiny, tmp_path / "run", options_of(tmp_path, steps=1, validation_prompts=0), *sparse)
    assert "experts/load_cv/1" in line and "experts/load_cv/2" not in line


def test_groups_without_a_difference_are_replaced_within_bounds(tiny: Tiny, tmp_path: Path) -> None:
    """No answer earns anything, so that no group ever differs; the user is told once, in the terminal and in the ledger."""
    save_run(tiny, tmp_path / "run")
    nothing = "def reward(prompt, answer, row):\n    return 0.0\n"
    lines = stage(tiny, tmp_path / "run", options_of(tmp_path, nothing, steps=2, resample_rounds=2, validation_prompts=0))
    for line in lines:
        assert (line["grpo/groups"], line["grpo/trained_groups"]) == (3 + 3 + 3, 3)
        assert line["grpo/equal_groups"] == line["grpo/no_signal"] == 1
    told = events_of(tmp_path / "run", "no_signal")
    assert [event["step"] for event in told] == [0]
    save_run(tiny, tmp_path / "once")
    (line,) = stage(tiny, tmp_path / "once", options_of(tmp_path, nothing, steps=1, resample_rounds=1, validation_prompts=0))
    assert line["grpo/groups"] == 3 + 3


def rollouts_of(*groups: Sequence[Reward]) -> list[list[Rollout]]:
    answer = Answer(np.arange(3, dtype=np.int32), np.array([False, True, True]))
    return [[Rollout(answer, np.zeros(2), reward, 0) for reward in group] for group in groups]


def checks_of(folder: Path, told: list[dict[str, Any]]) -> RolloutChecks:
    def write(event: str, **fields: Any) -> None:
        told.append({"event": event, **fields})

    return RolloutChecks(Grpo.model_validate(options_of(folder)), write, True)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([Reward(0, "truncated")] * 2, "all 2 answers were cut at grpo.max_new_tokens 16 and earn 0; raise it, and grpo.sequence_length"),
        ([Reward(0)] * 2, r"the answers to each prompt earned the same \(mean 0; 2 of 2 were read\); use easier prompts"),
        ([Reward(1)] * 2, r"the answers to each prompt earned the same \(mean 1; 2 of 2 were read\); use harder prompts"),
        ([Reward(0, "unparsed")] * 2, r"in none of 2 answers was one found that the reward can read; ask for its form in the prompts"),
    ],
)
def test_a_step_without_a_signal_is_told_once_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rewards: list[Reward], reason: str
) -> None:  # fmt: skip
    told: list[dict[str, Any]] = []
    checks = checks_of(tmp_path, told)
    assert checks.check(4, rollouts_of([Reward(0), Reward(1)], rewards)) == {"grpo/no_signal": 0} and not told
    assert [checks.check(step, rollouts_of(rewards)) for step in (5, 6)] == [{"grpo/no_signal": 1}] * 2
    assert [(event["event"], event["step"]) for event in told] == [("no_signal", 5)]
    assert re.match(reason, told[0]["reason"])
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("grpo: step 5 teaches nothing: ") == 1 and re.search(reason, shown)


def test_failures_in_a_row_end_the_run_and_a_judged_answer_interrupts_them(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    checks = checks_of(tmp_path, told)
    failed, cut = Reward(0, "failed", "KeyError: 'x' (reward.py, line 2: row['x'])"), Reward(0, "truncated")
    for step, rewards in enumerate([[failed, cut], [failed, failed], [failed, Reward(0.5)], [failed, cut], [cut, cut], [failed, cut]]):
        checks.check(step, rollouts_of(rewards))
    message = "grpo.data.own: the reward failed on every answer of 3 steps in a row, last with KeyError: 'x'"
    with pytest.raises(UserError, match=message):
        checks.check(6, rollouts_of([failed, cut]))
    failures = [event for event in told if event["event"] == "reward_failed"]
    assert [(event["step"], event["data"], event["reason"]) for event in failures] == [(0, "own", failed.detail)]


def test_a_reward_imports_what_lies_beside_it_and_its_error_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "helper_beside.py").write_text("def value(row):\n    return row['points']\n")
    (tmp_path / "reward.py").write_text("from helper_beside import value\n\n\ndef reward(prompt, answer, row):\n    return value(row)\n")
    judge = make_judge(task(reward="python", file=str(tmp_path / "reward.py")), "key", {})
    assert judge("text", {"prompt": "x", "points": 0.25}) == Reward(0.25)
    found = judge("text", {"prompt": "x"})
    assert found == Reward(0.0, "failed", "KeyError: 'points' (reward.py, line 5: return value(row))")


def test_a_step_of_several_updates_has_the_mean_loss_and_the_largest_norm() -> None:
    """And it is applied only if all of them were. A rank trains on its rows, and knows all of them, for a bad step."""
    norms, given = iter([3.0, 1.0]), []

    def update(batch: Batch, **options: Any) -> StepResult:
        norm = next(norms)
        given.append((len(batch.tokens), options["sequences"], options["valid_tokens"]))
        return StepResult(torch.tensor(9.0), torch.tensor(0.0), None, None, torch.tensor(norm), torch.tensor(norm > 2), None, 30)

    rows, starts = np.arange(30, dtype=np.int32).reshape(3, 10), np.arange(4, dtype=np.int32) * 10
    batch = Batch(rows, rows, starts, 0, 0, weights=np.ones((3, 10), np.float32))
    objective: Any = SimpleNamespace(updates=lambda _: [Update(batch, 4.0, torch.tensor(2.0)) for _ in range(2)])
    trainer: Any = SimpleNamespace(step=0, _update=update, model=SimpleNamespace(rank_sequences=lambda rows: (1, rows)))
    found, updates = Trainer._optimize(trainer, objective)
    assert (found.loss.item(), found.grad_norm.item(), found.applied.item(), found.valid_tokens) == (2.0, 3.0, False, 60)
    assert (trainer._objective_tokens, given) == (60, [(2, 3, 30)] * 2)
    assert [(len(one.batch.tokens), one.rows, one.normalizer, one.whole) for one in updates] == [(2, 3, 4.0, batch)] * 2


def test_an_update_that_is_not_finite_ends_its_step(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after it change no weight. It is run again as the step ran it, and saved with its weights."""
    save_run(tiny, tmp_path / "run")
    honest_updates, honest_step, honest_rerun = PolicyGradient.updates, trainer_module.train_step, ParallelModel.rerun_forward_backward
    made: list[Update] = []
    heads: list[Tensor] = []
    rerun: list[tuple[Any, ...]] = []

    def updates(self: PolicyGradient, step: int) -> Iterator[Update]:
        for number, update in enumerate(honest_updates(self, step)):
            if number == 1:
                spoiled = replace(update.batch, weights=np.full_like(update.batch.weights, np.nan))
                update = Update(spoiled, 2 * update.normalizer, update.loss)  # twice the labels
            made.append(update)
            yield update

    def step(model: ParallelModel, *given: Any, **options: Any) -> StepResult:
        found = honest_step(model, *given, **options)
        heads.append(dict(model.named_parameters())["head.weight"].detach().clone())
        return found

    def again(self: ParallelModel, batch: Batch, rows: int, micro_batch_size: int, scale: float) -> None:
        rerun.append((len(batch.tokens), rows, scale))
        honest_rerun(self, batch, rows, micro_batch_size, scale)

    monkeypatch.setattr(PolicyGradient, "updates", updates)
    monkeypatch.setattr(trainer_module, "train_step", step)
    monkeypatch.setattr(ParallelModel, "rerun_forward_backward", again)
    options = options_of(tmp_path, steps=1, updates_per_rollout=3, validation_prompts=0, loss="dr_grpo", resample_rounds=0)
    stage(tiny, tmp_path / "run", options)
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[0], heads[2])
    (event,) = events_of(tmp_path / "run", "not_finite")
    assert (event["update"], event["first"]) == (1, "the weights of the labels, before the step")
    rows = len(made[1].batch.tokens)
    assert rerun == [(rows, rows, 1 / made[1].normalizer)]
    arrays = load_bad_batch(tmp_path / "run" / "grpo" / "bad_batches" / "step-00000000.npz")
    assert all(np.array_equal(arrays[name], getattr(made[1].batch, name), equal_nan=True) for name in ("tokens", "labels", "weights"))


def test_the_loss_of_an_objective_has_no_unit() -> None:
    trainer: Any = object.__new__(Trainer)
    trainer._validator = SimpleNamespace(measured={8: 0.5}, metric="validation/loss")
    trainer.objective = None
    assert trainer._note(0.25, {}) == "loss 0.250 nats/token  held-out 0.500 nats/token"
    trainer.objective = SimpleNamespace()
    assert trainer._note(0.25, {}) == "loss 0.250  held-out 0.500"


def test_rollouts_are_scored_by_the_weights_before_the_update_and_by_those_of_the_start() -> None:
    """In parts, whose scores come back together: each has those of its own rows."""
    config = Model.model_validate(small_config(initializer_range=0.1))
    model = ParallelModel([initialize(Transformer(config), seed=2).eval()])
    stage = {"beta": 0.1, "group_size": 2, "sequence_length": "24 tokens", "learning_rate": 0.01}
    recipe: Any = Recipe.model_validate({"name": "scored", "train": {"micro_batch_sequences": 4}, "grpo": stage})
    objective: Any = PolicyGradient(recipe, model, Prompts([], [], [], {}), None, 0, None)  # type: ignore[arg-type]
    draw = np.random.default_rng(5)
    parts = [[[_drawn(draw, 5 + number) for _ in range(2)] for number in range(count)] for count in (3, 2)]
    scored = objective._score(parts, 0)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    again = objective._score(parts, 0)
    for (packed, before, _), (_, after, _) in zip(scored, again, strict=True):
        assert torch.equal(before.reference_BT, before.old_BT) and torch.equal(after.reference_BT, before.old_BT)
        with model.exact_logprobs():
            assert torch.equal(after.old_BT, -model.token_cross_entropy(packed.batch))
        assert not torch.allclose(after.old_BT[packed.mask_BT], before.old_BT[packed.mask_BT], atol=1e-3)


def _drawn(draw: np.random.Generator, length: int) -> Rollout:
    answer = Answer(draw.integers(0, 64, length).astype(np.int32), np.arange(length) >= 2)
    return Rollout(answer, np.full(length - 2, -1.0), Reward(float(draw.random())), 0)
