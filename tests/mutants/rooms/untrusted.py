"""Mistakes in the limits and the separation of untrusted code."""

MUTANTS = [
    ("untrusted.limited_process:LimitedProcess._answer", "if size > most:", "if False:", "The answer of a limited process is bounded.",
     "untrusted/test_limited_process.py"),
    ("untrusted.limited_process:_end", "                os.kill(int(place.parent.name), signal.SIGKILL)\n", "                pass\n",
     "What a limited process has started ends with it.", "untrusted/test_limited_process.py"),
    ("untrusted.limited_process:_answer_calls", "    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))\n", "",
     "A limited process has a limit of memory.", "untrusted/test_limited_process.py"),
    ("untrusted.limited_process:_answer_calls", "        signal.setitimer(signal.ITIMER_PROF, seconds)",
     "        signal.setitimer(signal.ITIMER_PROF, 0)", "A call has a limit of time.", "untrusted/test_limited_process.py"),
    ("untrusted.limited_process:_answer_calls", "    os.dup2(2, 1)", "    pass", "What a library prints is not an answer.",
     "untrusted/test_limited_process.py"),
    ("untrusted.limited_process:_exactly", "            if process.poll() is not None:\n                raise EOFError\n", "",
     "A descendant that holds the pipe does not hang the caller.", "untrusted/test_limited_process.py"),
    ("untrusted.judged:encode", "plain = int.__add__(value, 0)", "plain = value",
     "A judged number is a plain one, whatever class the program gave it.", "untrusted/test_judged.py"),
    ("untrusted.judged:names_of", "isinstance(other, StandIn) and bool", "bool", "An object of the program is equal to no plain value.",
     "untrusted/test_judged.py untrusted/test_sandbox.py"),
    ("untrusted.judged:decode", 'if body.partition(".")[0] in sys.stdlib_module_names else None', "",
     "Only modules of the standard library cross to the tests.", "untrusted/test_judged.py"),
    ("untrusted.judged:names_of", "if not hasattr(builtins, name)", "", "A program cannot replace a builtin of the tests.",
     "untrusted/test_judged.py untrusted/test_sandbox.py"),
]  # fmt: skip
