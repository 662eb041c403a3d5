"""How models are divided over devices, against figures computed by hand; models of 70B and 355B by their config alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lmworks.deploy.deploy import plan_deployment
from lmworks.deploy.sizing import GB, Hardware, parse_gpus
from lmworks.deploy.source import Source
from lmworks.errors import UserError
from lmworks.plan.counts import count_by_component
from lmworks.recipe.schema.model import Model

LLAMA_70B = Model(vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
                  intermediate_size=28672, max_position_embeddings="131072 tokens")  # fmt: skip
GLM_355B = Model.model_validate({
    "vocab_size": 151552, "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288, "attention_bias": True, "use_qk_norm": True, "rope": {"partial_rotary_factor": 0.5},
    "moe": {"n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "first_k_dense_replace": 3},
    "mtp": {}, "max_position_embeddings": "131072 tokens",
})  # fmt: skip


def source(model: Model, bits: int = 16, **changes: Any) -> Source:
    counts = count_by_component(model)
    size = (counts.total + counts.mtp) * bits // 8
    values: dict[str, Any] = {
        "name": "m", "directory": Path("/m"), "gguf": Path("/m.gguf"), "model": model, "family": "", "weight_bytes": size,
        "gguf_bytes": size,
        "mtp": 1 if model.mtp else 0, "quantization": "compressed-tensors" if bits < 16 else "", "bits": bits, "dtype": "bfloat16",
        "template": "<tool_call> <arg_key> <think>", "context": int(model.max_position_embeddings or 0),
    }  # fmt: skip
    return Source(**values | changes)


def flags(*arguments: Any, **options: Any) -> dict[str, str | None]:
    plan = plan_deployment(*arguments, **options)
    return {flag.name: flag.value for flag in plan.launch.flags if not flag.note}


def test_70b_on_eight_h100() -> None:
    """141 GB of weights and 327,680 bytes of cache per token: two GPUs hold the weights alone; four hold a full sequence of 43 GB too; no
    number of GPUs has room for 16 of them."""
    plan = plan_deployment(source(LLAMA_70B), "vllm", "throughput", parse_gpus("8xh100"))
    fit = plan.request.fit
    assert fit.kv_token == 2 * 80 * 8 * 128 * 2 / fit.tensor
    assert fit.weights == pytest.approx(141.1 * GB / fit.tensor, rel=1e-3)
    assert (fit.tensor, fit.data, fit.expert) == (4, 2, False)
    short = plan_deployment(source(LLAMA_70B), "vllm", "throughput", parse_gpus("8xh100"), context=8192).request.fit
    assert (short.tensor, short.data, short.context) == (4, 2, 8192)
    assert short.sequences == int(short.cache / (short.kv_token * 8192 / 4)) > 100


def test_the_scenarios_differ() -> None:
    hardware = parse_gpus("8xh200")
    found = {name: flags(source(GLM_355B, 8), "vllm", name, hardware, context=16384) for name in ("throughput", "balanced", "latency")}
    assert found["latency"]["--tensor-parallel-size"] == "8"
    assert int(found["throughput"]["--data-parallel-size"] or 0) > 1
    sequences = [int(one["--max-num-seqs"] or 0) for one in found.values()]
    assert sequences == sorted(sequences, reverse=True) and sequences[0] > 64 and sequences[2] == 8
    assert "--speculative-config" not in found["throughput"]
    assert found["latency"]["--speculative-config"] == '{"method": "mtp", "num_speculative_tokens": 1}'
    for one in found.values():
        assert one["--tool-call-parser"] == one["--reasoning-parser"] == "glm45"
        assert "--enable-expert-parallel" in one


def test_experts_are_distributed_over_all_gpus() -> None:
    fit = plan_deployment(source(GLM_355B, 8), "vllm", "throughput", parse_gpus("8xh200"), context=16384).request.fit
    counts = count_by_component(GLM_355B)
    experts = counts.components["experts"] / counts.total
    assert fit.weights == pytest.approx(source(GLM_355B, 8).weight_bytes * ((1 - experts) / fit.tensor + experts / 8))


@pytest.mark.parametrize(("bits", "gpus", "would_do"), [(16, "8xh100", "8xh200"), (8, "4xh100", "8xh100"), (16, "1xb200", "8xh200")])
def test_a_model_that_does_not_fit_is_refused_with_what_would(bits: int, gpus: str, would_do: str) -> None:
    with pytest.raises(UserError, match="does not fit") as error:
        plan_deployment(source(GLM_355B, bits), "vllm", "balanced", parse_gpus(gpus))
    assert would_do in str(error.value)
    plan_deployment(source(GLM_355B, bits), "vllm", "balanced", parse_gpus(would_do))


def test_the_memory_of_one_device_that_would_do_holds_all_experts() -> None:
    with pytest.raises(UserError, match=r"one device with (\d+) GB would do") as refused:
        plan_deployment(source(GLM_355B, weight_bytes=5_000_000_000_000), "vllm", "balanced", parse_gpus("8xh100"), context=2048)
    assert int(re.search(r"with (\d+) GB", str(refused.value))[1]) > 5000  # type: ignore[index]


def test_the_context_is_shortened_before_a_model_is_refused() -> None:
    plan = plan_deployment(source(LLAMA_70B), "vllm", "balanced", Hardware("gpu", 1, 170 * GB))
    assert 2048 <= plan.request.fit.context < 131072
    (flag,) = [flag for flag in plan.launch.flags if flag.name == "--max-model-len"]
    assert "131,072" in flag.reason


def test_llama_cpp_allocates_the_cache_of_all_slots() -> None:
    """A 4-bit file of 70B on a CPU with 64 GB: the slots and their whole cache fit into 80% of the memory."""
    plan = plan_deployment(source(LLAMA_70B, 4), "llama.cpp", "balanced", Hardware("cpu", 1, 64 * GB), context=8192)
    fit = plan.request.fit
    assert fit.weights + fit.working + fit.sequences * fit.context * fit.kv_token <= 0.8 * 64 * GB
    assert flags(source(LLAMA_70B, 4), "llama.cpp", "balanced", Hardware("cpu", 1, 64 * GB), context=8192)["--ctx-size"] == str(
        fit.sequences * fit.context
    )


def test_latent_attention_is_not_divided() -> None:
    model = Model.model_validate({
        "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 192,
        "intermediate_size": 1024, "mla": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        "max_position_embeddings": "4096 tokens",
    })  # fmt: skip
    fit = plan_deployment(source(model), "vllm", "latency", parse_gpus("8xl4")).request.fit
    assert fit.tensor == 8 and fit.kv_token == 4 * (512 + 64) * 2


def test_a_state_counts_once_for_a_sequence_and_not_for_each_token() -> None:
    """Qwen3-Next's layers: 24,576 bytes per token in 12 layers of attention, and states of 77 MB in the other 36."""
    shape: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "intermediate_size": 5120, "layer_types": ["linear_attention", "linear_attention", "linear_attention",
        "full_attention"] * 12, "gated_delta": {"num_key_heads": 4, "num_value_heads": 32}, "max_position_embeddings": "262144 tokens",
    }  # fmt: skip
    plan = plan_deployment(source(Model.model_validate(shape)), "vllm", "throughput", parse_gpus("1xl4"), context=2048)
    fit = plan.request.fit
    assert fit.kv_token == 12 * 2 * 2 * 256 * 2 and 36 * 32 * 128 * 128 * 4 < fit.state < 80e6
    assert fit.sequences == int(fit.cache / (fit.state + fit.kv_token * 1024)) > 100 and "MB per sequence" in plan.request.sequences_reason
    latency = plan_deployment(source(Model.model_validate(shape)), "vllm", "latency", parse_gpus("8xh100")).request.fit
    assert latency.tensor == 4 and latency.state == fit.state / 4  # 8 do not divide the heads of linear attention
    alone = Model.model_validate(shape | {"layer_types": ["linear_attention"] * 48})
    assert plan_deployment(source(alone), "vllm", "balanced", parse_gpus("1xh100")).request.fit.kv_token == 0


