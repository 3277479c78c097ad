"""The command line, the supervisor, and what builds each process from its frozen config."""
