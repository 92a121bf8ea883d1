"""Packed rows -> gradients -> new weights -> publish."""
