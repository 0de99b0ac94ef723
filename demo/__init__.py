"""The embedded demo model: its data, its training and its evaluation."""
