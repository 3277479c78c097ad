"""The Responses API as clients write and read it: translated to a chat request, and its answer back. No I/O."""
