"""The devices that a deployment is for, how a model is divided over them, and how many sequences fit.

Weights and KV cache are computed from the model's config. The memory of a device is divided into the fraction that the engine may use, and
in it: weights, working memory of one batch, KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor

from lmworks.deploy.source import Source
from lmworks.errors import UserError
from lmworks.host import devices as gpus
from lmworks.host import machine
from lmworks.host.devices import GB, GPUS
from lmworks.plan.counts import count_by_component
from lmworks.plan.memory import kv_cache_bytes
from lmworks.recipe.mixers import MIXERS
from lmworks.recipe.schema.model import Model

_MOST_GPUS = 64


@dataclass(frozen=True)
class Hardware:
    """`count` equal devices of one machine. `memory` is in bytes per device; `fp8` whether they multiply FP8 in hardware."""

    device: str
    count: int
    memory: float
    fp8: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def amd(self) -> bool:
        """Whether the devices are GPUs of AMD, which need images of their own."""
        return self.device.startswith(("mi", "amd", "radeon"))

    @property
    def text(self) -> str:
        """For people: number, name and memory."""
        if self.on_cpu:
            return f"a CPU with {self.memory / GB:.3g} GB"
        return f"{self.count} x {self.device.upper()} of {self.memory / GB:.0f} GB"


def parse_gpus(text: str) -> Hardware:
    """`8xh100` or `h100`. Raises `UserError` for an unknown GPU or number."""
    count, gpu = gpus.parse_gpus(text, "--gpus")
    if count > _MOST_GPUS:
        raise UserError(f"--gpus {text!r}: the GPUs of one machine, from 1 to {_MOST_GPUS}, are meant")
    return Hardware(gpu.name, count, gpu.memory * GB, gpu.fp8)


def cpu() -> Hardware:
    """The CPU of this machine, with its memory or the limit of its container."""
    return Hardware("cpu", 1, float(machine.memory()))


def detect() -> Hardware:
    """The GPUs of this machine, or its CPU if it has none. Raises `UserError` for GPUs of several kinds."""
    import torch

    if not torch.cuda.is_available():
        return cpu()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if len({one.name for one in found}) > 1:
        kinds = ", ".join(sorted({one.name for one in found}))
        raise UserError(f"this machine has GPUs of several kinds ({kinds}); say which: --gpus 2xh100")
    fp8 = (found[0].major, found[0].minor) >= (8, 9)
    gpu = gpus.find_gpu(found[0].name)
    name = gpu.name if gpu is not None else found[0].name.removeprefix("NVIDIA ").lower()
    return Hardware(name, len(found), float(found[0].total_memory), fp8)


_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SHORTEST = 2048  # tokens: a shorter context is not worth a server, unless the model has no longer one
_TYPICAL = 4  # a sequence has on average a quarter of the context: engines allocate the cache in pages as it grows


@dataclass(frozen=True)
class Scenario:
    """What a deployment is for. `fraction`: share of GPU memory that the engine may use; `sequences`: most at once on a GPU and on a CPU;
    `batch_tokens`: tokens of one forward pass; `room`: full sequences for which one replica must have memory; `widest`: whether all GPUs
    work on each token; `speculate`: whether layers of multi-token prediction draft tokens."""

    name: str
    about: str
    fraction: float
    sequences: int
    cpu_sequences: int
    batch_tokens: int
    room: int
    widest: bool
    speculate: bool


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("throughput", "most tokens per second over all requests", 0.92, 256, 16, 8192, 16, False, False),
        Scenario("balanced", "many users who wait for their answers", 0.90, 64, 8, 4096, 4, False, True),
        Scenario("latency", "few users, the shortest time per token", 0.88, 8, 2, 2048, 1, True, True),
    )
}


def scenario_of(name: str) -> Scenario:
    """The scenario of this name. Raises `UserError` for an unknown one."""
    if name not in SCENARIOS:
        known = "; ".join(f"{one.name} ({one.about})" for one in SCENARIOS.values())
        raise UserError(f"--scenario {name!r} is not known; it is one of: {known}")
    return SCENARIOS[name]


@dataclass(frozen=True, kw_only=True)
class Use:
    """How an engine uses devices.

    `gguf`: it reads the GGUF file, and divides layers instead of matrices. `whole_cache`: it allocates the cache of all sequences at their
    full length (llama.cpp). `single`: it computes on one device. `shared_experts`: replicas share one copy of the experts (vLLM), instead
    of each having all of them.
    """

    gguf: bool = False
    whole_cache: bool = False
    single: bool = False
    shared_experts: bool = False


@dataclass(frozen=True)
class Fit:
    """A division that fits. `tensor` x `data` devices; `expert`: experts are distributed over them. `weights`, `working` and `cache` are
    bytes per device; `kv_token` is bytes of cache per token and device, and `state` per sequence, of layers whose memory does not grow;
    `sequences` may run at once per replica; `devices` is how many the engine uses."""

    tensor: int
    data: int
    expert: bool
    context: int
    sequences: int
    batch_tokens: int
    fraction: float
    speculate: int
    weights: float
    working: float
    cache: float
    kv_token: float
    state: float
    devices: int

    @property
    def sequence(self) -> float:
        """Bytes of cache of one sequence of the whole context, per device."""
        return self.state + self.kv_token * self.context


def element_bytes(source: Source) -> int:
    """Bytes of one number of the KV cache: of the type of the model."""
    return _BYTES.get(source.dtype, 2)


def fit(source: Source, hardware: Hardware, scenario: Scenario, use: Use, context: int | None) -> Fit:
    """The division of `source` over `hardware` for `scenario`. Raises `UserError` with hardware that would do if the model does not fit."""
    asked = context or source.context
    if asked > source.context:
        raise UserError(f"--context {asked} exceeds the {source.context} tokens of the model")
    choices = _choices(source, hardware, scenario, use, asked)
    if not choices:
        raise UserError(_refusal(source, hardware, scenario, use, asked))
    if scenario.widest:
        return choices[-1]
    roomy = [one for one in choices if one.context == asked and one.cache >= scenario.room * one.sequence]
    longest = max(one.context for one in choices)
    return next(iter(roomy), next(one for one in choices if one.context == longest))


def _choices(source: Source, hardware: Hardware, scenario: Scenario, use: Use, context: int) -> list[Fit]:
    sizes = [1] if use.single or use.gguf else _tensor_sizes(source.model, hardware.count)
    return [one for tensor in sizes if (one := _try(source, hardware, scenario, use, tensor, context))]


def _tensor_sizes(model: Model, count: int) -> list[int]:
    """Degrees of tensor parallelism, ascending, that divide the model's heads and widths."""
    heads, kv = model.num_attention_heads or 1, model.num_key_value_heads or 1
    sizes = []
    for size in range(1, count + 1):
        widths = [model.intermediate_size or size] + ([model.moe.moe_intermediate_size] if model.moe else [])
        fits = count % size == 0 and heads % size == 0 and (model.mla is not None or kv % size == 0 or size % kv == 0)
        mixed = not any(problem for mixer in model.mixers for problem in MIXERS[mixer].problems(model, size))
        if fits and mixed and not any(width % size for width in widths):
            sizes.append(size)
    return sizes


