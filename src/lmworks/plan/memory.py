"""Estimated memory of the rank that needs most, by component, for one layout.

Weights: in bf16 or fp16 each parameter has a compute copy (2 bytes) and an fp32 master copy (4); gradients accumulate in fp32 (4). Muon
keeps one fp32 momentum per matrix element (4), AdamW two moments (8). ZeRO-1 shards master copy and optimizer state over the data ranks,
ZeRO-2 also gradients, ZeRO-3 also the compute copy (two layers are gathered at a time). Experts are sharded over `ep` first, so only
dp_shard * cp / ep ranks shard one expert.
With low-rank adapters, which AdamW trains, the weights have no gradients and no optimizer state, but still a master copy.
Activations follow Korthikanti et al. (arXiv:2205.05198) with fused attention, which never stores scores, and with norms sharded over `tp`
too (sequence parallelism). A pipeline rank keeps the activations of several micro-batches (`plan.pipeline`).
A step needs most at one of two moments, and the larger need is returned: in the loss of the head, when all layers have saved their
activations and none works; or in the backward pass of a layer, when the logits are gone (`_at_peak`).
Compiled code, as on GPUs by default, recomputes the elementwise products of SwiGLU, and makes no fp32 copies of the logits. Eager code, as
on CPUs, saves every factor of a product. CPUs also save the probabilities of attention (`lmworks.model.documents`), and dense masks.
A rank that draws answers (`grpo`) holds a full fp32 copy of the weights and a KV cache meanwhile, instead of activations (`_rollouts`).
Under `train.deepspeed` weights, gradients and moments are fp32, and some are offloaded (`_deepspeed_state`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from lmworks.parallel.pipeline_stages import micro_batches_in_flight, rank_layers
from lmworks.plan.counts import adapter_size
from lmworks.recipe.mixers import MIXERS
from lmworks.recipe.mixers import state_bytes as mixer_state_bytes
from lmworks.recipe.parameter import Parameter
from lmworks.recipe.parameters import Kind, kind, layer_parameters, layers_by_kind, mtp_parameters, parameters
from lmworks.recipe.schema.align import ROLLOUT_ROWS
from lmworks.recipe.schema.layout import (
    CHECKPOINTING_POLICIES,
    ZERO_BUCKET,
    ZERO_LIVE,
    Cluster,
    DeepSpeed,
    Layout,
    OffloadTarget,
    world_size,
)
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.recipe import Recipe

GIB = 2**30
_PLACES = {"cpu": "CPU memory", "nvme": "disk"}
_SMALLEST_CACHE = 128  # tokens; see lmworks.inference.batching
_CPU_ATTENTION_KEPT = 2048  # longest sequence whose attention weights are saved on CPUs; see lmworks.model.attention
_CPU_QUERIES = 64  # of a block of that attention, which saves the weights of all keys that one of them sees; see lmworks.model.documents
_CPU_NORM = 1 << 19  # numbers that the backward pass of a norm has in fp32 at a time on CPUs; see lmworks.model.layers


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs most: on its device, and offloaded to CPU memory or disk by DeepSpeed."""

    components: dict[str, float]
    stage: int = 0
    elsewhere: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.components.values())


@dataclass
class _Group:
    """Counts of parameters with the same sharding: those of this rank before ZeRO, by optimizer, and those that none trains."""

    muon: float = 0.0
    adam: float = 0.0
    frozen: float = 0.0

    def add(self, count: float, muon: bool) -> None:
        self.muon += count if muon else 0
        self.adam += 0 if muon else count

    def freeze(self) -> None:
        self.frozen, self.muon, self.adam = self.count, 0.0, 0.0

    @property
    def trained(self) -> float:
        return self.muon + self.adam

    @property
    def count(self) -> float:
        return self.trained + self.frozen


