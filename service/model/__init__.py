"""A checkpoint directory, read: configuration, weights, tokenizer, chat template; and quantised copies of it."""
