"""An HTTP server with OpenAI's and Anthropic's APIs: a process of its own, and a client of gRPC servers."""
