"""Generation: sampling, continuous batching, a prefix cache, and models prepared for inference."""
