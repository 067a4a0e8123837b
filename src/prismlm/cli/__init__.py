"""The command line: a file for each command or group of related ones; imports are lazy."""
