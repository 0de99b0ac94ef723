"""Files of requests that the server works on by itself."""
