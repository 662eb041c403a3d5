"""What a run reads beside its shards: conversations for tuning, changes of the mixture, and the tokenizer that the weights fix."""
