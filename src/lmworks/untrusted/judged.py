"""How a program and the tests that judge it talk: two processes of the sandbox, and a socket between them. Standard library only.

`sandbox.judge_python` puts this text in front of both. The program's process executes it and then calls its functions when asked (`serve`);
the tests' process has a stand-in for each name of the program (`names_of`). Values cross as JSON of plain values, made anew on the other
side, so that a comparison in the tests is one of Python's own values, whatever class the program gave its answer. Other objects stay where
they are: the tests hold a stand-in with calls, attributes, items and iteration, which is equal to no plain value. Modules are no values:
what the tests import is named by the program's text, never by the running program, since an import runs code.
"""

import ast
import builtins
import collections
import importlib
import json
import socket
import sys
import types
from typing import Any

PROGRAM = "solution"  # how published tests import the program (KodCode)
_MOST = 1 << 26  # bytes of one message


def encode(value: Any, keep: Any) -> Any:
    """A value as JSON; `keep` gives the number of an object that is none. Of a subclass it is the plain value."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        plain = int.__add__(value, 0)
        return plain if -(1 << 53) < plain < 1 << 53 else {"int": hex(plain)}
    if isinstance(value, float):
        return {"float": float.hex(float.__add__(value, 0.0))}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    kind: Any
    for kind, name in ((tuple, "tuple"), (list, "list"), (collections.deque, "list"), (frozenset, "frozenset"), (set, "set")):
        if isinstance(value, kind):
            return {name: [encode(one, keep) for one in kind.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(one, keep)] for key, one in dict.items(value)]}
    return {"object": keep(value)}


def decode(given: Any, known: Any) -> Any:
    """The value; `known` returns the object of a number."""
    if not isinstance(given, dict):
        return given
    ((name, body),) = given.items()
    simple: dict[str, Any] = {"int": lambda text: int(text, 16), "float": float.fromhex, "bytes": bytes.fromhex}
    if name in simple:
        return simple[name](body)
    if name == "complex":
        return complex(*map(float.fromhex, body))
    if name == "dict":
        return {decode(key, known): decode(one, known) for key, one in body}
    if name == "object":
        return known(body)
    sequences: dict[str, Any] = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}
    return sequences[name](decode(one, known) for one in body)


def imported(source: bytes) -> dict[str, Any]:
    """The modules of the standard library that `import` statements at the top of a program bind, by their names there."""
    found = {}
    for alias in (alias for node in ast.parse(source).body if isinstance(node, ast.Import) for alias in node.names):
        first, _, rest = alias.name.partition(".")
        if first in sys.stdlib_module_names and not any(part.startswith("_") for part in alias.name.split(".")):
            module = importlib.import_module(alias.name)
            found[alias.asname or first] = module if alias.asname or not rest else sys.modules[first]
    return found


class Channel:
    """Lines of JSON over the socket at descriptor 3."""

    def __init__(self) -> None:
        self._stream = socket.socket(fileno=3).makefile("rwb")

    def send(self, message: dict[str, Any]) -> None:
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()

    def receive(self) -> Any:
        line = self._stream.readline(_MOST)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


def serve(source: bytes) -> None:
    """In the program's process: execute the program, say what names it has, and do what the tests ask."""
    channel, kept = Channel(), list[Any]()
    sys.setrecursionlimit(10_000)

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def failed(error: BaseException) -> dict[str, Any]:
        return {"failed": [type(error).__name__, " ".join(str(error).split())[:300]]}

    names: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(source, "program", "exec"), names)
        modules = [name for name, value in names.items() if isinstance(value, types.ModuleType)]
        found = {name: encode(value, keep) for name, value in list(names.items()) if not name.startswith("__")}
        channel.send({"names": found, "modules": modules})
    except BaseException as error:
        channel.send(failed(error))
        return
    do: dict[str, Any] = {
        "call": lambda it, arguments, named: it(*arguments, **named), "get": lambda it, arguments, named: getattr(it, *arguments),
        "item": lambda it, arguments, named: it[arguments[0]], "len": lambda it, arguments, named: len(it),
        "list": lambda it, arguments, named: list(it), "same": lambda it, arguments, named: bool(it == arguments[0]),
        "text": lambda it, arguments, named: str(it), "in": lambda it, arguments, named: arguments[0] in it,
    }
    while True:
        asked = channel.receive()
        try:
            arguments = [decode(one, kept.__getitem__) for one in asked["arguments"]]
            named = {name: decode(one, kept.__getitem__) for name, one in asked["named"].items()}
            found = encode(do[asked["do"]](kept[asked["object"]], arguments, named), keep)
            channel.send({"found": found, "arguments": [encode(one, keep) for one in arguments]})
        except Exception as error:
            channel.send(failed(error))


