"""Runs a program of this folder under a Python that has its library: `run_program.py NAME`.

Requests and answers are JSON lines. The request "open" makes the program's `Scorer`; others call its method, or the program's function, of
their name.
"""

# mypy: ignore-errors
# the programs' types are those of libraries of another environment

import json
import os
import sys
from importlib import import_module


def main():
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print goes to the messages
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    program, scorer = import_module(sys.argv[1]), None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                scorer = program.Scorer(request)
                answer = {"version": scorer.version}
            else:
                answer = getattr(scorer if hasattr(scorer, request["do"]) else program, request["do"])(request)
        except Exception as error:
            if os.environ.get("LMWORKS_DEBUG"):
                raise
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
