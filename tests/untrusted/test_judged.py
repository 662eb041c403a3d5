"""Programs that are judged by tests in another process of the sandbox: what passes, and what tries to pass without an answer."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from lmworks.untrusted.judged import encode, imported
from lmworks.untrusted.sandbox import Limits, judge_python

LIMITS = Limits(seconds=60)
TESTS = "assert f(1) == 2 and f(2) == 3"


def outcome(program: str, tests: str) -> str:
    ran = judge_python(program, tests, LIMITS)
    if ran.outcome == "refused":
        pytest.skip(f"no sandbox here: {ran.detail}")
    return ran.outcome


@pytest.mark.parametrize(("program", "tests"), [
    ("def f(x): return x + 1", TESTS), ("import functools\nf = functools.partial(int.__add__, 1)", TESTS),
    ("def f(x): return {1: (x, 2.5, float('inf')), 'a': {1}, None: b'x', 2 ** 80: 1j}",
     "assert f(True) == {1: (True, 2.5, float('inf')), 'a': {1}, None: b'x', 2 ** 80: 1j} and f(0)[1][0] is not False"),
    ("def f(x): x.sort(); x.append(9)", "a = [3, 1]\nf(a)\nassert a == [1, 3, 9]"),
    ("def f(x): raise ValueError(x)", "try:\n    f('why')\nexcept ValueError as e:\n    assert str(e) == 'why'\nelse:\n    assert False"),
    ("class Own(Exception): pass\ndef f(): raise Own('x')", "try:\n    f()\nexcept RuntimeError as e:\n    assert 'Own' in str(e)"),
    ("class S:\n    def __init__(s, n=0): s.x = [n]\n    def push(s, v): s.x.append(v)\n    def __len__(s): return len(s.x)",
     "s = S(n=3)\ns.push(4)\nassert len(s) == 2 and s.x == [3, 4] and s != [3, 4] and s == s"),
    ("def f(n): return (i * i for i in range(n))", "assert list(f(4)) == [0, 1, 4, 9] and sum(f(3)) == 5"),
    ("from collections import *\nP = namedtuple('P', 'a b')\ndef f(t): return Counter(t), P(1, 2), deque([1])",
     "assert f('aab') == ({'a': 2, 'b': 1}, (1, 2), [1])"),
    ("import math\nLIMIT = 3\ndef f(x): return math.sqrt(x)", "assert abs(f(2) - math.sqrt(2)) < 1e-12 and LIMIT == 3"),
    ("print('noise'); encode = decode = Channel = None\ndef f(x): return x + 1", TESTS),
], ids=range(11))  # fmt: skip
def test_right_programs_pass(program: str, tests: str) -> None:
    assert outcome(program, tests) == "passed"


LIAR = """class Liar({base}):
    def __eq__(self, other): return True
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __lt__(self, other): return True
    def __hash__(self): return 2
