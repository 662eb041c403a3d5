"""Personal data and secrets: detection of each kind (`finders`, `secrets`), and replacement (`masking`)."""
