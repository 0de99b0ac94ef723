"""The client without input and output: it builds messages, decides about retries, resumes streams, uploads files again
and assembles answers. It yields what is to be sent, received or waited for, and a façade lets a transport do that."""