class _Ended(Exception):
    """The program ended itself."""


def names_of(channel: Channel, source: bytes) -> dict[str, Any]:
    """In the tests' process: a stand-in, or the plain value, for each name of the program `source`, and the real modules that it imports.
    Tests that import the module `PROGRAM` get the same. Ends this process if the program fails."""

    def answer(message: Any) -> Any:
        if "failed" in message:
            kind, text = message["failed"]
            error = getattr(builtins, str(kind), None)
            if not (isinstance(error, type) and issubclass(error, Exception)) or issubclass(error, StopIteration | StopAsyncIteration):
                error, text = RuntimeError, f"{kind}: {text}"  # the end of an iteration would end one of the tests' own, as all(map(...))
            try:
                made = error(text)
            except Exception:  # one that takes other arguments
                made = RuntimeError(f"{kind}: {text}")
            raise made
        return message

    def receive() -> Any:
        try:
            return channel.receive()
        except (EOFError, ValueError, OSError):
            raise _Ended("the program ended before its tests") from None

    def ask(number: int, what: str, arguments: Any = (), named: Any = None) -> Any:
        def number_of(value: Any) -> int:
            if isinstance(value, StandIn):
                return int(object.__getattribute__(value, "_number"))
            raise TypeError(f"a {type(value).__name__} cannot be handed to a program that is judged")

        given = [encode(one, number_of) for one in arguments]
        of_names = {name: encode(one, number_of) for name, one in (named or {}).items()}
        channel.send({"object": number, "do": what, "arguments": given, "named": of_names})
        message = answer(receive())
        for mine, theirs in zip(arguments, message["arguments"], strict=True):
            if isinstance(mine, list | dict | set):  # what the program has changed in place
                now = decode(theirs, StandIn)
                if isinstance(mine, list):
                    mine[:] = now
                else:
                    mine.clear()
                    mine.update(now)
        return decode(message["found"], StandIn)

    class StandIn:
        """For an object of the program."""

        _number: int

        def __init__(self, number: Any) -> None:
            object.__setattr__(self, "_number", int(number))

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            return ask(self._number, "call", arguments, named)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return ask(self._number, "get", [name])

        def __getitem__(self, key: Any) -> Any:
            return ask(self._number, "item", [key])

        def __len__(self) -> int:
            return int(ask(self._number, "len"))

        def __iter__(self) -> Any:
            return iter(ask(self._number, "list"))

        def __contains__(self, value: Any) -> bool:
            return bool(ask(self._number, "in", [value]))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, StandIn) and bool(ask(self._number, "same", [other]))

        def __hash__(self) -> int:
            return hash(self._number)

        def __str__(self) -> str:
            return str(ask(self._number, "text"))

    try:
        message, modules = answer(receive()), imported(source)
        own = {name: modules[name] if name in message["modules"] and name in modules else decode(value, StandIn)
               for name, value in message["names"].items() if not name.startswith("__") and not hasattr(builtins, name)}  # fmt: skip
    except BaseException as error:  # an import may raise SystemExit, which is no verdict
        print(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
    vars(sys.modules[PROGRAM]).update(own)
    return own