def test_each_replica_of_sglang_has_all_experts() -> None:
    """Replicas of vLLM share the experts, so that 355 GB fit into one GPU of 141 GB with seven others."""
    ours, theirs = (plan_deployment(source(GLM_355B, 8), engine, "balanced", parse_gpus("8xh200"), context=16384) for engine in
                    ("vllm", "sglang"))  # fmt: skip
    assert ours.request.fit.tensor == 1
    fit = theirs.request.fit
    assert (fit.tensor, fit.data) == (4, 2) and fit.weights == pytest.approx(source(GLM_355B, 8).weight_bytes / 4)


def test_sglang_divides_no_experts_that_cannot_be_divided() -> None:
    odd = Model.model_validate(GLM_355B.model_dump() | {"moe": {"n_routed_experts": 162, "num_experts_per_tok": 8,
                                                                "moe_intermediate_size": 1536, "first_k_dense_replace": 3}})  # fmt: skip
    assert flags(source(GLM_355B, 8), "sglang", "latency", parse_gpus("8xh200"))["--ep-size"] == "8"
    assert "--ep-size" not in flags(source(odd, 8), "sglang", "latency", parse_gpus("8xh200"))


def test_vllm_reads_its_cache_on_a_cpu_in_gib() -> None:
    plan = plan_deployment(source(LLAMA_70B, 4), "vllm", "throughput", Hardware("cpu", 1, 512 * GB))
    (flag,) = [flag for flag in plan.launch.flags if flag.name == "VLLM_CPU_KVCACHE_SPACE"]
    assert plan.request.fit.cache - (1 << 30) < int(flag.value or 0) << 30 <= plan.request.fit.cache


