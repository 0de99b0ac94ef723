"""Files of requests: checked line by line, answered into another file, resumed after any interruption."""
