"""Many requests at once: the one thing that is written twice, for threads and for tasks, over one `Window`."""
