"""Tools and reasoning: from the text of an answer to its pieces, and from a request to what constrains its answer."""
