"""Data: resumable prompt sources, and the built-in tasks. Imports protocols, messages, config, errors."""
