"""The OpenAI API as clients write and read it: bodies in, answers out. Nothing here talks to a worker."""
