"""llama.cpp's server, in the version that lmworks tests: the source in the package llama-cpp-python 0.3.36."""

from __future__ import annotations

from lmworks import machine
from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Flag, Launch
from lmworks.deploy.parsers import tool_parser
from lmworks.errors import UserError

_PACKAGE = "llama_cpp_python-0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_BUILD = """# llama.cpp from one pinned source package of the Python package index: the version that lmworks tests.
FROM {base} AS build
RUN apt-get update \\
    && apt-get install -y --no-install-recommends build-essential cmake ninja-build python3-pip \\
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
RUN pip3 download -q --no-deps --no-build-isolation --no-binary=:all: llama-cpp-python==0.3.36 --break-system-packages \\
    && echo "{sha256}  {package}.tar.gz" | sha256sum -c - && tar -xzf {package}.tar.gz
# For any processor with AVX2. Not "native": gcc 12 compiles the AMX kernels to code that crashes on every quantized model.
RUN cmake -G Ninja -S {package}/vendor/llama.cpp -B out -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF \\
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \\
    -DGGML_AMX_TILE=OFF {options} && cmake --build out --target llama-server
FROM {runtime}
# python3 runs the check that asks the server something
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 python3-minimal && rm -rf /var/lib/apt/lists/*
COPY --from=build /build/out/bin/llama-server /usr/local/bin/llama-server
"""


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
    cuda = not hardware.on_cpu
    container = _BUILD.format(
        base="nvidia/cuda:12.6.3-devel-ubuntu24.04" if cuda else "debian:12.11-slim",
        runtime="nvidia/cuda:12.6.3-runtime-ubuntu24.04" if cuda else "debian:12.11-slim",
        options="-DGGML_NATIVE=OFF -DGGML_CUDA=ON" if cuda else "-DGGML_NATIVE=OFF", package=_PACKAGE, sha256=_SHA256,
    )  # fmt: skip
    return Launch(("llama-server",), ("--model",), ("option", "--api-key-file"), tuple(flags), container, gpu_devices=cuda)
