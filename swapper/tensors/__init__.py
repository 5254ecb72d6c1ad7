"""Stands for tensors whose values are not in memory."""
