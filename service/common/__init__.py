"""What every room may use: options, errors, request types, keys and limits, TLS, channels between processes."""
