"""Plans: shipped recipes on shipped clusters, layouts, memory and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from lmworks.cli import recipe_commands
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.plan.automatic import this_machine
from lmworks.plan.counts import count_by_component, flops_per_token, keys_seen
from lmworks.plan.layout import automatic, devices, legal, place, problems
from lmworks.plan.memory import GIB, activation_bytes, kv_cache_bytes, kv_cache_shrink, layer_activations, memory
from lmworks.plan.plan import make_plan
from lmworks.plan.render import render
from lmworks.recipe.load import load_cluster, load_recipe, shipped
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Model
from lmworks.recipe.timeline import Timeline
from lmworks.run.prediction import measured_mfu
from lmworks.train import calibrate
from small_config import small_config
from written_run import write_run

FITS = {
    "2-cores": {"quickstart", "dense-125m"},
    "1xh200": {"quickstart", "dense-125m", "smollm3-3b"},
    "64xh100": {"dense-125m", "smollm3-3b", "glm-15b-a3b", "glm45-air-106b-a12b"},
    "8192xh800": {"smollm3-3b", "glm-15b-a3b", "glm45-air-106b-a12b", "glm46-355b-a32b"},
}


@pytest.mark.parametrize("where", sorted(FITS))
@pytest.mark.parametrize("name", ["quickstart", "dense-125m", "smollm3-3b", "glm-15b-a3b", "glm45-air-106b-a12b", "glm46-355b-a32b"])
def test_every_recipe_on_every_cluster(name: str, where: str) -> None:
    resolved, cluster = load_recipe(name), load_cluster(where)
    if name not in FITS[where]:
        with pytest.raises(UserError) as caught:
            make_plan(resolved.recipe, resolved.fingerprint, cluster)
        message = str(caught.value)
        assert "\n" not in message
        assert "needs" in message or "no layout divides the work" in message
        assert "the nearest that fits is" in message or "it fits with" in message
        return
    plan = make_plan(resolved.recipe, resolved.fingerprint, cluster)
    timeline = Timeline(resolved.recipe.train.phases)
    assert plan.steps == timeline.steps
    assert plan.tokens == timeline.tokens_before(timeline.steps)
    assert plan.compute_seconds * devices(cluster) * cluster.tflops * 1e12 * plan.mfu == pytest.approx(plan.flops)
    for phase, source in zip(plan.phases, resolved.recipe.train.phases, strict=True):
        placed = phase.placed
        assert list(problems(resolved.recipe, cluster, placed.layout, source)) == []
        assert placed.memory.total <= cluster.memory_gib * GIB
        per_step = (
            placed.layout.dp_replicate * placed.layout.dp_shard * placed.micro_batch_size * placed.accumulation * source.sequence_length
        )
        assert per_step == source.global_batch_tokens


def test_tensor_parallelism_is_as_small_as_fits() -> None:
    """No legal layout with less pipeline, or as much of it and less tensor parallelism, would have fitted."""
    resolved, cluster = load_recipe("glm46-355b-a32b"), load_cluster("8192xh800")
    for phase in resolved.recipe.train.phases[:3]:
        chosen, _ = automatic(resolved.recipe, cluster, phase, 1)
        assert chosen is not None
        for other in legal(resolved.recipe, cluster, [phase], 1):
            smaller = (other.pp, other.cp, other.tp) < (chosen.layout.pp, chosen.layout.cp, chosen.layout.tp)
            if smaller:
                assert place(resolved.recipe, cluster, other, phase).memory.total > cluster.memory_gib * GIB


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tp": 16}, "tp 16 must fit within a node of 8 devices"),
        ({"tp": 3}, "tp 3 must fit within a node of 8 devices"),
        ({"pp": 128}, "pp 128 exceeds the 92 layers"),
        ({"ep": 7}, "ep 7 does not divide the 160 experts"),
        ({"dp_shard": 63}, "is 8,064 ranks, the cluster has 8,192 devices"),
        ({"zero": 3}, "ZeRO-3 cannot be combined with a pipeline"),
        ({"dp_replicate": 64}, "the 2,048 sequences of a step of phase general are fewer than the 4,096 data ranks"),
    ],
)
def test_illegal_layouts_are_named(change: dict[str, int], reason: str) -> None:
    recipe, cluster = load_recipe("glm46-355b-a32b").recipe, load_cluster("8192xh800")
    layout = Layout(pp=16, tp=8, dp_shard=64, ep=32).model_copy(update=change)
    assert any(reason in problem for problem in problems(recipe, cluster, layout, recipe.train.phases[0]))


def test_tensor_ranks_share_the_tokens_of_a_sequence() -> None:
    recipe, cluster = load_recipe("glm46-355b-a32b").recipe, load_cluster("8192xh800")
    phase = recipe.train.phases[0].model_copy(update={"sequence_length": 2052})
    found = list(problems(recipe, cluster, Layout(pp=16, tp=8, dp_shard=64, ep=32), phase))
    assert "tp 8 does not divide the 2,052 tokens of a sequence on a rank of cp" in found


def test_a_dense_model_has_no_expert_ranks() -> None:
    recipe, cluster = load_recipe("smollm3-3b").recipe, load_cluster("64xh100")
    found = list(problems(recipe, cluster, Layout(dp_shard=64, ep=8)))
    assert found == ["ep 8 needs a mixture of experts; this model is dense"]


def test_recipe_layout_is_kept_for_all_phases() -> None:
    resolved, cluster = load_recipe("smollm3-3b", ["layout={tp: 4, cp: 4, dp_shard: 4}"]), load_cluster("64xh100")
    plan = make_plan(resolved.recipe, "", cluster)
    assert {(p.placed.layout.tp, p.placed.layout.cp, p.placed.layout.dp_shard) for p in plan.phases} == {(4, 4, 4)}
    wrong = load_recipe("smollm3-3b", ["layout={tp: 4, dp_shard: 4}"])
    with pytest.raises(UserError, match=r"is 16 ranks, the cluster has 64 devices; the nearest legal layout is TP4 x DP16"):
        make_plan(wrong.recipe, "", cluster)


def test_memory_components_by_hand() -> None:
    """One device: 2 bytes of bf16 copy, 4 of master, 4 of gradient, and 4 or 8 of optimizer state per parameter."""
    resolved, cluster = load_recipe("dense-125m"), load_cluster("1xh200")
    recipe = resolved.recipe
    total, embedding = 113_266_944, 49_152 * 768
    assert make_plan(recipe, "", cluster).counts.total == total
    parts = memory(recipe, cluster, Layout(), 2048, 1, 1).components
    norms = 12 * (2 * 768 + 2 * 64) + 768
    assert parts["weights"] == 2 * total
    assert parts["fp32 master"] == parts["gradients"] == 4 * total
    assert parts["optimizer state"] == 4 * (total - embedding - norms) + 8 * (embedding + norms)
    adamw = load_recipe("dense-125m", ["optimizer.kind=adamw"]).recipe
    assert memory(adamw, cluster, Layout(), 2048, 1, 1).components["optimizer state"] == 8 * total
    fp32 = load_recipe("dense-125m", ["train.precision=fp32"]).recipe
    parts = memory(fp32, cluster, Layout(), 2048, 1, 1).components
    assert (parts["weights"], parts["fp32 master"]) == (4 * total, 0)


DEEPSPEED = ("optimizer.kind=adamw", "train.compile=false", "train.deepspeed={offload: cpu}")


def test_memory_under_deepspeed_by_hand() -> None:
    """All in fp32; tests/parallel/test_zero_offload.py counts the tensors that there are."""
    cluster, total = load_cluster("64xh100"), 113_266_944
    share, whole = 4 * total / 64, 4 * total

    def held(zero: int, *changes: str) -> tuple[dict[str, float], dict[str, float]]:
        recipe = load_recipe("dense-125m", [*DEEPSPEED, f"layout.zero={zero}", *changes]).recipe
        found = memory(recipe, cluster, Layout(dp_shard=64, zero=zero), 2048, 1, 1)  # type: ignore[arg-type]
        return found.components, found.elsewhere

    parts, elsewhere = held(1)
    assert (parts["weights"], parts["gradients"], parts["optimizer state"]) == (whole, whole, 0)
    assert elsewhere == {"CPU memory": 4 * share}  # weights, gradients and two moments
    parts, elsewhere = held(2, "train.deepspeed.offload=none")
    assert (parts["weights"], parts["fp32 master"], parts["gradients"], parts["optimizer state"]) == (whole, share, share, 2 * share)
    assert elsewhere == {}
    disk = ("train.deepspeed={offload: nvme, offload_weights: cpu, path: /fast}",)
    parts, elsewhere = held(3, *disk)
    assert (parts["weights"], parts["gradients"], parts["optimizer state"]) == (whole, 0, 0)  # all fit into what may be whole at a time
    assert elsewhere == {"CPU memory": 2 * share, "disk": 4 * share}


def test_deepspeed_gets_data_ranks_only() -> None:
    """Where the model of the automatic layout would be split, state leaves the device instead; other axes are named."""
    cluster = load_cluster("64xh100")
    small = cluster.model_copy(update={"memory_gib": 24.0})
    phases = "train.phases=[{name: all, tokens: 1B, mixture: {fineweb-edu: 1.0}, sequence_length: 4Ki, global_batch_tokens: 1Mi}]"
    base = [phases, *DEEPSPEED[:2], "train.micro_batch_sequences=1", "train.activation_checkpointing=full"]
    without = make_plan(load_recipe("smollm3-3b", base).recipe, "", small).phases[0].placed.layout
    assert without.tp > 1 or without.pp > 1
    recipe = load_recipe("smollm3-3b", [*base, DEEPSPEED[2], "layout.zero=2"]).recipe
    placed = make_plan(recipe, "", small).phases[0].placed
    assert (placed.layout.dp_shard, placed.layout.zero) == (64, 2)
    assert placed.memory.total < 24 * GIB and placed.memory.elsewhere["CPU memory"] > 0
    with pytest.raises(UserError, match=r"train.deepspeed does not combine with tp: .*; the nearest legal layout is DP64, ZeRO-2"):
        make_plan(recipe, "", small, Layout(dp_shard=32, tp=2, zero=2))
    said = io.StringIO()
    Console(file=said, width=120).print(render(make_plan(recipe, "", small)))
    assert "offloaded: CPU memory" in said.getvalue()


def test_zero_shards_one_thing_after_the_other() -> None:
    recipe, cluster = load_recipe("smollm3-3b").recipe, load_cluster("64xh100")
    levels = [memory(recipe, cluster, Layout(dp_shard=64, zero=level), 4096, 1, 1).components for level in (0, 1, 2, 3)]  # type: ignore[arg-type]
    names = ("optimizer state", "gradients", "weights")
    for level, name in enumerate(names, start=1):
        assert levels[level - 1][name] > levels[level][name]
        assert all(levels[level][other] == levels[level - 1][other] for other in names[level:])
    assert levels[0]["optimizer state"] == 64 * levels[1]["optimizer state"]


def test_ranks_hold_the_model_between_them() -> None:
    """Gradients of all stages and tensor ranks add up to four bytes per parameter, what is not split counted on each."""
    recipe, cluster = load_recipe("glm-15b-a3b").recipe, load_cluster("64xh100")
    one = memory(recipe, cluster, Layout(), 4096, 1, 1).components["gradients"]
    split = memory(recipe, cluster, Layout(dp_shard=64, ep=64), 4096, 1, 1).components["gradients"]
    experts = 4 * 27 * 64 * 3 * 2048 * 1280
    assert one - split == pytest.approx(experts * 63 / 64)


def test_checkpointing_and_length_move_activations() -> None:
    cluster = load_cluster("1xh200")

    def activations(mode: str, length: int) -> float:
        recipe = load_recipe("dense-125m", [f"train.activation_checkpointing={mode}"]).recipe
        return memory(recipe, cluster, Layout(), length, 1, 1).components["activations"]

    assert activations("none", 2048) > activations("selective", 2048) > activations("full", 2048)
    assert activations("none", 4096) == 2 * activations("none", 2048)
    one = (activations("none", 2048) - activations("full", 2048)) / 12  # of the 12 layers
    assert activations("25%", 2048) == pytest.approx(activations("none", 2048) - 3 * one)
    assert activations("selective 50%", 2048) == pytest.approx((activations("none", 2048) + activations("selective", 2048)) / 2)


@settings(max_examples=30)
@given(length=st.integers(1, 64), window=st.integers(1, 80), every=st.sampled_from([0, 2]))
def test_attention_pairs_are_counted(length: int, window: int, every: int) -> None:
    """The closed form equals counting the keys of each query, layer by layer."""
    model = Model.model_validate(
        {
            "vocab_size": 8,
            "hidden_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "intermediate_size": 8,
            "sliding_window": f"{window} tokens",
            "layer_types": ["sliding_attention", "full_attention"] if every else [],
        }
    )
    for layer in range(3):
        far = length if every and (layer + 1) % every == 0 else window
        assert keys_seen(model, layer, length) == pytest.approx(sum(min(query + 1, far) for query in range(length)) / length)


@pytest.mark.parametrize(("length", "window"), [(40, None), (200, None), (40, 9), (200, 70), (256, 9), (256, 64), (256, 65), (130, 300)])
def test_the_attention_weights_that_cpus_save_are_counted(length: int, window: int | None) -> None:
    """The difference that they make to a plan, and what a layer saves."""
    import torch

    from lmworks.model.attention import attend_fast
    from lmworks.model.documents import visible

    model = Model.model_validate(small_config() | {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "sliding_window": f"{window or 9} tokens",
        "layer_types": ["sliding_attention", "full_attention"][:: 1 if window else -1],
    })  # fmt: skip
    kept, without = (layer_activations(model, 0, Layout(), 4, cpu)["none"] for cpu in (length, 0))
    query, key, value = (torch.zeros(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        attend_fast(query, key, value, visible(torch.arange(length)[None], length, window), 0.0)
    weights = sum(tensor.numel() for tensor in saved if tensor.shape[-1] != 8)
    assert (kept - without) * length == pytest.approx(4 * weights)


def test_flops_of_a_forward_are_a_third() -> None:
    """PyTorch's own counter sees 2N and the attention products in a forward pass of the built model."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from lmworks.model.transformer import Transformer

    model = Model.model_validate(
        small_config()
    )
    network, length = Transformer(model), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()
        network.plain(True)
        network(torch.zeros(1, length, dtype=torch.long))
    cost = flops_per_token(model, length)
    # the plain twin multiplies all L keys where the causal count has (L + 1) / 2; norms are no products
    products = cost.parameters - 6 * (2 * 2 * 32 + 32)
    expected = length * (products + cost.attention * length / ((length + 1) / 2)) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)


