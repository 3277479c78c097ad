"""Model families: layers, weights from safetensors, and which builder makes which family."""
