"""Profile of a run: where the memory, the time and the data of its training steps go, beside the plan."""
