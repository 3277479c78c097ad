"""The vocabulary every room speaks: requests, sequences, layouts, wire messages, configs. No torch, no sockets."""