def _try(source: Source, hardware: Hardware, scenario: Scenario, use: Use, tensor: int, context: int) -> Fit | None:
    model, gguf = source.model, use.gguf
    devices = 1 if use.single else hardware.count
    data = 1 if gguf else devices // tensor
    expert = model.moe is not None and not gguf and (devices if use.shared_experts else tensor) > 1
    weights = _weights(source, tensor, devices if expert and use.shared_experts else tensor) if not gguf else source.gguf_bytes / devices
    most = scenario.cpu_sequences if hardware.on_cpu else scenario.sequences
    speculate = source.mtp if scenario.speculate and not gguf and not use.single else 0
    element = 2 if gguf else element_bytes(source)
    state = kv_cache_bytes(model, 0, element)
    attending = sum(map(model.attends, range(model.num_hidden_layers or 0)))
    # a layer of multi-token prediction attends; sliding windows, which need less later, are not counted
    kv_token = (kv_cache_bytes(model, 1, element) - state) * (1 + speculate / max(1, attending))
    state /= devices if gguf else tensor
    if gguf:
        kv_token /= devices
    elif model.mla is None:
        kv_token /= min(tensor, model.num_key_value_heads or 1)
    fraction = 0.8 if hardware.on_cpu else scenario.fraction
    batch = max(scenario.batch_tokens // (4 if hardware.on_cpu else 1), 512)
    working = _working(model, batch, most, tensor, on_cpu=hardware.on_cpu)
    room = hardware.memory * fraction - weights - working
    if room <= state:
        return None
    if room < state + kv_token * context:
        context = floor((room - state) / kv_token) // 1024 * 1024
        if context < min(_SHORTEST, source.context):
            return None
    typical = context if use.whole_cache else max(context / _TYPICAL, min(context, 1024))
    sequences = max(1, min(most, floor(room / (state + kv_token * typical))))
    cache = min(room, sequences * (state + context * kv_token)) if use.whole_cache or hardware.on_cpu else room
    return Fit(tensor, data, expert, context, sequences, batch, fraction, speculate, weights, working, cache, kv_token, state, devices)


def _weights(source: Source, tensor: int, of_experts: int) -> float:
    """Bytes of a device; experts are divided over `of_experts` devices, all else over `tensor`."""
    counts = count_by_component(source.model)
    experts = counts.components.get("experts", 0) / counts.total
    return source.weight_bytes * ((1 - experts) / tensor + experts / of_experts)


def _working(model: Model, batch: int, sequences: int, tensor: int, *, on_cpu: bool) -> float:
    """Working memory, estimated: hidden states and the widest intermediate of one batch, logits of the sequences in fp32, and what the
    libraries of a GPU and captured graphs take."""
    assert model.hidden_size and model.vocab_size and model.intermediate_size
    width = 8 * model.hidden_size + 3 * model.intermediate_size / tensor
    if model.moe:
        width += 3 * model.moe.num_experts_per_tok * (model.moe.moe_intermediate_size + model.hidden_size)
    return 2.0 * batch * width + 8.0 * sequences * model.vocab_size + (0.3 if on_cpu else 2.0) * GB


def _refusal(source: Source, hardware: Hardware, scenario: Scenario, use: Use, context: int) -> str:
    size = (source.gguf_bytes if use.gguf else source.weight_bytes) / GB
    text = f"{source.name} has {size:.1f} GB of weights and does not fit {hardware.text}"
    found = []
    for name, gpu in GPUS.items():
        for count in (1,) if use.single else (1, 2, 4, 8):
            if _choices(source, Hardware(name, count, gpu.memory * GB, gpu.fp8), scenario, use, context):
                found.append((count * gpu.memory, f"{count}x{name}"))
                break
    if found and not hardware.on_cpu:
        found.sort(key=lambda one: (not one[1].endswith(f"x{hardware.device}"), one))  # more of the same first
        return f"{text}; these would do: {', '.join(one for _, one in found[:4])}; or quantize it"
    need = replace(hardware, count=1, memory=0.0)
    while need.memory < 1e15:
        need = replace(need, memory=max(need.memory * 1.05, GB))
        if _choices(source, need, scenario, use, context):
            break
    where = f" or {sorted(found)[0][1]}" if found else ""
    kind = "a CPU" if hardware.on_cpu else "one device"
    return f"{text}; {kind} with {ceil(need.memory / GB)} GB would do{where}; or quantize it"
