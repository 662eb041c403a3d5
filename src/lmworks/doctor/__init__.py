"""`lmworks doctor`: names the cause of what went wrong in a run, from its files or by recomputation."""
