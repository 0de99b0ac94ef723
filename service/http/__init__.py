"""An HTTP server that speaks OpenAI's and Anthropic's APIs: a process of its own and a client of gRPC servers."""
