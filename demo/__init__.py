"""The embedded demo model: its world, its training and its evaluation."""
