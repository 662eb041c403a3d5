"""Run by a Python that has `llama_cpp`: quantizes GGUF files, and computes logits and speed under them.

Logits are written to a file as float32, one row per token.
"""

# mypy: ignore-errors
# the types are those of libraries of another environment

import ctypes
import os
import statistics
import time


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


class Scorer:
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
        with open(request["to"], "wb") as file:  # numpy's tofile does not notice if the last bytes do not fit on the disk
            file.write(self.model.scores[: len(ids)].astype("float32").data)
        return {"rows": len(ids)}

    def tokenize(self, request):
        return {"ids": self.model.tokenize(request["text"].encode(), add_bos=False, special=False)}


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
    return {"prefill": statistics.median(prefill[1:]), "decode": statistics.median(decode[1:])}  # the first warms up
