"""Run by the Python that has vLLM: what it makes of an exported directory, as JSON on the last line of stdout.

Reads {"model": directory, "texts": [...], "chats": [...]} from stdin. For each text: its ids, the natural-log probability of each
id but the first, and 16 greedy tokens after the first 40; for each conversation the ids of its prompt; and what vLLM takes from
generation_config.json.
"""

import json
import os
import sys

os.environ |= {  # before the import, which reads them
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

from vllm import LLM, SamplingParams


def main() -> None:
    asked = json.load(sys.stdin)
    model = LLM(asked["model"], dtype="float32", max_model_len=256, enforce_eager=True, enable_prefix_caching=False, max_num_seqs=4)
    tokenizer = model.get_tokenizer()
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in asked["texts"]]
    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    scored = model.generate([{"prompt_token_ids": ids} for ids in prompts], score, use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    written = model.generate([{"prompt_token_ids": ids[:40]} for ids in prompts], greedy, use_tqdm=False)
    defaults = model.get_default_sampling_params()
    answer = {
        "texts": [
            {"ids": ids, "greedy": list(after.outputs[0].token_ids),
             "logprobs": [place[number].logprob for number, place in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]}
            for ids, output, after in zip(prompts, scored, written, strict=True)
        ],
        "chats": [tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), add_generation_prompt=True, return_dict=False)
                  for chat in asked["chats"]],
        "temperature": defaults.temperature, "min_p": defaults.min_p, "architecture": model.llm_engine.model_config.architecture,
    }  # fmt: skip
    print()
    print(json.dumps(answer))


main()
