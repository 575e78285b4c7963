"""Ledger: every attempt's states, and the audit that holds them against independent witnesses. Imports messages, config, errors, clock."""
