"""The causes that the doctor knows: a module each, with a `RULE`. A new file here is a new rule, and nothing else has to change."""
