"""What listens, and the life and death of its processes."""
