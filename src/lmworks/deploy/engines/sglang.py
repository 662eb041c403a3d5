"""SGLang. It needs a GPU, so that lmworks does not run it; the tests compare options and metrics with those recorded of its source."""

from __future__ import annotations

from lmworks.deploy.engines.common import UNTRIED, Request, dtype_of, parallel_reason, quantized
from lmworks.deploy.flags import Flag, Launch
from lmworks.deploy.parsers import reasoning_parser, tool_parser
from lmworks.errors import UserError

VERSION = "0.5.23"
AMD_VERSION = "0.5.14"  # the last one whose image for MI300 has a tag without a date
_KEY = (
    "SGLang writes its options to the log when it starts, the API key included (sgl-project/sglang#37457). `start.sh` replaces the key in "
    "these lines; another way of starting it would show the key. Who has the key also reads it from `/server_info`."
)


def launch(request: Request) -> Launch:
    """Flags of `sglang.launch_server`. Raises `UserError` for a CPU."""
    source, hardware, fit = request.source, request.hardware, request.fit
    if hardware.on_cpu:
        raise UserError("SGLang needs GPUs: give them with --gpus 1xh100, or use --engine vllm or llama.cpp on a CPU")
    dtype, why = dtype_of(source)
    flags = [
        Flag("--served-model-name", source.name, "the name by which clients ask for the model"),
        Flag("--host", request.host, "loopback unless asked: an address of this machine alone"),
        Flag("--port", str(request.port), "the port of the API"),
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
    if fit.expert and fit.data == 1:
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
    tag = f"v{AMD_VERSION}-rocm720-mi30x" if hardware.amd else f"v{VERSION}"
    container = f"# SGLang's own image. {UNTRIED}\nFROM lmsysorg/sglang:{tag}\nENTRYPOINT []\n"
    program = ("python3", "-m", "sglang.launch_server")
    return Launch(program, ("--model-path",), ("argv", "--api-key"), tuple(flags), container, gpu_devices=True, notes=(_KEY,))
