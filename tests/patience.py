"""How long a test waits for what must come."""

PATIENCE = 900.0  # seconds: only a bound against waiting for ever, also on a machine with many other things to do
