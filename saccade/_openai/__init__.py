"""OpenAI's JSON format: requests as Pydantic models, their conversion to messages, and answers. Batch files and
the HTTP server read and write it here."""
