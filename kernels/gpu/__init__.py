"""Triton kernels. Each module: private jit functions, their tuned configurations, and one checked launcher per op."""
