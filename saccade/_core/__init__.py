"""The client without input and output: it builds messages, decides about retries, resumes streams, uploads files again
and assembles answers. What is to be sent, received or waited for, it yields; a façade has a transport do it."""
