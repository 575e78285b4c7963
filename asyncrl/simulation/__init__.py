"""Simulation: the same services on a virtual clock. Imports services and everything below."""
