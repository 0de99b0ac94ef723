"""Jobs over files of requests: check the file line by line, write the answers to another file, resume after
interruptions."""
