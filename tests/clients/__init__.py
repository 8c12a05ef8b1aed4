"""The libraries that people use, against a real server on loopback: nothing of theirs is imitated."""
