"""torchrun."""