def test_measured_mfu_replaces_the_assumption() -> None:
    resolved, cluster = load_recipe("quickstart"), load_cluster("2-cores")
    assumed = make_plan(resolved.recipe, "", cluster)
    measured = make_plan(resolved.recipe, "", cluster, measured_mfu=0.5 * assumed.mfu, measured_source="a run of 30 s")
    assert measured.seconds == pytest.approx(2 * assumed.seconds)
    assert measured.mfu_source == "a run of 30 s"


def test_an_idle_pipeline_is_warned_of() -> None:
    resolved = load_recipe("smollm3-3b")
    lines = list(make_plan(resolved.recipe, "", load_cluster("8192xh800")).warnings())
    assert any("the pipeline is idle for 78% of each step, so 40% MFU cannot be reached" in line for line in lines)


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.VARIABLE)
    cluster = this_machine(threads=1)
    assert cluster.tflops > 0 and cluster.memory_gib > 0.5
    assert cluster.name == "this machine"


def invoke(*arguments: str) -> str:
    app = typer.Typer()
    recipe_commands.register(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_plan_command() -> None:
    text = invoke("plan", "glm46-355b-a32b", "--cluster", "8192xh800")
    for said in ("352.8B", "33.63B (32.86B without the embedding look-up)", "23.9 days (18.5 days for 6N alone)", "12 times smaller than",
                 "3,988,069,632", "356.8B"):
        assert said in text
    narrow = io.StringIO()
    Console(file=narrow, width=80).print(render(make_plan(load_recipe("glm46-355b-a32b").recipe, "", load_cluster("8192xh800"))))
    assert max(map(len, narrow.getvalue().splitlines())) <= 80
    assert "..." not in narrow.getvalue() and "…" not in narrow.getvalue(), "a terminal of 80 columns cuts nothing"
    value = json.loads(invoke("plan", "quickstart", "--cluster", "2-cores", "--json", "--mfu", "0.1"))
    assert (value["mfu"], value["mfu_source"]) == (0.1, "as given by --mfu")


TINY = (
    "train.compile=false", "model.num_hidden_layers=2", "model.hidden_size=64", "model.head_dim=16", "model.moe.moe_intermediate_size=32",
        "model.intermediate_size=64",
    "train.phases.general.sequence_length=64 tokens", "train.phases.general.global_batch_tokens=512 tokens",
    "train.micro_batch_sequences=4",
)  # fmt: skip


def counted(model: Model, length: int) -> float:
    """Training operations per token as torch counts them in a forward of the built model; a backward has twice as many."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from lmworks.model.transformer import Transformer

    network = Transformer(model).eval().plain(True)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.arange(length)[None] % 61)
    found = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    attention = found.pop("aten.bmm") * (length + 1) / (2 * length)  # the plain twin multiplies all keys, also those that are masked
    return 3 * (sum(found.values()) + attention) / length


def test_flops_of_a_plan_are_what_torch_counts() -> None:
    """Norms, which are no products, are 0.2% of this small model; a layer or a projection that is left out would be 5%. Layers that see
    everything: torch counts whole scores."""
    recipe = load_recipe("quickstart", [*TINY, "model.preset=glm-nano"]).recipe
    expected = sum(int(phase.tokens or 0) * counted(recipe.model, int(phase.sequence_length)) for phase in recipe.train.phases)
    assert make_plan(recipe, "", load_cluster("2-cores")).flops == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("change", [(), ("train.micro_batch_sequences=8",), ("model.moe.balance.aux_loss_weight=0",)])
def test_the_forward_pass_that_counts_loads_is_planned(change: tuple[str, ...]) -> None:
    """The auxiliary loss of a step of two micro-batches needs one; a step of one micro-batch, and another loss, do not."""
    planned, plain = (
        make_plan(load_recipe("quickstart", [*TINY, *more]).recipe, "", load_cluster("2-cores")).phases[0]
        for more in (change, ("model.moe.balance.method=none",))
    )  # fmt: skip
    passes = 3 if change else 4
    assert planned.placed.accumulation == (1 if "train.micro_batch_sequences=8" in change else 2)
    assert planned.flops_parameters == pytest.approx(plain.flops_parameters * passes / 3)
    assert planned.flops_attention == pytest.approx(plain.flops_attention * passes / 3)
    assert planned.compute_seconds == pytest.approx(plain.compute_seconds * passes / 3)


def test_the_speed_of_a_run_has_the_pass_that_counts_loads(tmp_path: Path) -> None:
    """Its plan counts it too, and would have it twice."""
    found = []
    for method in ("aux", "none"):
        moe = f"{{n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32, balance: {{method: {method}}}}}"
        run_dir = write_run(
            tmp_path / method, {"perf/tokens_per_second": [1000.0] * 3, "train/sequence_length": [64.0] * 3},
            [{"event": "resume", "step": 0, "ranks": 1, "cores": 1}],
            overrides=[f"model.moe={moe}", "train.micro_batch_sequences=8"],
        )  # fmt: skip
        found.append(measured_mfu(run_dir, load_cluster("2-cores")).mfu)
    assert found[0] == pytest.approx(found[1] * 4 / 3)


def test_plan_calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MFU is what torch counts in a step of the real model, over what the step took."""
    monkeypatch.setattr("lmworks.train.calibrate._SECONDS", 0.5)
    monkeypatch.setattr("lmworks.train.calibrate.system.measure_peak", lambda: 2e12)
    timed: list[float] = []
    honest = calibrate._Model.step_seconds

    def observed(self: Any, *arguments: Any) -> list[float]:
        timed.extend(honest(self, *arguments))
        return timed

    monkeypatch.setattr(calibrate._Model, "step_seconds", observed)
    overrides = [part for text in TINY for part in ("--set", text)]
    value = json.loads(invoke("plan", "quickstart", "--cluster", "2-cores", "--json", "--calibrate", *overrides))
    operations = counted(load_recipe("quickstart", TINY).recipe.model, 64) * 512
    operations *= 4 / 3  # a forward pass counts the loads of two micro-batches
    assert value["mfu"] == pytest.approx(operations / median(timed) / 2e12, rel=0.01)
    how = f"measured here: median of {len(timed)} steps of 512 tokens, {median(timed):.2f} s each, peak 2.00 TFLOP/s"
    assert value["mfu_source"] == how
    assert not any(phase["layout_in_mfu"] for phase in value["phases"]), "one process neither talks to another nor waits for it"


def test_shipped_recipes_are_all_planned_here() -> None:
    assert set(shipped()) - {"assistant"} == {name for names in FITS.values() for name in names}, "assistant only tunes"


def deepseek_v3(**change: Any) -> Model:
    """As published (config of deepseek-ai/DeepSeek-V3): 671.0B, of which a token uses 37.6B, and a layer of multi-token prediction."""
    return Model.model_validate({
        "vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "head_dim": 192, "intermediate_size": 18_432,
        "rms_norm_eps": 1e-6, "max_position_embeddings": "4096 tokens",
        "mla": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        "moe": {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        "mtp": {}, **change,
    })  # fmt: skip


def test_latent_attention_in_the_plan() -> None:
    """DeepSeek-V3's published figures: 671B and 37B, 685B with its layer and the copies beside it, and a cache of 576 numbers a layer."""
    model = deepseek_v3()
    counts = count_by_component(model)
    assert (round(counts.total / 1e9, 1), round(counts.active / 1e9, 1)) == (671.0, 37.6)
    assert round((counts.trained + 2 * counts.embedding) / 1e9, 1) == 684.5
    assert kv_cache_bytes(model, 1000) == 61 * 576 * 1000 * 2
    assert kv_cache_shrink(model) == pytest.approx(128 * (192 + 128) / 576)
    whole = flops_per_token(model, 4095)
    assert whole.attention == 61 * 3 * 2 * 128 * (192 + 128) * 2048
    assert whole.mtp == 6 * (counts.mtp_active + 129_280 * 7168) + whole.attention / 61


def test_frozen_weights_pass_gradients_on_and_have_none() -> None:
    """Forward and the gradient of the input: 4 operations per parameter and token; attention, which has no weights, costs the same."""
    model = deepseek_v3()
    trained, frozen = flops_per_token(model, 4096), flops_per_token(model, 4096, frozen=True)
    assert frozen.attention == trained.attention
    assert frozen.total - frozen.attention == pytest.approx((trained.total - trained.attention) * 4 / 6, rel=0.01)


def test_a_window_bounds_the_cache_of_its_layers() -> None:
    model = Model.model_validate(small_config(num_hidden_layers=4) | {
        "sliding_window": "8 tokens", "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    })  # fmt: skip
    per_token = 2 * model.num_key_value_heads * model.head_dim * 2
    assert kv_cache_bytes(model, 100) == per_token * (100 + 3 * 8)
    assert kv_cache_bytes(model, 5) == per_token * 4 * 5


def test_activations_of_latent_attention_by_hand() -> None:
    """One token of one dense layer in bf16: latents are whole on every tensor rank, the heads are shared."""
    model, kinds = deepseek_v3(), {}
    for tp in (1, 4):
        kinds[tp] = layer_activations(model, 0, Layout(tp=tp), 2)
    latents, heads = 2 * (1536 + 512) + 64, 128 * (192 + 256 + 2 * 192 + 128)
    ffn = 3 * 18_432
    assert kinds[1]["none"] == 2 * (4 * 7168 + latents + heads + ffn) + 4 * 128
    assert kinds[4]["none"] == 2 * (4 * 7168 + 4 * latents + heads + ffn) / 4 + 4 * 128 / 4
    assert kinds[1]["full"] < kinds[1]["selective"] < kinds[1]["none"]
    gathered = layer_activations(model, 0, Layout(cp=4), 2, gathered=True)
    assert gathered["none"] - kinds[1]["none"] == 2 * 3 * 128 * (192 + 128)  # keys and values of the three other context ranks
    assert gathered["full"] == kinds[1]["full"]


def test_a_plan_counts_what_context_ranks_gather_on_gpus_only() -> None:
    """Without recomputation, for every layer: in the loss of the head none is computed. CPUs gather again in the backward pass."""
    recipe, gpu = load_recipe("dense-125m", ["train.activation_checkpointing=none", "train.precision=bf16"]).recipe, load_cluster("8xh100")
    gathered = []
    for cluster in (gpu, gpu.model_copy(update={"device": "CPU"})):
        four, one = (memory(recipe, cluster, Layout(cp=cp), 4096 * cp, 1, 1).components["activations"] for cp in (4, 1))
        gathered.append(four - one)
    model = recipe.model
    assert model.num_key_value_heads and model.head_dim and model.num_hidden_layers
    per_token = activation_bytes(recipe, gpu) * 3 * 2 * model.num_key_value_heads * model.head_dim
    assert gathered == pytest.approx([4096 * model.num_hidden_layers * per_token, 0])


def test_logits_and_a_working_layer_are_never_there_together() -> None:
    """With logits of many tokens the loss of the head needs most, with few the backward pass of a layer."""
    cluster = load_cluster("1xh200")

    def needs(chunk: int) -> dict[str, float]:
        recipe = load_recipe("dense-125m", ["train.activation_checkpointing=full", f"train.logit_chunk_tokens={chunk}"]).recipe
        return memory(recipe, cluster, Layout(), 2048, 32, 1).components

    many, few = needs(16384), needs(64)
    assert many["head and loss"] > few["head and loss"] == 0
    assert few["activations"] > many["activations"] > 0


def test_a_pipeline_rank_keeps_as_many_micro_batches_as_are_in_flight() -> None:
    """1F1B: the first of four stages keeps four micro-batches, the last one; more micro-batches change nothing."""
    recipe, cluster = load_recipe("glm46-355b-a32b").recipe, load_cluster("8192xh800")
    layout = Layout(pp=4, tp=8, dp_shard=256, ep=32, layers_per_pipeline_stage=(23, 23, 23, 23))

    def kept(stage: int, micro_batches: int) -> float:
        return memory(recipe, cluster, layout, 2048, 1, micro_batches, stage=stage).components["activations"]

    more = kept(0, 2) - kept(0, 1)
    assert more > 0
    assert [kept(0, count) - kept(0, 1) for count in (2, 3, 4, 8)] == pytest.approx([more, 2 * more, 3 * more, 3 * more])
    assert kept(3, 1) == kept(3, 8)


def test_multi_token_prediction_costs_the_last_stage_memory() -> None:
    recipe, cluster = load_recipe("glm46-355b-a32b").recipe, load_cluster("8192xh800")
    without = recipe.model_copy(update={"model": recipe.model.model_copy(update={"mtp": None})})
    layout = Layout(pp=16, tp=8, dp_shard=64, ep=32, layers_per_pipeline_stage=(6,) * 12 + (5,) * 4)
    last, bare = (memory(one, cluster, layout, 2048, 1, 32, stage=15).components for one in (recipe, without))
    for stage in (0, 7):
        found = [memory(one, cluster, layout, 2048, 1, 32, stage=stage) for one in (recipe, without)]
        assert found[0] == found[1]
    experts, embedding = 3 * 160 * 5120 * 1536, 151_552 * 5120
    held = count_by_component(recipe.model).mtp - experts
    whole = 2 * 5120 * 5120 + 160 * 5120 + 5 * 5120 + 2 * 128  # projection, router, norms: on every tensor rank
    found = (last["gradients"] - bare["gradients"]) / 4
    assert found == pytest.approx(experts / 8 / 32 + (held - whole) / 8 + whole + embedding / 8, rel=1e-9)
    assert last["head and loss"] - bare["head and loss"] == 4 * embedding / 8
    assert last["activations"] > bare["activations"]


def test_latents_that_other_engines_would_normalize_differently_are_warned_of() -> None:
    shape = "hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 256"
    latent = "mla: {kv_lora_rank: 64, qk_rope_head_dim: 16, qk_nope_head_dim: 32, v_head_dim: 32}"
    found = []
    for eps in (1e-5, 1e-6):
        model = f"model={{{shape}, rms_norm_eps: {eps}, {latent}}}"
        found.append(" ".join(make_plan(load_recipe("quickstart", [model]).recipe, "", load_cluster("2-cores")).warnings()))
    assert "an export would have other logits there; set both to 1e-6" in found[0] and "logits" not in found[1]
