"""Run under the Python of another environment that has llm-compressor, llama.cpp or vLLM: `programs.py NAME`, NAME one of `PROGRAMS`.

Requests and answers are JSON lines. The request "open" makes a program; others call its method of their name, and "quantize" and "speed"
need no open model. Logits are written to a file as float32, one row per token. This file imports nothing of lmworks.
"""

# mypy: ignore-errors
# the types are those of libraries of another environment

import ctypes
import json
import os
import re
import statistics
import sys
import time


def write(logits, request):
    with open(request["to"], "wb") as file:  # numpy's tofile does not notice if the last bytes do not fit on the disk
        file.write(logits.data)
    return {"rows": len(request["ids"])}


def medians(prefill, decode):
    return {"prefill": statistics.median(prefill[1:]), "decode": statistics.median(decode[1:])}  # the first warms up


_SENSITIVE = (
    "lm_head", "re:.*embed_tokens", r"re:.*\.(gate|router|router\.layer|shared_expert_gate)$", r"re:.*\.(linear_attn|mamba|conv)\..*",
    r"re:.*shared_head.*", r"re:.*eh_proj",
)  # fmt: skip
_SCHEMES = {"fp8": "FP8_DYNAMIC", "int8": "W8A8", "gptq": "W4A16", "awq": "W4A16"}


def ignored(request):
    """Routers, gates of shared experts, head and embedding, linear attention and Mamba, whose errors add up in their states, short
    convolutions, which vLLM has no quantized matrices for, and all layers of multi-token prediction; these stay as they are."""
    return [*_SENSITIVE, *(rf"re:model\.layers\.{layer}\..*" for layer in request["mtp_layers"])]


def without_data(request):
    """Round to nearest, file by file, without a class of transformers."""
    from llmcompressor import model_free_ptq

    model_free_ptq(request["source"], request["target"], scheme=_SCHEMES[request["kind"]], ignore=ignored(request), device="cpu")


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
    common = {"targets": ["Linear"], "ignore": list(_SENSITIVE)}
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
            before_mlp = "pre_feedforward" if f"{name}.post_feedforward_layernorm" in modules else "post_attention"
            for smooth, balance in (
                (norm, [f"{attention}.{part}" for part in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")]),
                (f"{attention}.q_a_layernorm", [f"{attention}.q_b_proj"]),
                (f"{attention}.kv_a_layernorm", [f"{attention}.kv_b_proj"]),
                (f"{name}.{before_mlp}_layernorm", [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
            ):
                there = [one for one in balance if one in modules]
                if smooth in modules and there:
                    yield exactly(smooth), [exactly(one) for one in there]
        elif name.endswith(".up_proj") and name.startswith("model.layers."):
            yield exactly(name), [exactly(name.removesuffix("up_proj") + "down_proj")]


def exactly(name):
    return f"re:^{re.escape(name)}$"


class LlmCompressor:
    """Writes a Hugging Face directory with weights in compressed-tensors, and computes its logits with transformers."""

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
        return write(logits, request)

    @staticmethod
    def quantize(request):
        from importlib.metadata import version

        (with_data if request["calibration"] else without_data)(request)
        return {"version": version("llmcompressor")}


class LlamaCpp:
    """Quantizes GGUF files, and computes logits and speed under them."""

    def __init__(self, request):
        import llama_cpp

        options = {"n_threads": request["threads"], "n_threads_batch": request["threads"], "verbose": False, "n_gpu_layers": 0}
        size = {"n_ctx": request["length"], "n_batch": request["length"], "n_ubatch": request["length"]}
        exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # the cache is fp16 otherwise
        self.model = llama_cpp.Llama(request["model"], logits_all=True, **options, **size, **exact)
        self.version = llama_cpp.__version__

    def logits(self, request):
        ids = request["ids"]
        self.model.reset()
        self.model.eval(ids)
        return write(self.model.scores[: len(ids)].astype("float32"), request)

    def tokenize(self, request):
        return {"ids": self.model.tokenize(request["text"].encode(), add_bos=False, special=False)}

    @staticmethod
    def quantize(request):
        import llama_cpp

        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{request['kind']}")
        parameters.nthread = request["threads"]
        # 8 bits, of which blocks of 32 share a scale: the embedding and the head lose nothing that can be measured
        parameters.output_tensor_type = parameters.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
        source, target = os.fsencode(request["source"]), os.fsencode(request["target"])
        if llama_cpp.llama_model_quantize(source, target, ctypes.byref(parameters)):
            return {"error": "llama.cpp could not quantize the file"}
        return {"version": llama_cpp.__version__}

    @staticmethod
    def speed(request):
        import llama_cpp

        model = llama_cpp.Llama(
            request["model"], n_ctx=len(request["ids"]) + len(request["following"]) + 1, n_threads=request["threads"],
            n_threads_batch=request["threads"], verbose=False, n_gpu_layers=0,
        )
        prefill, decode = [], []
        for _ in range(request["repeats"] + 1):
            model.reset()
            began = time.perf_counter()
            model.eval(request["ids"])
            first = time.perf_counter()
            for token in request["following"]:
                model.eval([token])
            prefill.append(len(request["ids"]) / (first - began))
            decode.append(len(request["following"]) / (time.perf_counter() - first))
        return medians(prefill, decode)


_VLLM = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1, "disable_log_stats": True}


class Vllm:
    """Computes logits and speed of a directory as vLLM serves it."""

    def __init__(self, request):
        import vllm

        self.version, self.model, self.rows = vllm.__version__, self.load(request), []
        self.model.apply_model(self._listen)

    def _listen(self, model):
        compute = model.compute_logits

        def listening(*inputs, **options):
            rows = compute(*inputs, **options)
            self.rows.append(rows.float().cpu())
            return rows

        model.compute_logits = listening

    def logits(self, request):
        """vLLM computes the row of the last token to choose the next one, and then those of the others for their log-probabilities."""
        from vllm import SamplingParams

        ids = request["ids"]
        self.rows.clear()
        options = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        self.model.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
        counts = [len(rows) for rows in self.rows]
        if counts[:1] != [1] or sum(counts) != len(ids):
            return {"error": f"vLLM has computed {counts} rows of logits for {len(ids)} tokens, which this program does not understand"}
        import torch

        return write(torch.cat([*self.rows[1:], self.rows[0]]).numpy(), request)

    @staticmethod
    def load(request):
        from vllm import LLM

        length = request["length"] + 1
        return LLM(request["model"], max_model_len=length, max_num_batched_tokens=length, **_VLLM)  # a prompt is read in one piece

    @staticmethod
    def speed(request):
        from vllm import SamplingParams

        ids, new = request["ids"], len(request["following"])
        model = Vllm.load(request | {"length": len(ids) + new})
        prefill, decode = [], []
        for _ in range(request["repeats"] + 1):
            seconds = []
            for count in (1, 1 + new):
                began = time.perf_counter()
                options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                model.generate([{"prompt_token_ids": ids}], options, use_tqdm=False)
                seconds.append(time.perf_counter() - began)
            prefill.append(len(ids) / seconds[0])
            decode.append(new / (seconds[1] - seconds[0]))
        return medians(prefill, decode)


PROGRAMS = {"llm-compressor": LlmCompressor, "llama.cpp": LlamaCpp, "vLLM": Vllm}


def main():
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print goes to the messages
    program, opened = PROGRAMS[sys.argv[1]], None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                opened = program(request)
                answer = {"version": opened.version}
            else:
                answer = getattr(opened or program, request["do"])(request)
        except Exception as error:
            if os.environ.get("LMWORKS_DEBUG"):
                raise
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
