"""Run by the Python that has llama.cpp's bindings: ids and log-probabilities of texts under a GGUF file, as JSON on stdout.

Reads {"model": path, "texts": [...], "lora": path of an adapter, if any} from stdin. For each text: the ids that llama.cpp makes of it,
and the natural-log probability of each id but the first. Not over HTTP, because llama-server does not give the log-probabilities of a
prompt.
"""

import json
import sys

import llama_cpp
import numpy as np


def main() -> None:
    asked = json.load(sys.stdin)
    model = llama_cpp.Llama(
        asked["model"], n_ctx=2048, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, lora_path=asked.get("lora"),
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,  # the cache is fp16 otherwise
    )  # fmt: skip
    answers = []
    for text in asked["texts"]:
        ids = model.tokenize(text.encode(), add_bos=False, special=False)
        model.reset()
        model.eval(ids)
        logits = np.asarray(model.scores[: len(ids)], dtype=np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        answers.append({"ids": ids, "logprobs": [float(logprobs[at, following]) for at, following in enumerate(ids[1:])]})
    json.dump(answers, sys.stdout)


main()
