"""What a device computes. Every op has one plain definition in `reference/`; `cpu/` and `gpu/` (Triton) compute it.

Models are written in the ops of a KernelSet. `gpu/` is imported only by who asks for it, since triton is optional.
"""

from .kernel_set import AttentionPlan, AttentionRule, Experts, KernelSet, Linear, QKNorm, Rope, RopeAngles

__all__ = ["AttentionPlan", "AttentionRule", "Experts", "KernelSet", "Linear", "QKNorm", "Rope", "RopeAngles"]