def f(x): return Liar({start})
"""


@pytest.mark.parametrize("program", [
    "def f(x): return x", "", "import os; os._exit(0)", "raise SystemExit(0)", "def f(x):\n    import os\n    os._exit(0)",
    "def f(x):\n    import sys\n    print(open(sys.argv[0]).read())\n    sys.exit(0)", "def f(x): return open('/tests.py').read()",
    LIAR.format(base="object", start=""), LIAR.format(base="int", start="7"), LIAR.format(base="list", start=""),
    "import builtins\nbuiltins.AssertionError = None\ndef f(x): raise SystemExit", "assert_ = None\ndef f(x): return f",
    "import os\ndef f(x):\n    os.write(3, b'{\"found\": 2, \"arguments\": []}\\n' * 9)\n    return 0",
    "import os\ndef f(x):\n    os.write(3, b'{\"found\": {\"module\": \"__main__\"}, \"arguments\": [1]}\\n')\n    return 0",
    "import os\ndef f(x):\n    for pid in range(1, 50):\n        try: os.kill(pid, 15)\n        except OSError: pass\n    return 0",
    "import os\ndef f(x):\n    os.write(1, b'passed\\n'); os.close(3); return 2",
    "import types\nx = types.ModuleType('unittest.__main__')\ndef f(x): return 0", "import unittest.__main__\ndef f(x): return 0",
    "def f(x):\n    import types\n    return types.ModuleType('unittest.__main__')", "import idlelib.idle\ndef f(x): return 0",
])  # fmt: skip
def test_what_does_not_answer_does_not_pass(program: str) -> None:
    assert outcome(program, TESTS) == "failed"


def test_names_of_the_tests_are_their_own() -> None:
    """A program that defines what its tests compute with."""
    cheat = "def abs(x): return 0\nclass math:\n    fabs = staticmethod(lambda x: 0)\ndef f(x): return 7"
    assert outcome(cheat, "assert abs(f(1) - 2) < 1e-6") == "failed"
    assert outcome(cheat, "import math\nassert math.fabs(f(1) - 2) < 1e-6") == "failed"


def test_a_program_that_takes_too_long_is_a_timeout() -> None:
    for body in ("while True: pass", "import time; time.sleep(1000)"):
        ran = judge_python(f"def f(x):\n    {body}", TESTS, Limits(seconds=2))
        assert ran.outcome in ("timeout", "refused")


class _Anything(int):
    """Equal to everything, and within all bounds."""

    def _yes(self, _: object) -> bool:
        return True

    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = _yes  # type: ignore[assignment]
    __hash__ = int.__hash__


def test_a_number_crosses_as_a_plain_one() -> None:
    small, large = encode(_Anything(3), None), encode(_Anything(1 << 60), None)
    assert type(small) is int and small == 3
    assert large == {"int": hex(1 << 60)}  # a number that JSON readers would round


FORGER = """
import json, socket
stream = socket.socket(fileno=3).makefile("rwb")
def send(message): stream.write(json.dumps(message).encode() + b"\\n"); stream.flush()
send(%s)
for line in stream: send({"found": {"float": (0.0).hex()}, "arguments": json.loads(line)["arguments"]})
"""


@pytest.mark.parametrize("sent", [
    {"names": {"f": {"object": 0}, "__builtins__": {"dict": [["abs", {"object": 1}]]}}, "modules": []},
    {"names": {"f": {"object": 0}, "abs": {"object": 1}}, "modules": []},
    {"names": {"f": {"object": 0}, "os": {"module": "unittest.__main__"}}, "modules": ["os"]},
    {"names": {"f": {"object": 0}, "os": {"object": 1}}, "modules": ["os", "unittest.__main__"]},
], ids=["all builtins", "a builtin", "a kind of values", "another module"])  # fmt: skip
def test_a_program_that_speaks_to_the_tests_itself_decides_nothing(sent: dict[str, Any]) -> None:
    assert outcome("import os\n" + FORGER % json.dumps(sent), "assert abs(f(2) - 5) < 1e-6") == "failed"


def test_the_end_of_an_iteration_does_not_end_one_of_the_tests() -> None:
    """`all` takes it for the end of the cases, of which it has seen none."""
    tests = "cases = [(1, 2)]\nassert all(map(lambda case: f(case[0]) == case[1], cases))"
    assert outcome("def f(x): return x + 1", tests) == "passed"
    for kind in ("StopIteration", "StopAsyncIteration"):
        assert outcome(f"def f(x): raise {kind}", tests) == "failed"


def test_modules_of_the_tests_are_those_that_the_text_of_the_program_imports() -> None:
    found = imported(b"import json.decoder, os.path as p, numpy, unittest.__main__, _thread\nif 1:\n    import math")
    assert found == {"json": json, "p": os.path}
    assert outcome("import math\nmath.sqrt = lambda x: 5\ndef f(x): return 5", "assert f(2) == math.sqrt(2)") == "failed"
    assert outcome("import math\ndef math(x): return x", "assert math(2) == 2") == "passed", "a name that is bound anew"
