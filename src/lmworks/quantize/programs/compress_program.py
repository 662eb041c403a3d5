"""Run by a Python that has `llmcompressor`: writes a Hugging Face directory with weights in compressed-tensors, and computes its logits.

Logits are written to a file as float32, one row per token.
"""

# mypy: ignore-errors
# the types are those of libraries of another environment

import re

SENSITIVE = ("lm_head", "re:.*embed_tokens", r"re:.*mlp\.gate$", r"re:.*shared_head.*", r"re:.*eh_proj")
SCHEMES = {"fp8": "FP8_DYNAMIC", "int8": "W8A8", "gptq": "W4A16", "awq": "W4A16"}


def quantize(request):
    from importlib.metadata import version

    (with_data if request["calibration"] else without_data)(request)
    return {"version": version("llmcompressor")}


def ignored(request):
    """Routers, head and embedding, and all layers of multi-token prediction, which stay as they are."""
    return [*SENSITIVE, *(rf"re:model\.layers\.{layer}\..*" for layer in request["mtp_layers"])]


def without_data(request):
    """Round to nearest, file by file, without a class of transformers."""
    from llmcompressor import model_free_ptq

    model_free_ptq(request["source"], request["target"], scheme=SCHEMES[request["kind"]], ignore=ignored(request), device="cpu")


def with_data(request):
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.accelerator.is_available():  # it pins memory for an accelerator that is not there
        IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)
    model = AutoModelForCausalLM.from_pretrained(request["source"], dtype="auto")
    linearize(model)
    scheme = weights_of(request["group"])
    common = {"targets": ["Linear"], "ignore": list(SENSITIVE)}
    if request["kind"] == "gptq":
        recipe = [GPTQModifier(config_groups={"group_0": scheme}, ignore=common["ignore"])]
    else:
        found = [AWQMapping(smooth, balance) for smooth, balance in mappings(model)]
        recipe = [AWQModifier(mappings=found), QuantizationModifier(config_groups={"group_0": scheme}, ignore=common["ignore"])]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in request["calibration"]]
    oneshot(
        model=model, processor=AutoTokenizer.from_pretrained(request["source"]), dataset=Dataset.from_list(rows), recipe=recipe,
        num_calibration_samples=len(rows), max_seq_length=max(map(len, request["calibration"])), batch_size=1,
        moe_calibrate_all_experts=True,
    )
    model.save_pretrained(request["target"], save_compressed=True)


def linearize(model):
    """Experts as modules of their own, which are then quantized one by one."""
    from llmcompressor.modeling.moe.linearize import linearize_moe

    linearize_moe(model)


def weights_of(group):
    return {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "actorder": None},
    }


def mappings(model):
    """Pairs of a layer whose output is scaled and the layers that undo it. Norms before routers are left alone, so that routers stay as
    they are."""
    modules = dict(model.named_modules())
    for name in modules:
        if re.fullmatch(r"model\.layers\.\d+", name):
            norm, attention, mlp = f"{name}.input_layernorm", f"{name}.self_attn", f"{name}.mlp"
            for smooth, balance in (
                (norm, [f"{attention}.{part}" for part in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")]),
                (f"{attention}.q_a_layernorm", [f"{attention}.q_b_proj"]),
                (f"{attention}.kv_a_layernorm", [f"{attention}.kv_b_proj"]),
                (f"{name}.post_attention_layernorm", [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            ):
                there = [one for one in balance if one in modules]
                if smooth in modules and there:
                    yield exactly(smooth), [exactly(one) for one in there]
        elif name.endswith(".up_proj") and name.startswith("model.layers."):
            yield exactly(name), [exactly(name.removesuffix("up_proj") + "down_proj")]


def exactly(name):
    return f"re:^{re.escape(name)}$"


class Scorer:
    def __init__(self, request):
        import torch
        from transformers import AutoModelForCausalLM, __version__

        self.torch, self.version = torch, __version__
        torch.set_num_threads(request["threads"])
        model, found = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32, output_loading_info=True)
        lost = [*found["missing_keys"], *found["mismatched_keys"], *found.get("error_msgs", [])]
        if lost:
            raise ValueError(f"transformers does not load {len(lost)} tensors of this format, such as {lost[0]}")
        self.model = model.eval()

    def logits(self, request):
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([request["ids"]])).logits[0].float().contiguous().numpy()
        with open(request["to"], "wb") as file:  # numpy's tofile does not notice if the last bytes do not fit on the disk
            file.write(logits.data)
        return {"rows": len(request["ids"])}
