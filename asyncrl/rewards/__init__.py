"""Rewards: ready-made reward functions, and how a user's own is found and called. Imports protocols, messages, config, errors."""
