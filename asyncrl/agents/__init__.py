"""Agents: how one member of a group becomes a trajectory. Imports protocols, messages, config, errors."""
