"""Run by the Python that has llama.cpp's bindings: ids of texts under the tokenizers of GGUF files, as JSON on stdout.

Reads {"files": [...], "texts": [...], "special": whether control tokens in a text are those tokens} from stdin. Weights are not loaded.
"""

import json
import sys

import llama_cpp


def main() -> None:
    asked = json.load(sys.stdin)
    answers = []
    for path in asked["files"]:
        model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        answers.append([model.tokenize(text.encode(), add_bos=True, special=asked["special"]) for text in asked["texts"]])
    json.dump(answers, sys.stdout)


main()