@dataclass
class _Local:
    """Parameter counts of a rank before ZeRO."""

    shared: _Group = field(default_factory=_Group)
    experts: _Group = field(default_factory=_Group)

    def add(self, parameter: Parameter, layout: Layout, muon: bool) -> None:
        expert = parameter.component == "experts"
        # Norms, the router, the down-projections of MLA, the filters of Mamba-2 and the projection of MTP are replicated over tp.
        replicated = parameter.component in ("norms", "router", "mtp projection", "latent projections")
        replicated |= parameter.name.endswith(("query_down.weight", "kv_down.weight", ".conv.weight", ".conv.bias"))
        over_heads = parameter.name.endswith(("gate_norm.weight", "attention.output_norm.weight"))
        split = 1 if replicated and not over_heads else layout.tp
        group = self.experts if expert else self.shared
        group.add(parameter.size / split / (layout.ep if expert else 1), muon and parameter.is_matrix)


def state_bytes(parameters: float, kind: str = "adamw") -> float:
    """fp32 master weights and optimizer state of this many parameters: 12 bytes each under AdamW, 8 under Muon."""
    return parameters * (12 if kind == "adamw" else 8)


def kv_cache_bytes(model: Model, length: int, element: int = 2) -> float:
    """Bytes of the KV cache of one sequence, at `element` bytes per number; with MLA, of latents and rotated keys. Layers with a window
    hold no more than it; linear layers have states, which do not grow with the length."""
    assert model.num_key_value_heads and model.head_dim and model.num_hidden_layers
    attending = [layer for layer in range(model.num_hidden_layers) if model.attends(layer)]
    states = mixer_state_bytes(model, element)
    if model.mla:
        return float(len(attending) * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * length * element) + states
    kept = sum(model.cached_tokens(layer, length) for layer in attending)
    return 2.0 * model.num_key_value_heads * model.head_dim * kept * element + states


