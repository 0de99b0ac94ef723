"""The client without I/O: builds messages, decides about retries, resumes streams, uploads files and assembles answers.
It yields what to send, receive or wait for; a façade executes that through a transport."""
