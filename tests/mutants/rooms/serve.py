"""Mistakes in the engine and in the answers of the server."""

MUTANTS = [
    ("serve.engine:_Answer.seed", "given * 1_000_003 + self.index", "given", "The answers of one request with a seed differ.",
     "serve/test_engine.py serve/test_server.py"),
    ("serve.engine:_Answer.end", "if self.job.remaining == 0:", "if True:", "A request ends with its last answer.", "serve/test_engine.py"),
    ("serve.engine:Engine.room", "prompt + required > self.context", "prompt > self.context",
     "A prompt that leaves no room for a token is refused.", "serve/test_engine.py serve/test_server.py"),
    ("serve.engine:Engine.room", "min(wanted, left)", "wanted", "Prompt and answer fit the context.", "serve/test_engine.py"),
    ("serve.engine:Engine._take", "min(self._waiting, key=lambda one: running[id(one.job)])", "self._waiting[0]",
     "A request for many answers does not delay the others.", "serve/test_engine.py"),
    ("serve.engine:Engine._work", "if answer.done or answer.job.canceled:", "if answer.done:",
     "The answers of a disconnected client are dropped.", "serve/test_engine.py"),
    ("serve.engine:Engine._begin", "            self._fail([answer], error)\n", "            raise\n",
     "A failed request does not end the worker.", "serve/test_engine.py"),
    ("serve.engine:Engine._receive", '"stop" if rest.stopped else "length"', '"length"', "A stop text at the last token is a stop.",
     "serve/test_engine.py serve/test_stop_text.py"),
    ("serve.engine:Engine.close", "            self._closed = True\n", "            pass\n", "A closed engine stops.",
     "serve/test_engine.py"),
]  # fmt: skip
