"""A request becomes an answer: admission, prompt, stream, stop strings, detokenizing."""
