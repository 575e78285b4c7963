"""Ledger: every attempt's states, and the audit that holds them against independent witnesses. Imports protocols, messages,
config, errors, clock.

`states` is the pure state machine, `store` its SQLite file (one writer, any number of readers), `local` the ledger in this
process, `audit` the check.
"""
