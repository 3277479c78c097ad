"""What scripts/gpu_check is made of: a stage each, and what they share."""
