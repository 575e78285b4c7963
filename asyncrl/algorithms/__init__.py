"""Algorithms: advantages, policy losses and importance corrections as pure functions on tensors. Imports errors only (and torch)."""
