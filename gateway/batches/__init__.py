"""Files and batches: many requests in one file, run beside live traffic, and kept over a restart."""
