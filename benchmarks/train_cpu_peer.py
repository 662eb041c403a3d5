"""The peer of `train_cpu.py`: a plain PyTorch loop around `transformers`, as its users write it, in a process without lmworks.

Reads one line of JSON (`kind`, `config`, `compiled`, `autocast`, `experts`, `rows`, `length`, `vocabulary`, `seed`), then answers each
further line with the seconds of a step.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import transformers


def main() -> None:
    arm = json.loads(sys.stdin.readline())
    kind = getattr(transformers, arm["kind"])
    options = kind.config_class(**arm["config"])
    if arm["experts"]:
        options._experts_implementation = "grouped_mm"  # its fastest on CPUs
    model = kind(options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    numbers = np.random.default_rng(arm["seed"]).integers(0, arm["vocabulary"], (arm["rows"], arm["length"] + 1), dtype=np.int32)
    tokens = torch.from_numpy(numbers[:, :-1].copy()).long()
    forward = torch.compile(model) if arm["compiled"] else model
    for _ in sys.stdin:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arm["autocast"]):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