def test_vllm_would_give_lfm2_another_head() -> None:
    shape = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 128, "layer_types": ["conv", "full_attention"], "short_conv": {},
             "max_position_embeddings": "4096 tokens"}  # fmt: skip
    own, tied = (source(Model.model_validate(shape | {"tie_word_embeddings": tied})) for tied in (False, True))
    with pytest.raises(UserError, match="a head of its own: use --engine sglang"):
        plan_deployment(own, "vllm", "balanced", parse_gpus("1xh100"))
    plan_deployment(own, "sglang", "balanced", parse_gpus("1xh100"))
    plan_deployment(tied, "vllm", "balanced", parse_gpus("1xh100"))


def test_sglang_has_eagle_and_no_cpu() -> None:
    found = flags(source(GLM_355B, 8), "sglang", "latency", parse_gpus("8xh200"))
    assert found["--speculative-algorithm"] == "EAGLE" and found["--speculative-num-draft-tokens"] == "4"
    assert float(found["--mem-fraction-static"] or 1) < 0.88
    with pytest.raises(UserError, match="SGLang needs GPUs"):
        plan_deployment(source(LLAMA_70B, 4), "sglang", "latency", Hardware("cpu", 1, 512 * GB))


def test_the_limit_of_requests_is_over_all_replicas_in_sglang_and_of_each_in_vllm() -> None:
    """vLLM's engines have each their own scheduler; SGLang divides its limit by the replicas (max_running_requests // dp_size)."""
    for name in ("throughput", "balanced"):
        ours, theirs = (flags(source(LLAMA_70B), engine, name, parse_gpus("8xh100"), context=8192) for engine in ("vllm", "sglang"))
        replicas = int(ours["--data-parallel-size"] or 0)
        assert replicas == int(theirs["--dp-size"] or 0) == 2
        assert int(theirs["--max-running-requests"] or 0) == replicas * int(ours["--max-num-seqs"] or 0)


def test_no_parser_without_its_marks() -> None:
    plain = source(LLAMA_70B, template="{{ messages }}", context=8192)
    plan = plan_deployment(plain, "vllm", "balanced", parse_gpus("8xh100"))
    (flag,) = [flag for flag in plan.launch.flags if flag.name == "--tool-call-parser"]
    assert flag.note and flag.value is None and "no tool calls of a known form" in flag.reason
    hermes = source(LLAMA_70B, template='<tool_call>{"name": x, "arguments": y}</tool_call> <think> enable_thinking', context=8192)
    found = flags(hermes, "vllm", "balanced", parse_gpus("8xh100"))
    assert (found["--tool-call-parser"], found["--reasoning-parser"]) == ("hermes", "qwen3")


@pytest.mark.parametrize(("template", "vllm", "sglang", "note"), [
    ("[TOOL_CALLS]", "mistral", "mistral", "tool calls: the template has Mistral's [TOOL_CALLS]"),
    ("<|python_tag|>", "llama3_json", "llama3", "tool calls: the template has Llama 3's <|python_tag|>"),
    ('<|start_header_id|> "parameters"', "llama3_json", "llama3", "tool calls: the template writes tool calls as JSON with name and"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3", "deepseekv3", "tool calls: the template has DeepSeek-V3's marks"),
    ("<tool_call> <function= <parameter=", "qwen3_coder", "qwen3_coder", "tool calls: the template writes tool calls as <function=NAME>"),
    ("<|channel|>analysis functions.", "openai", "gpt-oss", "thoughts behind <|channel|>analysis<|message|>, and tool calls: the template"),
    ("{{ messages }}", None, None, "calls in <tool_call>; other forms stay text"),
])  # fmt: skip
def test_every_engine_is_told_the_form_of_tool_calls(template: str, vllm: str | None, sglang: str | None, note: str) -> None:
    model = source(LLAMA_70B, template=template, context=8192)
    for engine, parser in (("vllm", vllm), ("sglang", sglang)):
        assert flags(model, engine, "balanced", parse_gpus("8xh100")).get("--tool-call-parser") == parser
    ours = plan_deployment(model, "lmworks", "balanced", Hardware("cpu", 1, 512 * GB)).launch.flags
    assert note in next(flag.reason for flag in ours if flag.name == "tools")
