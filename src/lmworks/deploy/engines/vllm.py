"""vLLM. Option names: vLLM 0.32, whose CPU build the tests run."""

from __future__ import annotations

from lmworks.deploy.engines.common import UNTRIED, Request, dtype_of, parallel_reason, quantized
from lmworks.deploy.flags import Flag, Launch
from lmworks.deploy.hardware import GB
from lmworks.deploy.parsers import reasoning_parser, tool_parser

VERSION = "0.32.0"
_GPU, _AMD = "vllm/vllm-openai", "vllm/vllm-openai-rocm"
_CPU = "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo"


def launch(request: Request) -> Launch:
    """Flags of `vllm serve`."""
    source, hardware, fit = request.source, request.hardware, request.fit
    dtype, why = dtype_of(source)
    flags = [
        Flag("--served-model-name", source.name, "the name by which clients ask for the model"),
        Flag("--host", request.host, "loopback unless asked: an address of this machine alone"),
        Flag("--port", str(request.port), "the port of the API"),
        Flag("--dtype", dtype, why),
        Flag("--max-model-len", str(fit.context), request.context_reason),
        Flag("--max-num-seqs", str(fit.sequences), request.sequences_reason),
        Flag(
            "--max-num-batched-tokens", str(fit.batch_tokens), "tokens of one forward pass: more fills the device, fewer shortens the wait"
        ),
        Flag("--enable-chunked-prefill", None, "long prompts are computed in pieces between the tokens of other answers"),
        Flag("--enable-prefix-caching", None, "the cache of equal beginnings, such as system prompts, is used again"),
    ]
    if hardware.on_cpu:
        flags += [
            Flag("--enforce-eager", None, "without compilation, which needs a compiler and minutes at the start"),
            Flag(
                "VLLM_CPU_KVCACHE_SPACE",
                str(max(1, round(fit.cache / GB))),
                "memory of the KV cache in GB, from the model's config",
                env=True,
            ),
        ]
    else:
        flags += [
            Flag("--gpu-memory-utilization", f"{fit.fraction:g}", "share of GPU memory for weights, working memory and KV cache"),
            Flag("--tensor-parallel-size", str(fit.tensor), parallel_reason(request)),
            Flag("--data-parallel-size", str(fit.data), "replicas of the model, which share the requests"),
        ]
        if fit.expert:
            flags.append(Flag("--enable-expert-parallel", None, "whole experts are distributed over all GPUs instead of slices of each"))
    tools, thoughts = tool_parser(source.template), reasoning_parser(source.template)
    if tools.vllm:
        flags += [Flag("--enable-auto-tool-choice", None, "the model decides whether it calls a tool"),
                  Flag("--tool-call-parser", tools.vllm, tools.reason)]  # fmt: skip
    else:
        flags.append(Flag("--tool-call-parser", None, tools.reason, note=True))
    flags.append(Flag("--reasoning-parser", thoughts.vllm, thoughts.reason, note=not thoughts.vllm))
    if fit.speculate:
        value = f'{{"method": "mtp", "num_speculative_tokens": {fit.speculate}}}'
        flags.append(Flag("--speculative-config", value, "the model's layers of multi-token prediction draft tokens that it then verifies"))
    else:
        flags.append(Flag("--speculative-config", None, request.no_speculation_reason, note=True))
    flags += quantized(source, hardware)
    flags.append(Flag("VLLM_NO_USAGE_STATS", "1", "no usage statistics are sent", env=True))
    image = f"{_CPU if hardware.on_cpu else _AMD if hardware.amd else _GPU}:v{VERSION}"
    untried = "" if hardware.on_cpu else f" {UNTRIED}"
    container = f"# vLLM's own image, pinned to the version whose CPU build lmworks tests.{untried}\nFROM {image}\nENTRYPOINT []\n"
    return Launch(("vllm", "serve"), (), ("env", "VLLM_API_KEY"), tuple(flags), container, gpu_devices=not hardware.on_cpu)