def kv_cache_shrink(model: Model) -> float:
    """The factor by which the KV cache is smaller than with multi-head attention (a key and a value for every query head)."""
    assert model.num_attention_heads and model.num_key_value_heads and model.head_dim
    if model.mla:
        return model.num_attention_heads * (model.head_dim + model.mla.v_head_dim) / (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    return model.num_attention_heads / model.num_key_value_heads


def layer_activations(
    model: Model, layer: int, layout: Layout, element: int, cpu_length: int = 0, gathered: bool = False, eager: bool = False
) -> dict[str, float]:
    """Bytes per token that one layer saves for the backward pass on one rank, by name of the activation checkpointing policy.

    `cpu_length` is the sequence length if CPU attention saves its weights, otherwise 0. `gathered`: attention saves the keys and values
    of all ranks of `cp`, as on GPUs. `eager`: the layer is not compiled.
    """
    D, H, K, d = model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.head_dim
    assert D and H and K and d and model.intermediate_size
    tp = layout.tp
    mla, (mixer, feeds) = model.mla if model.attends(layer) else None, kind(model, layer)
    mixes = mixer != "none"
    blocks = mixes + (feeds != "none")
    heads = projected = 0.0  # numbers that the mixer saves on a rank: all, and outputs of matrix products
    if mla is not None:
        latents = 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.qk_rope_head_dim  # before their norm and after it
        projected = H * (d + mla.qk_nope_head_dim + mla.v_head_dim) / tp
        heads = latents + projected + H * (2 * d + mla.v_head_dim) / tp  # replicated latents; concatenated q and k, out
        projected += (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
    elif model.attends(layer):
        heads = (2 * H + K) * d + (H + K) * d * (2 if model.use_qk_norm else 1)  # rotated q and k, v, out; q and k before norm and rotation
        projected = (H + 2 * K) * d
        if model.attn_output_gate:  # the sigmoid and the product; the gate itself is a product
            heads, projected = heads + 2 * H * d, projected + H * d
        heads, projected = heads / tp, projected / tp
    if mixer in MIXERS:
        saved = MIXERS[mixer].saved(model, tp, eager)
        heads, projected = heads + saved[0], projected + saved[1]
    normed = blocks * (3 if model.norm_position == "both" else 2)  # inputs and their norms, and outputs that are normed
    everything = element * (normed * D / tp + heads) + 4 * H / tp * mixes  # the last term is the softmax normalizer
    if model.attention_sinks and model.attends(layer):  # a share of each query; scores are not saved
        everything += 8 * H / tp
    elif cpu_length and model.attends(layer):
        everything += element * H * _kept_weights(cpu_length, model.sliding_window if model.slides(layer) else None) / tp
    if eager and tp > 1:  # what attention and the feed-forward block read is gathered from all ranks; latent attention gathers latents
        everything += element * D * (1 if mla else blocks) * (tp - 1) / tp
    if gathered and model.attends(layer):
        everything += element * (layout.cp - 1) * (H * (d + mla.v_head_dim) if mla else 2 * K * d) / tp
    if model.attention_bias:  # a product with a bias is another operator, which selective checkpointing recomputes
        projected = 0
    products = element * (D / tp + (projected + (0 if model.attention_output_bias else D / tp)) * mixes)
    gated = model.hidden_act != "relu2"
    if feeds == "mlp":  # gate, up, their product; silu(gate); or relu(up) and its square
        everything += element * ((4 if eager else 3) if gated else 2) * model.intermediate_size / tp
        products += element * ((1 + gated) * model.intermediate_size + D) / tp
    elif feeds == "moe":
        moe = model.moe
        assert moe is not None
        shared = moe.n_shared_experts * moe.moe_intermediate_size
        factors = (5, 4) if eager else (3, 3)  # the hidden rows before and after their weights are two
        factors = factors if gated else (3, 2)
        if eager and moe.swiglu_alpha is not None:  # gate and up also after their clamps, sigmoid, and up + 1
            factors = (8, 4)
        width, latent = moe.moe_latent_size or D, 2 * (moe.moe_latent_size or 0)  # what latent experts read and write
        rows = moe.num_experts_per_tok * (width + factors[0] * moe.moe_intermediate_size + 2 * moe.add_bias * moe.n_routed_experts)
        everything += element * (rows + factors[1] * shared) / tp + 8 * moe.n_routed_experts + element * latent
        if moe.shared_expert_gate:  # what it multiplies, and the sigmoid of each token
            everything += element * (D + 1)
        everything += 4 * D / tp if eager and element < 4 else 0  # the router reads fp32
        products += (
            element
            * (moe.num_experts_per_tok * ((1 + gated) * moe.moe_intermediate_size + width) + (1 + gated) * shared + (D if shared else 0))
            / tp
            + element * (latent and width + D)
            + 4 * moe.n_routed_experts
        )
    kept = {"everything": everything, "products": min(products, everything), "input": element * D / tp}
    return {policy.name: kept[policy.keeps] for policy in CHECKPOINTING_POLICIES.values()}


@lru_cache(maxsize=16)
def _layer_groups(model: Model) -> dict[Kind, list[Parameter]]:
    """The parameters of a layer of each kind; all layers of a kind are equal."""
    return {key: list(layer_parameters(model, first)) for key, (first, _) in layers_by_kind(model).items()}


@lru_cache(maxsize=16)
def _ends(model: Model) -> dict[str, Parameter]:
    return {p.name: p for p in parameters(model.model_copy(update={"num_hidden_layers": 0, "mtp": None}))}


@lru_cache(maxsize=16)
def _mtp_layers(model: Model) -> list[list[Parameter]]:
    return [list(mtp_parameters(model, depth)) for depth in range(model.mtp.num_nextn_predict_layers if model.mtp else 0)]


@lru_cache(maxsize=16)
def _adapters(model: Model, lora: Lora) -> list[tuple[int, int]]:
    """Parameters of the adapters of each layer: those of matrices that all tokens use, and those of routed experts."""
    assert model.num_hidden_layers
    found = []
    for layer in range(model.num_hidden_layers):
        sizes = {True: 0, False: 0}
        for parameter in layer_parameters(model, layer):
            sizes[parameter.component == "experts"] += adapter_size(parameter, lora)
        found.append((sizes[False], sizes[True]))
    return found


def _kept_weights(length: int, window: int | None) -> float:
    """The attention weights that CPUs save for a query and a head, as a mean over a row of `length` tokens."""
    blocks = ((start, min(start + _CPU_QUERIES, length)) for start in range(0, length, _CPU_QUERIES))
    return sum((end - start) * (end - max(start + 1 - (window or length), 0)) for start, end in blocks) / length


def _local(model: Model, layout: Layout, stage: int, muon: bool, lora: Lora | None = None) -> tuple[_Local, _Local]:
    """The parameters on a rank of `stage`, and those of its largest layer."""
    layers = rank_layers(model, layout, stage)
    local, largest = _Local(), _Local()
    for group, number in Counter(kind(model, layer) for layer in layers).items():
        one = _Local()
        for parameter in _layer_groups(model)[group]:
            one.add(parameter, layout, muon)
        for name in ("shared", "experts"):
            into, of = getattr(local, name), getattr(one, name)
            into.muon += number * of.muon
            into.adam += number * of.adam
        if one.shared.count + one.experts.count > largest.shared.count + largest.experts.count:
            largest = one
    ends = _ends(model)
    last = stage == layout.pp - 1
    if stage == 0:
        local.add(ends["embedding.weight"], layout, False)
    if last:
        local.add(ends["norm.weight"], layout, False)
        if not model.tie_word_embeddings:
            local.add(ends["head.weight"], layout, False)
        if layout.pp > 1 and (model.tie_word_embeddings or model.mtp):
            local.add(ends["embedding.weight"], layout, False)
        for layer in _mtp_layers(model):
            one = _Local()
            for parameter in layer:
                one.add(parameter, layout, muon)
                local.add(parameter, layout, muon)
            largest = max(largest, one, key=lambda held: held.shared.count + held.experts.count)
    if lora is not None:
        local.shared.freeze()
        local.experts.freeze()
        for shared, experts in (_adapters(model, lora)[layer] for layer in layers):  # over tp one of their two factors is replicated
            local.shared.adam += shared
            local.experts.adam += experts / layout.ep
    return local, largest


def rank_parameters(model: Model, layout: Layout) -> tuple[float, float]:
    """Parameters of the fullest rank before any sharding over data ranks: those that all tokens use, and those of its experts."""
    stages = [_local(model, layout, stage, muon=False)[0] for stage in {0, layout.pp - 1, layout.pp // 2}]
    fullest = max(stages, key=lambda local: local.shared.count + local.experts.count)
    return fullest.shared.count, fullest.experts.count


def _fsdp_state(local: _Local, largest: _Local, layout: Layout, element: int, kept: int) -> dict[str, float]:
    """Bytes that persist between micro-batches with FSDP2 and our optimizers. `element`: bytes per number of the compute copy; `kept`:
    further bytes per weight (its moving average; anchor and Fisher information of EWC)."""
    weights = master = gradients = states = 0.0
    ranks = layout.dp_shard * layout.cp
    gathers = world_size(layout) > layout.pp  # into new memory, also what has the type of the computation already
    for group, degree in ((local.shared, ranks), (local.experts, ranks // layout.ep)):
        share1, share2, share3 = (degree if layout.zero >= level else 1 for level in (1, 2, 3))
        weights += group.count * element / share3
        master += group.count * 4 / share1 if element < 4 or (gathers and layout.zero < 3) else 0
        gradients += group.trained * 4 / share2
        states += (group.muon * 4 + group.adam * 8 + group.trained * kept) / share1
    if layout.zero == 3 and ranks > 1:
        weights += 2 * (largest.shared.count + largest.experts.count) * element + 4 * (largest.shared.count + largest.experts.count)
    return {"weights": weights, "fp32 master": master, "gradients": gradients, "optimizer state": states}


def _deepspeed_state(
    engine: DeepSpeed, local: _Local, largest: _Local, layout: Layout, on_cpu: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """fp32 bytes that persist between micro-batches under DeepSpeed 0.19, on the device and offloaded.

    ZeRO-1 and 2 keep full weights on the device, and a copy of this rank's shard with the optimizer; ZeRO-3 makes such a copy only if the
    optimizer is offloaded. Gradients accumulate unsharded (ZeRO-1) or sharded, with the optimizer but never on disk. For the step, ZeRO-3
    and any offloaded optimizer get a copy of them.
    """
    count = local.shared.count + local.experts.count
    everything, share = 4 * count, 4 * count / layout.dp_shard
    found = {"weights": 0.0, "fp32 master": 0.0, "gradients": 0.0, "optimizer state": 0.0, "in transit": 4.0 * ZERO_BUCKET}
    elsewhere: dict[str, float] = {}

    def keep(name: str, size: float, place: OffloadTarget) -> None:
        if place == "none" or (place == "cpu" and on_cpu):
            found[name] += size
        else:
            elsewhere[_PLACES[place]] = elsewhere.get(_PLACES[place], 0.0) + size

    if layout.zero == 3:
        keep("weights", share, engine.offload_weights)
        keep("weights", min(everything, max(4.0 * ZERO_LIVE, 8 * (largest.shared.count + largest.experts.count))), "none")
    else:
        keep("weights", everything, "none")
    if layout.zero < 3 or engine.offload != "none":
        keep("fp32 master", share, engine.offload)
    if layout.zero == 1:
        keep("gradients", everything, "none")
    else:
        keep("gradients", share, "none" if engine.offload == "none" else "cpu")
    if layout.zero == 3 or engine.offload != "none":
        keep("gradients", share, engine.offload)
    keep("optimizer state", 2 * share, engine.offload)
    return found, elsewhere


def activation_bytes(recipe: Recipe, cluster: Cluster) -> int:
    """Bytes of a number of the activations in training."""
    precision = recipe.train.precision
    return 4 if precision == "fp32" or (precision == "auto" and not cluster.bf16) else 2


def gathered_weights(model: Model, element: int, lora: Lora | None = None) -> float:
    """Bytes of the weights that a rank of `grpo` draws answers with (`lmworks.train.rollouts.whole_model`), of the size of the
    activations, where those of training have `element` bytes."""
    whole, _ = _local(model, Layout(), 0, False, lora)
    return _drawing(element) * (whole.shared.count + whole.experts.count)


def _drawing(element: int) -> int:
    """fp32 draws in fp64 (`ParallelModel.exact_logprobs`)."""
    return 8 if element == 4 else element


def _rollouts(recipe: Recipe, layout: Layout, length: int, element: int, lora: Lora | None) -> dict[str, float]:
    """Bytes that a rank needs to draw its share of the answers of a step, besides its training state."""
    model, options = recipe.model, recipe.grpo
    assert options is not None and model.vocab_size
    weights, element = gathered_weights(model, element, lora), _drawing(element)
    prompts = -(-options.prompts_per_step // world_size(layout))
    rows = min(ROLLOUT_ROWS, prompts * options.group_size)
    capacity = max(_SMALLEST_CACHE, 1 << (length - 1).bit_length())  # caches grow by powers of two
    _, largest = _local(model, Layout(), 0, False)
    gathering = (4 + element) * (largest.shared.count + largest.experts.count)  # at most a layer before it is cast, and before it is joined
    return {
        "gathered weights": weights, "KV cache": rows * kv_cache_bytes(model, capacity, element),
        "activations": gathering, "head and loss": rows * model.vocab_size * (2.0 * max(4, element) + element),
    }  # fmt: skip


def memory(
    recipe: Recipe, cluster: Cluster, layout: Layout, length: int, micro_batch_size: int, micro_batches: int, lora: Lora | None = None,
    rollouts: bool = False, stage: int | None = None,
) -> Memory:  # fmt: skip
    """Memory of the rank that needs most, at sequence length `length`, with `micro_batches` of `micro_batch_size` sequences per step.

    With `lora` the weights are frozen, and its adapters are trained. With `rollouts` the rank also draws answers as `recipe.grpo` says: the
    larger need of the two is returned. `stage`: of the ranks of this pipeline stage only.
    """
    return max(moments(recipe, cluster, layout, length, micro_batch_size, micro_batches, lora, rollouts, stage), key=_total)


def moments(
    recipe: Recipe, cluster: Cluster, layout: Layout, length: int, micro_batch_size: int, micro_batches: int, lora: Lora | None = None,
    rollouts: bool = False, stage: int | None = None,
) -> list[Memory]:  # fmt: skip
    """What the rank of `memory` needs while it trains and, with `rollouts`, what it needs while it draws answers."""
    uneven = layout.layers_per_pipeline_stage or recipe.train.activation_checkpointing.share < 1
    stages = {stage} if stage is not None else set(range(layout.pp)) if uneven else {0, layout.pp - 1, layout.pp // 2}
    found = [_moments(recipe, cluster, layout, length, micro_batch_size, micro_batches, one, lora, rollouts) for one in stages]
    return max(found, key=lambda needs: max(map(_total, needs)))


def _total(need: Memory) -> float:
    return need.total


def _moments(
    recipe: Recipe, cluster: Cluster, layout: Layout, length: int, micro_batch_size: int, micro_batches: int, stage: int,
    lora: Lora | None, rollouts: bool,
) -> list[Memory]:  # fmt: skip
    model, optimizer = recipe.model, recipe.optimizer
    element = activation_bytes(recipe, cluster)
    local, largest = _local(model, layout, stage, optimizer.kind == "muon", lora)
    elsewhere: dict[str, float] = {}
    if recipe.train.deepspeed is None:
        further = 4 * (optimizer.ema_decay > 0 and lora is None) + 8 * any(phase.ewc for phase in recipe.train.phases)
        further += 4 * bool(rollouts and recipe.grpo and recipe.grpo.beta)  # the reference
        kept = _fsdp_state(local, largest, layout, element, further)
    else:
        kept, elsewhere = _deepspeed_state(recipe.train.deepspeed, local, largest, layout, cluster.on_cpu)
    runtime = 0.6 * GIB if cluster.on_cpu else (1.5 + (1.0 if world_size(layout) > 1 else 0.0)) * GIB + 0.04 * cluster.memory_gib * GIB
    needs = [_at_peak(recipe, cluster, layout, length, micro_batch_size, micro_batches, stage, lora)]
    if rollouts:
        needs.append(_rollouts(recipe, layout, length, element, lora))
    return [Memory({**kept, **need, "runtime": runtime}, stage, elsewhere) for need in needs]


def _at_peak(
    recipe: Recipe, cluster: Cluster, layout: Layout, length: int, micro_batch_size: int, micro_batches: int, stage: int, lora: Lora | None
) -> dict[str, float]:  # fmt: skip
    """Bytes of activations, and of the head and the loss, at the moment of a step when they need most together."""
    model, train = recipe.model, recipe.train
    assert model.num_hidden_layers and model.hidden_size and model.head_dim
    element, tokens = activation_bytes(recipe, cluster), micro_batch_size * length / layout.cp
    eager = cluster.on_cpu if train.compile == "auto" else not train.compile
    last = stage == layout.pp - 1
    mtp_layers = model.mtp.num_nextn_predict_layers if model.mtp and last else 0
    cpu_length = length if cluster.on_cpu and length <= _CPU_ATTENTION_KEPT and layout.cp == 1 else 0
    stored = working = 0.0
    numbers = [*rank_layers(model, layout, stage), *(model.num_hidden_layers + depth for depth in range(mtp_layers))]
    for layer in numbers:
        of_policy = layer_activations(model, layer, layout, element, cpu_length, not cluster.on_cpu, eager)
        kept = of_policy[train.activation_checkpointing.of(layer).name]
        stored += kept
        # Of the layer whose backward pass runs: what was not kept, and the gradients of its products. These were measured for eager code on
        # CPUs; elsewhere all is taken as no more than what a layer saves.
        measured = of_policy["none"] - kept + _gradients(model, layer, layout, element)
        working = max(working, measured if eager and cluster.on_cpu else of_policy["none"])
    # beside a layer of multi-token prediction: normed embedding and hidden state, both joined, and the normed output
    stored += mtp_layers * element * 6 * model.hidden_size / layout.tp
    saved, norm = tokens * micro_batches_in_flight(layout, stage, micro_batches) * stored, 0.0
    if cluster.on_cpu:  # cosines and sines, and the dense masks
        tables = 2 if model.sliding_rope else 1
        saved += tables * tokens * 2 * element * model.head_dim * model.rope.partial_rotary_factor
        saved += tokens * cpu_length * (1 + (model.sliding_window is not None and model.sliding_window < length))
        norm = 12.0 * min(_CPU_NORM, tokens * model.hidden_size)
    backward = {"activations": saved + max(tokens * working, norm), "head and loss": 0.0}
    if not last:
        return backward
    # the last output, its norm, and that of all ranks of tp
    ends = tokens * element * model.hidden_size * (2 / layout.tp + (layout.tp > 1))
    logits, gradient = _head(recipe, layout, tokens, element, eager, 1 + mtp_layers, lora)
    sharded = layout.zero >= 2 and layout.dp_shard * layout.cp > 1  # then the gradient of the whole matrix waits for the end of the pass
    # the backward pass of the head makes it again, of one pass at a time, and adds it to that of the step
    again = gradient / (1 + mtp_layers) if micro_batches > 1 or sharded else 0.0
    forward = {"activations": saved + ends, "head and loss": max(logits, again) + gradient}
    backward["head and loss"] = gradient if sharded else 0.0
    return max(forward, backward, key=lambda need: sum(need.values()))


def _gradients(model: Model, layer: int, layout: Layout, element: int) -> float:
    """Bytes per token of the gradients that are alive at once in the backward pass of an eager layer: those of both factors of the last
    SwiGLU, and of its input and output."""
    assert model.hidden_size and model.intermediate_size
    feeds = model.feed_forward(layer)
    width = 0 if feeds == "none" else model.intermediate_size
    if feeds == "moe":
        assert model.moe is not None
        width = (model.moe.n_shared_experts or model.moe.num_experts_per_tok) * model.moe.moe_intermediate_size
    return element * ((1 if model.hidden_act == "relu2" else 2) * width + 2 * model.hidden_size) / layout.tp


def _head(
    recipe: Recipe, layout: Layout, tokens: float, element: int, eager: bool, passes: int, lora: Lora | None
) -> tuple[float, float]:  # fmt: skip
    """Bytes of the logits of a chunk with what is made of them and of the gradient of the hidden states; and of the gradient of the head,
    which each of the passes keeps until the backward pass sums them."""
    model = recipe.model
    assert model.vocab_size and model.hidden_size
    chunk = min(recipe.train.logit_chunk_tokens, tokens)
    per_logit = 8 + element
    if eager:  # logits, fp32 copies of them, probabilities, their gradient in the type of the logits; and the gradient of the chunk before
        softcap = 8 if model.final_logit_softcapping else 0
        copied = 4 if element < 4 or softcap else 0
        made = max(4 + max(element if element < 4 else 0, softcap), 8 if layout.tp > 1 else 0)  # ranks of tp sum a second copy
        per_logit = element + copied + made + (element if tokens > chunk else 0)
    hidden = passes * tokens * element * model.hidden_size if eager else 0.0
    gradient = 0.0 if lora else passes * 4.0 * model.vocab_size * model.hidden_size
    return chunk * model.vocab_size * per_logit / layout.tp + hidden, gradient / layout.tp
