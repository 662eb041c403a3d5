"""Models from Python: what transformers computes, what the commands score, from every form that a model has on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Lmworks

import lmworks
from base_models import write_model, write_tokenizer
from deployable import QWEN3, export
from lmworks.evaluate.generation.interface import Prompt
from lmworks.evaluate.generation.replies import Answerer
from saved_run import save_run
from smollm2 import write_huggingface_folder
from tiny_run import Tiny

TEXT = "The words are 12 and 345, and it's two."


def require_equal_to_transformers(folder: Path, text: str) -> None:
    """Hidden states and log-likelihoods against transformers. The tolerance is derived: in fp32 both may differ from the same computation
    in fp64 by rounding, so ours may be off by as much as theirs is, up to the order of sums (a factor of 4)."""
    import transformers

    model = lmworks.load_model(folder, device="cpu")
    assert model.dtype == torch.float32
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = model.encode(text)
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        single = theirs(tokens, output_hidden_states=True)
        exact = theirs.double()(tokens, output_hidden_states=True)
    states = model.hidden_states(text)
    assert len(states) == len(exact.hidden_states) == model.config.num_hidden_layers + 1  # type: ignore[operator]
    for own, their, right in zip(states, single.hidden_states, exact.hidden_states, strict=True):
        assert own.shape == right[0].shape
        allowed = 4 * (their[0] - right[0]).abs().max() + torch.finfo(torch.float32).eps * right.abs().max()
        assert (own - right[0]).abs().max() <= allowed
    right_logprobs = exact.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    their_logprobs = single.logits[0, :-1].double().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    allowed = 4 * float((their_logprobs - right_logprobs).abs().max()) + torch.finfo(torch.float32).eps * float(right_logprobs.abs().max())
    own_logprobs = torch.tensor(model.token_logprobs(text)[1:], dtype=torch.float64)
    assert math.isnan(model.token_logprobs(text)[0]) and (own_logprobs - right_logprobs).abs().max() <= allowed
    total = model.log_likelihood(ids[:1], ids[1:])
    assert abs(total - float(right_logprobs.sum())) <= allowed * len(ids)
    padding = [*range(model.tokenizer.vocab_size, theirs.config.vocab_size)] or None  # rows without a token, which ours does not draw
    drawn = theirs.float().generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, suppress_tokens=padding)
    greedy = drawn[0, len(ids):].tolist()
    completion = model.generate(text, max_new_tokens=6)
    stops = model.tokenizer.stop_ids
    expected = greedy[: next((at for at, token in enumerate(greedy) if token in stops), len(greedy))]
    assert list(completion.tokens) == expected and completion.text == model.tokenizer.decode(expected, skip_special=True)
    assert completion.finish_reason == ("length" if len(expected) == 6 else "stop") and completion.prompt_tokens == len(ids)
    again = model.token_logprobs([*ids, *completion.tokens])[len(ids):]
    assert completion.logprobs == pytest.approx(again, abs=max(allowed * 8, 1e-5))


def test_a_model_of_transformers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "llama")
    write_model(tmp_path, 400)
    require_equal_to_transformers(tmp_path, TEXT)


@pytest.mark.slow
def test_a_real_model_of_transformers(tmp_path: Path) -> None:
    require_equal_to_transformers(write_huggingface_folder(tmp_path), "The capital of France is Paris, and that of Italy is Rome. " * 4)


def test_every_form_of_a_model_answers_alike(tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run")
    folder = export(tiny, tmp_path / "export", QWEN3, gguf=True)
    gguf = tmp_path / "export" / "gguf" / "model.gguf"
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000030"
    for several in ((folder, gguf, gguf.parent), (checkpoint, f"{tmp_path}/run@base", f"{tmp_path}/run@30")):
        models = [lmworks.load_model(one, device="cpu") for one in several]
        first = models[0].generate(TEXT, max_new_tokens=5)
        assert first.tokens and [model.generate(TEXT, max_new_tokens=5).tokens for model in models] == [first.tokens] * len(models)
        ids = [lmworks.load_tokenizer(str(one).partition("@")[0]).encode(TEXT) for one in several]
        assert ids == [models[0].encode(TEXT)] * len(models)
    assert lmworks.load_tokenizer(tiny.run_dir / "tokenizer").encode(TEXT) == lmworks.load_tokenizer(tiny.run_dir).encode(TEXT)


def test_generation_and_scores_are_those_of_evaluate(lmworks_command: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run")
    rows = [{"question": f"what is {n}?", "choices": ["red", "green or blue"], "answer": n % 2} for n in range(6)]
    (tmp_path / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n", encoding="utf-8")
    options = ("--tasks", tmp_path / "colors.yaml", "--form", "cloze", "--out", tmp_path / "out", "--device", "cpu")
    done = lmworks_command("evaluate", f"{tmp_path}/run@base", *options)
    assert done.code == 0, done.err
    model = lmworks.load_model(f"{tmp_path}/run@base", device="cpu")
    notable = [json.loads(line) for line in (tmp_path / "out" / "items-run@base.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(notable) >= len(rows)
    for one in notable:
        pairs = [(one["context"], " " + choice) for choice in one["choices"]]
        assert model.log_likelihoods(pairs) == pytest.approx(one["logprobs"], abs=1e-4)

    tuned = lmworks.load_model(tmp_path / "run", device="cpu")
    assert tuned.chat and not model.chat
    for subject, prompt in ((tuned, [{"role": "user", "content": "What is 1 + 1?"}]), (model, "What is 1 + 1?")):
        text, messages = (prompt, []) if isinstance(prompt, str) else ("", prompt)
        asked = Prompt("set", "1", text, tuple(messages), None, 8)
        (reply,) = Answerer(subject.module, subject.tokenizer, subject.chat)([asked])[0]
        assert subject.generate(prompt, max_new_tokens=8).text == reply.text


def test_sampling_is_reproducible_and_stops(tiny: Tiny, tmp_path: Path) -> None:
    save_run(tiny, tmp_path / "run")
    model = lmworks.load_model(tmp_path / "run", device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95}
    one, other = (model.generate(TEXT, seed=seed, **options) for seed in (1, 2))
    assert one == model.generate(TEXT, seed=1, **options) and one.tokens != other.tokens
    assert model.generate_batch([], max_new_tokens=1) == []
    long, short = [7] * 60, [7] * 3
    model.module.config = model.config.model_copy(update={"max_position_embeddings": 64})
    together = model.generate_batch([long, short], max_new_tokens=12)
    assert len(together[0].tokens) == 4 and together[0].finish_reason == "length"
    assert together[1].tokens == model.generate(short, max_new_tokens=12).tokens and len(together[1].tokens) > 4
    cut = model.generate(TEXT, seed=1, stop=one.text[2:4], **options)
    assert cut.text == one.text[: one.text.find(one.text[2:4])] and cut.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([10**9], {}, "has the id 1000000000, outside the vocabulary of 512"),
        ([-1], {}, "has the id -1"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is a number from 1 on, not 0"),
        ("a", {"temperature": float("nan")}, "temperature is a number from 0 on, not nan"),
        ("a", {"top_p": 1.5}, "top_p is a number from 0 to 1"),
        ("a", {"stop": ""}, "a stop text is empty"),
        ("a" * 600, {}, "tokens, and huggingface has 64 positions; shorten it"),
        ([{"role": "user"}], {}, "message"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt: Any, options: Any, said: str, refusing: lmworks.Model) -> None:
    with pytest.raises(lmworks.UserError) as error:
        refusing.generate(prompt, **options)
    assert said in str(error.value)


@pytest.fixture(scope="module")
def refusing(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> lmworks.Model:
    return lmworks.load_model(export(tiny, tmp_path_factory.mktemp("refusing"), QWEN3 | {"max_position_embeddings": "64 tokens"}), "cpu")


def test_an_empty_context_is_the_one_token_before_a_document(tmp_path: Path, refusing: lmworks.Model) -> None:
    write_tokenizer(tmp_path, "llama")
    write_model(tmp_path, 400)
    model = lmworks.load_model(tmp_path, device="cpu")
    bos, *ids = model.encode(TEXT)
    assert (bos,) == model.tokenizer.prefix
    assert model.log_likelihood("", TEXT) == pytest.approx(model.log_likelihood([bos], ids))
    text = refusing.encode(TEXT)
    assert refusing.log_likelihood("", TEXT) == pytest.approx(refusing.log_likelihood([refusing.tokenizer.eos_id], text))


def test_pairs_that_cannot_be_scored_are_refused(refusing: lmworks.Model) -> None:
    for pair, said in (((["a"], "b"), "both as text, or both as ids"), (([], [3]), "at least one token each"), (([3], []), "at least one"),
                       (("a b c", ""), "at least one token each"), (("", ""), "at least one token each")):  # fmt: skip
        with pytest.raises(lmworks.UserError, match=said):
            refusing.log_likelihood(*pair)  # type: ignore[arg-type]
