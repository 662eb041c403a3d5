"""Training on answers: preference optimization (`dpo`) and reinforcement learning with verifiable rewards (`grpo`)."""
