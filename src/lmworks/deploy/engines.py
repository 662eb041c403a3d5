"""The engines by name: the options of each for a request.

- vLLM. Option names: vLLM 0.32, whose CPU build the tests run.
- SGLang. It needs a GPU, so that lmworks does not run it; the tests compare options and metrics with those recorded of its source.
- llama.cpp's server, in the version that lmworks tests: the source in the package llama-cpp-python 0.3.36.
- The built-in server: plain PyTorch on one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lmworks.deploy.request import UNTRIED, Flag, Launch, Request, dtype_of, parallel_reason, quantized, reasoning_parser, tool_parser
from lmworks.deploy.sizing import Hardware, Use
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import rendered
from lmworks.tokenizer.special import THINK, thought_form, tool_form

VLLM_VERSION = "0.32.0"
_VLLM_GPU, _VLLM_AMD = "vllm/vllm-openai", "vllm/vllm-openai-rocm"
_VLLM_CPU = "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo"


def _api(name: str, request: Request, reserved: str = r"(?!)") -> tuple[Flag, ...]:
    """The model's name and the address, which all engines take; `name` is the option for the first. Raises `UserError` for a name in
    which the engine would read what the pattern `reserved` finds as something else."""
    if found := re.search(reserved, request.source.name):
        raise UserError(
            f"the engine takes {found[0]!r} in {request.source.name!r} for something else than a part of the model's name; give another "
            "with --name"
        )
    return (
        Flag(name, request.source.name, "the name by which clients ask for the model"),
        Flag("--host", request.host, "loopback unless asked: an address of this machine alone"),
        Flag("--port", str(request.port), "the port of the API"),
    )


def launch_vllm(request: Request) -> Launch:
    """Flags of `vllm serve`. Raises `UserError` for a model that vLLM would compute otherwise."""
    source, hardware, fit = request.source, request.hardware, request.fit
    if source.model.short_conv is not None and not source.model.tie_word_embeddings:  # read in its lfm2.py: the head is always tied
        raise UserError(
            "vLLM computes the head of LFM2 models from their embedding, and this model has a head of its own: use --engine sglang, "
            "llama.cpp or lmworks"
        )
    dtype, why = dtype_of(source)
    flags = [
        *_api("--served-model-name", request, r"\A-"),  # an option
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
                str(max(1, int(fit.cache) >> 30)),
                "memory of the KV cache in GiB, from the model's config",
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
    image = f"{_VLLM_CPU if hardware.on_cpu else _VLLM_AMD if hardware.amd else _VLLM_GPU}:v{VLLM_VERSION}"
    untried = "" if hardware.on_cpu else f" {UNTRIED}"
    container = f"# vLLM's own image, pinned to the version whose CPU build lmworks tests.{untried}\nFROM {image}\nENTRYPOINT []\n"
    return Launch(("vllm", "serve"), (), ("env", "VLLM_API_KEY"), tuple(flags), container, gpu_devices=not hardware.on_cpu)


SGLANG_VERSION = "0.5.23"
SGLANG_AMD_VERSION = "0.5.14"  # the last one whose image for MI300 has a tag without a date
_SGLANG_KEY = (
    "SGLang writes its options to the log when it starts, the API key included (sgl-project/sglang#37457). `start.sh` replaces the key in "
    "these lines; another way of starting it would show the key. Who has the key also reads it from `/server_info`."
)


def launch_sglang(request: Request) -> Launch:
    """Flags of `sglang.launch_server`. Raises `UserError` for a CPU."""
    source, hardware, fit = request.source, request.hardware, request.fit
    if hardware.on_cpu:
        raise UserError("SGLang needs GPUs: give them with --gpus 1xh100, or use --engine vllm or llama.cpp on a CPU")
    dtype, why = dtype_of(source)
    flags = [
        *_api("--served-model-name", request, r"\A-|:"),  # an option; a LoRA adapter
        Flag("--dtype", dtype, why),
        Flag("--context-length", str(fit.context), request.context_reason),
        Flag("--max-running-requests", str(fit.sequences * fit.data), request.sequences_reason),
        Flag("--chunked-prefill-size", str(fit.batch_tokens), "long prompts are computed in pieces between the tokens of other answers"),
        Flag("--mem-fraction-static", f"{(fit.weights + fit.cache) / hardware.memory:.2f}", "share of GPU memory for weights and KV cache"),
        Flag("--tp-size", str(fit.tensor), parallel_reason(request)),
        Flag("--dp-size", str(fit.data), "replicas of the model, which share the requests"),
        Flag("--enable-metrics", None, "Prometheus reads /metrics"),
        Flag("radix cache", None, "the cache of equal beginnings is on by default", note=True),
    ]
    if fit.expert and fit.data == 1 and source.model.moe and source.model.moe.n_routed_experts % fit.tensor == 0:
        flags.append(Flag("--ep-size", str(fit.tensor), "whole experts are distributed over the GPUs instead of slices of each"))
    tools, thoughts = tool_parser(source.template), reasoning_parser(source.template)
    flags.append(Flag("--tool-call-parser", tools.sglang, tools.reason, note=not tools.sglang))
    flags.append(Flag("--reasoning-parser", thoughts.sglang, thoughts.reason, note=not thoughts.sglang))
    if fit.speculate:
        steps = 3 if request.scenario.widest else 1
        flags += [
            Flag("--speculative-algorithm", "EAGLE", "the model's layers of multi-token prediction draft tokens that it then verifies"),
            Flag("--speculative-num-steps", str(steps), "drafts in a row: more pay off only with few sequences"),
            Flag("--speculative-eagle-topk", "1", "one chain of drafts, as the layers were trained"),
            Flag("--speculative-num-draft-tokens", str(steps + 1), "the drafts and the token before them"),
        ]
    else:
        flags.append(Flag("--speculative-algorithm", None, request.no_speculation_reason, note=True))
    flags += quantized(source, hardware)
    tag = f"v{SGLANG_AMD_VERSION}-rocm720-mi30x" if hardware.amd else f"v{SGLANG_VERSION}"
    container = f"# SGLang's own image. {UNTRIED}\nFROM lmsysorg/sglang:{tag}\nENTRYPOINT []\n"
    program = ("python3", "-m", "sglang.launch_server")
    return Launch(program, ("--model-path",), ("argv", "--api-key"), tuple(flags), container, gpu_devices=True, notes=(_SGLANG_KEY,))


_LLAMA_CPP_VERSION, _LLAMA_CPP_SHA256 = "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_LLAMA_CPP_SOURCE = (
    "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    f"llama_cpp_python-{_LLAMA_CPP_VERSION}.tar.gz"
)
_DEBIAN = "debian:12.11-slim"
_CUDA = "nvidia/cuda:12.8.1-{}-ubuntu24.04"  # the images of llama.cpp's own container file; 12.8 is the first for Blackwell (B200)
_ROCM = "rocm/dev-ubuntu-24.04:7.2.4-complete"
_CDNA = "gfx90a;gfx942;gfx950"  # MI200, MI300 and MI350


def _llama_cpp_container(hardware: Hardware) -> str:
    build, runtime, before, options, untried = _DEBIAN, _DEBIAN, "", "", ""
    if hardware.amd:
        build = runtime = _ROCM  # the libraries of ROCm are in this image alone
        before, options = 'HIPCXX="$(hipconfig -l)/clang" HIP_PATH="$(hipconfig -R)" ', f' -DGGML_HIP=ON -DGPU_TARGETS="{_CDNA}"'
    elif not hardware.on_cpu:
        build, runtime = _CUDA.format("devel"), _CUDA.format("runtime")
        options = " -DGGML_CUDA=ON -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined"  # the driver comes with the machine that runs it
    if not hardware.on_cpu:
        untried = f" {UNTRIED}"
    return rendered(
        "lmworks.deploy", "llama_cpp.Containerfile.jinja", build=build, runtime=runtime, source=_LLAMA_CPP_SOURCE,
        sha256=_LLAMA_CPP_SHA256, before=before, options=options, untried=untried,
    )  # fmt: skip


def launch_llama_cpp(request: Request) -> Launch:
    """Flags of `llama-server`."""
    source, hardware, fit = request.source, request.hardware, request.fit
    slots = fit.sequences
    flags = [
        *_api("--alias", request, r",|\A\s|\s\Z"),  # commas divide several names, of which the ends are stripped
        Flag("--parallel", str(slots), request.sequences_reason),
        Flag("--ctx-size", str(slots * fit.context), f"{slots} sequences of {fit.context} tokens each, allocated at the start"),
        Flag("--batch-size", str(fit.batch_tokens), "tokens of one forward pass: more fills the device, fewer shortens the wait"),
        Flag(
            "--jinja",
            None,
            "the model's own chat template, which also decides how tool calls are read: " + tool_parser(source.template).reason,
        ),
        Flag("--metrics", None, "Prometheus reads /metrics"),
        Flag("--no-ui", None, "an API alone: the page is one more thing that the port would offer"),
        Flag("prompt cache", None, "the cache of equal beginnings is used again by default", note=True),
        Flag("--spec-type", None, "no speculative decoding: GGUF files of lmworks have no layers of multi-token prediction", note=True),
    ]
    if hardware.on_cpu:
        flags.append(Flag("--threads", str(machine.cores()), "the cores of the machine on which this was written"))
    else:
        flags.append(Flag("--n-gpu-layers", "999", "all layers on the GPU"))
        if hardware.count > 1:
            flags.append(Flag("--split-mode", "layer", f"the layers are divided over {hardware.count} GPUs"))
    gpus = not hardware.on_cpu
    key, container = ("option", "--api-key-file"), _llama_cpp_container(hardware)
    return Launch(("llama-server",), ("--model",), key, tuple(flags), container, gpu_devices=gpus, gguf=True)


def _lmworks_tools(template: str) -> str:
    """Which tool calls the server reads in replies of a model with this chat template."""
    form = tool_form(template)
    return f"tool calls: {form.reason}" if form else "calls in <tool_call>; other forms stay text"


def _lmworks_thoughts(template: str) -> str:
    form = thought_form(template) or THINK
    return f"thoughts behind {form.begin}"


def launch_lmworks(request: Request) -> Launch:
    """Flags of `lmworks serve`. Raises `UserError` for GPUs of AMD, for which the package index has no build of torch."""
    if request.hardware.amd:
        raise UserError("--engine lmworks has no container for GPUs of AMD: use --engine vllm, sglang or llama.cpp")
    template = request.source.template
    flags = (
        *_api("--name", request),
        Flag("context", None, request.context_reason, note=True),
        Flag("tools", None, f"the server reads {_lmworks_thoughts(template)}, and {_lmworks_tools(template)}", note=True),
        Flag("speculation", None, request.no_speculation_reason, note=True),
    )
    program = ("python3", "-m", "lmworks.cli.main", "serve")
    container = rendered("lmworks.deploy", "lmworks.Containerfile.jinja", untried="" if request.hardware.on_cpu else f" {UNTRIED}")
    return Launch(program, (), ("env", "LMWORKS_API_KEY"), flags, container, gpu_devices=not request.hardware.on_cpu)


@dataclass(frozen=True)
class Engine(Use):
    name: str
    launch: Callable[[Request], Launch]


ENGINES = {
    one.name: one
    for one in (
        Engine("vllm", launch_vllm, shared_experts=True), Engine("sglang", launch_sglang),
        Engine("llama.cpp", launch_llama_cpp, gguf=True, whole_cache=True), Engine("lmworks", launch_lmworks, single=True),
    )
}  # fmt: skip


def engine_of(name: str) -> Engine:
    """The engine of this name. Raises `UserError` for an unknown one."""
    if name not in ENGINES:
        raise UserError(f"--engine {name!r} is not known; it is one of: {', '.join(ENGINES)}")
    return ENGINES[name]
