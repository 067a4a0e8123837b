"""The command line: one command a file, imports kept lazy."""
