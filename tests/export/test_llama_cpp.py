"""Our GGUF file in llama.cpp itself: the same ids, the same log-probabilities, the same prompts, and what its own converter writes.

Tolerance of log-probabilities: 5e-5, where 1e-5 is the most that was seen. Both sides compute in fp32, llama.cpp with a cache of fp32 too
(its default of fp16 costs about 5e-4). A wrong rotation costs more than 1e-2, an expert chosen otherwise 5e-3 and more. Where two experts
have almost the same score, the rounding of a processor decides: from such a token on, whose values later tokens read, only the mean is held
to the tolerance. llama.cpp's GELU is a table in fp16, which our model is given for the comparison.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import adapted
from engines import ask, engine
from small_models import CHATS, MODELS, STEPS, TEXTS, gelu_of_a_table

from lmworks.export.export import write_huggingface
from lmworks.export.gguf import write_gguf, write_gguf_adapter
from lmworks.inference.generate import GenerateOptions, generate
from lmworks.model import Transformer
from lmworks.model.router import Router
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.weights.open import open_model

pytestmark = [pytest.mark.slow, pytest.mark.needs("llama")]


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_log_probabilities(make_run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    run = make_run(name, STEPS)
    _compare(run, run.model, tmp_path / "model.gguf", name)


@pytest.mark.parametrize("method", ["linear", "yarn", "llama3"])
def test_an_extended_context(make_run: Callable[..., Any], tmp_path: Path, method: str) -> None:
    """`export.rope` in the metadata of the file is what llama.cpp computes, also beyond the trained context."""
    run = make_run("llama", STEPS)
    model = open_model(run.directory, "cpu", as_stored=True, rope=RopeExtension(scaling=method, factor=4)).model  # type: ignore[arg-type]
    model.compute_dtype = torch.float32
    _compare(run, model, tmp_path / "model.gguf", method)


def _compare(run: Any, model: Transformer, path: Path, name: str) -> None:
    """The ids and log-probabilities of `model` and of llama.cpp with its file."""
    python, server = engine("LMWORKS_LLAMA_PYTHON"), engine("LMWORKS_LLAMA_SERVER")
    write_gguf(model, run.tokenizer, path, torch.float32, name)
    answers = ask(python, "scores_llama.py", {"model": str(path), "texts": TEXTS}, LLAMA_CPP_LIB_PATH=str(server.parent))
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = run.tokenizer.encode(text)
        assert answer["ids"] == ids
        with torch.no_grad(), ties(model, len(ids)) as tied, gelu_of_a_table(model):
            logprobs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        expected = logprobs[range(len(ids) - 1), ids[1:]].numpy()
        difference = np.abs(expected - answer["logprobs"])
        certain = int(tied.nonzero().min()) if tied.any() else len(difference)
        print(f"{name}: {len(ids)} tokens, log-probabilities differ by at most {difference.max():.1e}, mean {difference.mean():.1e}; "
              f"{int(tied.sum())} ties, the first at {certain}")  # fmt: skip
        assert difference[:certain].max(initial=0) < 5e-5 and difference.mean() < 5e-5 and difference.max() < 5e-2


@contextmanager
def ties(model: Transformer, tokens: int) -> Iterator[torch.Tensor]:
    """Marks the tokens of a forward pass of one row whose experts would be others with scores different by 1e-5 of the largest."""
    tied, noise = torch.zeros(tokens, dtype=torch.bool), torch.Generator().manual_seed(0)

    def mark(router: Any, arguments: tuple[torch.Tensor], routing: Any) -> None:
        logits = torch.nn.functional.linear(arguments[0].flatten(0, 1), router.weight)
        chosen = routing.experts.sort(-1).values
        for _ in range(16):
            other = logits + 1e-5 * logits.abs().max() * (2 * torch.rand(logits.shape, generator=noise) - 1)
            tied.logical_or_((router._select(router.gates(other), other).sort(-1).values != chosen).any(-1))

    hooks = [module.register_forward_hook(mark) for module in model.modules() if isinstance(module, Router)]
    yield tied
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(("name", "targets"), [("glm4moe", ("all-linear", "experts")), ("llama", ("all-linear",))])
def test_an_adapter_is_applied_as_merging_does(
    make_run: Callable[..., Any], tmp_path: Path, name: str, targets: tuple[str, ...]
) -> None:
    python, server = engine("LMWORKS_LLAMA_PYTHON"), engine("LMWORKS_LLAMA_SERVER")
    run = make_run(name, STEPS)
    one = adapted(run.model, *targets)
    write_gguf(run.model, run.tokenizer, tmp_path / "base.gguf", torch.float32, name)
    write_gguf_adapter(one.adapters, one.lora, run.model, tmp_path / "adapter.gguf", name)
    question = {"model": str(tmp_path / "base.gguf"), "texts": TEXTS}
    library = {"LLAMA_CPP_LIB_PATH": str(server.parent)}
    base = ask(python, "scores_llama.py", question, **library)
    answers = ask(python, "scores_llama.py", question | {"lora": str(tmp_path / "adapter.gguf")}, **library)
    for plain, answer in zip(base, answers, strict=True):
        ids = answer["ids"]
        with torch.no_grad():
            logprobs = one.merged(torch.tensor([ids]))[0].double().log_softmax(-1)
        expected = logprobs[range(len(ids) - 1), ids[1:]].numpy()
        difference, effect = (np.abs(expected - other["logprobs"]).max() for other in (answer, plain))
        print(f"{name}: with the adapter different by at most {difference:.1e}, without it {effect:.1e}")
        assert difference < 5e-5 < 1e-2 < effect


@pytest.mark.parametrize(
    "name",
    ["glm4moe", "glm4moe-groups", "deepseek", "qwen3", "qwen3moe", "mixtral", "olmoe", "olmo2", "olmo3", "mellum", "gpt-oss",
     "minimax-m2", "qwen2", "qwen2moe", "llama", "llama-yarn",
     "llama-llama3", "smollm3", "glm4", "granite", "granitehybrid", "nemotron-h-moe", "qwen3next", "qwen35", "qwen35moe", "lfm2",
     "lfm2moe"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_llama_cpps_own_converter_writes_the_same(make_run: Callable[..., Any], tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Tensor by tensor and field by field, from our Hugging Face export. In bf16 our norms and routers keep what they were in fp32."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")
    source, run = engine("LMWORKS_LLAMA_SOURCE"), make_run(name, STEPS)
    write_huggingface(run.model, run.tokenizer, tmp_path / "tiny", dtype)
    # the converter knows tokenizers by hashes of published ones: the answer it would find is put in its mouth; and it imports
    # sentencepiece only to find that there is no such tokenizer
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import conversion.base as base\n"
        "def absent(self): raise FileNotFoundError\n"
        "base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'glm4'\n"
        "base.TextModel._create_vocab_sentencepiece = absent\n"
        "sys.argv[0] = sys.argv.pop(1)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    kind = "f32" if dtype == torch.float32 else "bf16"
    command = [str(source), str(source / "convert_hf_to_gguf.py"), str(tmp_path / "tiny"), "--outfile", str(tmp_path / "theirs.gguf"),
               "--outtype", kind, *(["--no-mtp"] if name.startswith(("qwen3next", "qwen35")) else [])]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-3000:]
    write_gguf(run.model, run.tokenizer, tmp_path / "ours.gguf", dtype, "tiny")
    theirs, ours = (gguf.GGUFReader(tmp_path / f"{who}.gguf") for who in ("theirs", "ours"))
    expected, found = ({tensor.name: tensor for tensor in reader.tensors} for reader in (theirs, ours))
    assert found.keys() == expected.keys()
    for tensor, other in ((found[key], expected[key]) for key in expected):
        assert tensor.tensor_type == other.tensor_type and tensor.shape.tolist() == other.shape.tolist(), tensor.name
        values = tensor.data
        kept = any(name in tensor.name for name in ("exp_probs_b", "rope_freqs"))  # fp32 in their file too
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32 and dtype == torch.bfloat16 and not kept:
            # a class that stores the difference of a norm from 1 rounds that
            shift = family_of(run.model.config).norms_plus_one and "norm" in tensor.name and "ssm_norm" not in tensor.name
            values = (torch.from_numpy(values - shift).to(dtype).float() + float(shift)).numpy()
        if tensor.name.endswith("ssm_a") and dtype == torch.bfloat16:  # a function of what they read rounded
            np.testing.assert_allclose(values, other.data, rtol=0.01, err_msg=tensor.name)
            continue
        np.testing.assert_array_equal(values, other.data, err_msg=tensor.name)
    fields, wanted = (
        {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")} for reader in (ours, theirs)
    )
    differ = {key for key in wanted if fields.get(key) != wanted[key]}
    # theirs capitalises the name, says 2^20 tokens for models without positions, and has the sections of 32 rotated pairs for any number
    architecture = fields["general.architecture"]
    free = {"general.name", "granitehybrid.context_length", "nemotron_h_moe.context_length", f"{architecture}.rope.dimension_sections"}
    if architecture == "glm4":  # theirs says <|endoftext|>, and [gMASK] as we do for GLM-4 with experts; ours has add_bos_token false
        free.add("tokenizer.ggml.bos_token_id")
    assert differ <= free
    assert {key.split(".", 1)[1] for key in fields.keys() - wanted.keys()} <= SAID_BESIDES


# What theirs leaves to defaults, or, for the dense architectures, to chance: without eot and eom llama.cpp would not stop at the next role.
SAID_BESIDES = {
    "vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length", "ggml.add_bos_token", "ggml.add_eos_token",
    "ggml.bos_token_id", "ggml.eot_token_id", "feed_forward_length", "ggml.eom_token_id", "ggml.unknown_token_id",
    "attention.layer_norm_rms_epsilon", "rope.freq_base",
}  # fmt: skip


@contextmanager
def served(server: Path, model: Path) -> Iterator[Callable[[str, Any], Any]]:
    """A llama-server, and a function that posts to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["-c", "256", "-t", "1", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--jinja", "--host", "127.0.0.1"]
    options += ["--port", str(port)]
    log = model.with_name("server.log")
    with log.open("wb") as output, subprocess.Popen([str(server), "-m", str(model), *options], stdout=output, stderr=output) as process:

        def post(path: str, question: Any) -> Any:
            data, head = json.dumps(question).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, head)
            with urllib.request.urlopen(request, timeout=900) as answer:
                return json.load(answer)

        try:
            for _ in range(240):
                assert process.poll() is None, log.read_text()[-3000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(0.5)
            yield post
        finally:
            process.terminate()


def test_server_makes_our_prompts_and_our_greedy_text(make_run: Callable[..., Any], tmp_path: Path) -> None:
    server, run = engine("LMWORKS_LLAMA_SERVER"), make_run("glm4moe", STEPS)
    write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, "tiny")
    with served(server, tmp_path / "model.gguf") as post:
        for chat in CHATS:
            prompt = run.tokenizer.apply_chat(chat["messages"], chat.get("tools"), add_generation_prompt=True)
            assert post("/apply-template", chat)["prompt"] == prompt
            ids, _ = run.tokenizer.encode_chat(chat["messages"], chat.get("tools"), add_generation_prompt=True)
            assert post("/tokenize", {"content": prompt, "parse_special": True, "add_special": True})["tokens"] == ids
        prompts = [run.tokenizer.encode(text)[:40] for text in TEXTS]
        expected = generate(run.model, prompts, GenerateOptions(max_new_tokens=16, temperature=0.0, stop_ids=run.tokenizer.stop_ids))
        for ids, tokens in zip(prompts, expected, strict=True):
            answer = post("/completion", {"prompt": ids, "n_predict": 16, "temperature": 0.0, "return_tokens": True, "cache_prompt": False})
            assert answer["tokens"] == tokens
        reply = post("/v1/chat/completions", {"messages": CHATS[0]["messages"], "max_tokens": 8, "temperature": 0.0})
        assert reply["choices"][0]["finish_reason"] in ("stop", "length")


