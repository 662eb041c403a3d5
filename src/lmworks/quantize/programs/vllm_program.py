"""Run by a Python that has `vllm`: computes logits and speed of a directory as vLLM serves it.

Logits are written to a file as float32, one row per token.
"""

# mypy: ignore-errors
# the types are those of libraries of another environment

import statistics
import time

_OPTIONS = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1, "disable_log_stats": True}


def load(request):
    from vllm import LLM

    length = request["length"] + 1
    return LLM(request["model"], max_model_len=length, max_num_batched_tokens=length, **_OPTIONS)  # a prompt is read in one piece


class Scorer:
    def __init__(self, request):
        import vllm

        self.version, self.model, self.rows = vllm.__version__, load(request), []
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

        with open(request["to"], "wb") as file:  # numpy's tofile does not notice if the last bytes do not fit on the disk
            file.write(torch.cat([*self.rows[1:], self.rows[0]]).numpy().data)
        return {"rows": len(ids)}


def speed(request):
    from vllm import SamplingParams

    ids, new = request["ids"], len(request["following"])
    model = load(request | {"length": len(ids) + new})
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
    return {"prefill": statistics.median(prefill[1:]), "decode": statistics.median(decode[1:])}  # the first warms up
