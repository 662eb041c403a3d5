"""GGUF files as models: their header, and the same model described by config.json and tokenizer.json. No weights are read here."""
