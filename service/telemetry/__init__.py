"""What an operator sees: metrics, traces, the context of a call, the file of image sizes."""
