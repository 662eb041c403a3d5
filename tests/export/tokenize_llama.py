"""Run by the Python that has llama.cpp's bindings: the ids of texts under a GGUF file, as JSON on stdout.

Reads {"model": path, "texts": [...]} from stdin, and if it is to answer, "prompt": ids, "count": tokens. Special tokens in a text count as
such; nothing is put before it.
"""

import json
import sys

import llama_cpp


def main() -> None:
    asked = json.load(sys.stdin)
    answers = "prompt" in asked
    options = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # the cache is fp16 otherwise
    model = llama_cpp.Llama(asked["model"], vocab_only=not answers, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False, **options)
    found = {"ids": [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]}
    if answers:
        following = model.generate(asked["prompt"], temp=0.0, repeat_penalty=1.0)
        found["greedy"] = [next(following) for _ in range(asked["count"])]
    json.dump(found, sys.stdout)


main()
