"""Personal data and keys: how each kind is found (`finders`, `secrets`), and put out of sight (`masking`)."""
