"""The commands of `saccade` that need the server's packages."""
