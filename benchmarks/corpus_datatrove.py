"""The peer of `corpus.py`: the same work by datatrove, run by an interpreter that has it. Not meant to be called by hand.

    PYTHON benchmarks/corpus_datatrove.py INPUT_FOLDER TOKENIZER_JSON OUTPUT_FOLDER WORKERS

Its own defaults throughout: Gopher's repetition and quality filters for English, MinHash of 14 buckets of 8 over word 5-grams,
`DocumentTokenizer`. As many tasks as input files. Prints one line of JSON: seconds by the clock of each stage.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter


def main() -> None:
    source, tokenizer, out, workers = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    tasks = len(list(Path(source).glob("*.jsonl")))
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)

    def run(name: str, pipeline: list, tasks: int) -> None:
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=str(out / "logs" / name)).run()

    stages = {
        "filter": (
            [JsonlReader(source), GopherRepetitionFilter(), GopherQualityFilter(), JsonlWriter(str(out / "filtered"), compression=None)],
            tasks,
        ),
        "signatures": ([JsonlReader(str(out / "filtered")), MinhashDedupSignature(str(out / "signatures"), config=config)], tasks),
        "buckets": ([MinhashDedupBuckets(str(out / "signatures"), str(out / "buckets"), config=config)], config.num_buckets),
        "cluster": ([MinhashDedupCluster(str(out / "buckets"), str(out / "remove"), config=config)], 1),
        "tokenize": (
            [
                JsonlReader(str(out / "filtered")), MinhashDedupFilter(str(out / "remove")),
                JsonlWriter(str(out / "kept"), compression=None),
                DocumentTokenizer(str(out / "tokens"), tokenizer, eos_token="<|endoftext|>"),
            ],
            tasks,
        ),
    }  # fmt: skip
    seconds = {}
    for name, (pipeline, count) in stages.items():
        begin = time.perf_counter()
        run(name, pipeline, count)
        seconds[name] = round(time.perf_counter() - begin, 2)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
