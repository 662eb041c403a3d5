"""The engine of the corpus stage: a job is cut into parts, passes map over them, and each task writes a marker when it is done.

A task is a function of its inputs: it writes the same files in any process, on any machine, after any interruption. Its marker holds a hash
of these inputs and is written last, so a finished task is skipped, and a task whose inputs have changed is repeated.
"""
