"""llama.cpp's server, in the version that lmworks tests: the source in the package llama-cpp-python 0.3.36."""

from __future__ import annotations

from lmworks import machine
from lmworks.deploy.engines.common import UNTRIED, Request
from lmworks.deploy.flags import Flag, Launch
from lmworks.deploy.hardware import Hardware
from lmworks.deploy.parsers import tool_parser
from lmworks.errors import UserError

_VERSION, _SHA256 = "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_SOURCE = (
    "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    f"llama_cpp_python-{_VERSION}.tar.gz"
)
_BUILD = """# llama.cpp from one pinned source package of the Python package index: the version that lmworks tests.{untried}
FROM {build} AS build
RUN apt-get update \\
    && apt-get install -y --no-install-recommends ca-certificates curl build-essential cmake ninja-build \\
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
RUN curl -fsSL -o source.tar.gz {source} \\
    && echo "{sha256}  source.tar.gz" | sha256sum -c - && tar -xzf source.tar.gz --strip-components=1 && rm source.tar.gz
# For any processor with AVX2. Not "native": gcc 12 compiles the AMX kernels to code that crashes on every quantized model.
RUN {before}cmake -G Ninja -S vendor/llama.cpp -B out -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \\
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \\
    -DGGML_NATIVE=OFF -DGGML_AMX_TILE=OFF{options} && cmake --build out --target llama-server
FROM {runtime}
# python3 runs the check that asks the server something; python3-minimal lacks the modules for it
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /build/out/bin/llama-server /usr/local/bin/llama-server
"""
_DEBIAN = "debian:12.11-slim"
_CUDA = "nvidia/cuda:12.8.1-{}-ubuntu24.04"  # the images of llama.cpp's own container file; 12.8 is the first for Blackwell (B200)
_ROCM = "rocm/dev-ubuntu-24.04:7.2.4-complete"
_CDNA = "gfx90a;gfx942;gfx950"  # MI200, MI300 and MI350


def _container(hardware: Hardware) -> str:
    build, runtime, before, options, untried = _DEBIAN, _DEBIAN, "", "", ""
    if hardware.amd:
        build = runtime = _ROCM  # the libraries of ROCm are in this image alone
        before, options = 'HIPCXX="$(hipconfig -l)/clang" HIP_PATH="$(hipconfig -R)" ', f' -DGGML_HIP=ON -DGPU_TARGETS="{_CDNA}"'
    elif not hardware.on_cpu:
        build, runtime = _CUDA.format("devel"), _CUDA.format("runtime")
        options = " -DGGML_CUDA=ON -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined"  # the driver comes with the machine that runs it
    if not hardware.on_cpu:
        untried = f" {UNTRIED}"
    return _BUILD.format(
        build=build, runtime=runtime, source=_SOURCE, sha256=_SHA256, before=before, options=options, untried=untried
    )  # fmt: skip


def launch(request: Request) -> Launch:
    """Flags of `llama-server`. Raises `UserError` without a GGUF file."""
    source, hardware, fit = request.source, request.hardware, request.fit
    if source.gguf is None:
        raise UserError("llama.cpp reads a GGUF file: export one (--set export.gguf=true), or give --gguf FILE")
    slots = fit.sequences
    flags = [
        Flag("--alias", source.name, "the name by which clients ask for the model"),
        Flag("--host", request.host, "loopback unless asked: an address of this machine alone"),
        Flag("--port", str(request.port), "the port of the API"),
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
    key, container = ("option", "--api-key-file"), _container(hardware)
    return Launch(("llama-server",), ("--model",), key, tuple(flags), container, gpu_devices=gpus, gguf=True)