def test_server_stops_at_every_stop_token(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """The head is bent so that one token always wins: llama.cpp must take it for the end of the answer, and nothing else."""
    server, run = engine("LMWORKS_LLAMA_SERVER"), make_run("llama", STEPS)
    ordinary = run.tokenizer.encode("a")[0]
    for token in (*run.tokenizer.stop_ids, ordinary):
        bent = Transformer(run.recipe.model)
        bent.load_state_dict(run.model.state_dict())
        with torch.no_grad():
            bent.head.weight.mul_(1e-3)
            bent.norm.weight.zero_()
            bent.norm.weight[0] = 1.0
            bent.layers[-1].ffn.down.weight[0].zero_()
            bent.embedding.weight[:, 0] = 100.0
            bent.head.weight[token, 0] = 1.0
        write_gguf(bent, run.tokenizer, tmp_path / "model.gguf", torch.float32, "bent")
        with served(server, tmp_path / "model.gguf") as post:
            asked = {"prompt": run.tokenizer.encode("Hello"), "n_predict": 4, "temperature": 0.0, "return_tokens": True}
            answer = post("/completion", asked)
        stopped = token != ordinary
        assert answer["stop_type"] == ("eos" if stopped else "limit")
        assert len([one for one in answer["tokens"] if one == ordinary]) == (0 if stopped else 4)
