"""OpenAI's JSON format: requests as Pydantic models, their conversion to messages, and answers. Used for batch files
and by the HTTP server."""
