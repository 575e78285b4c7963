"""Simulation: the same services on a virtual clock, for tests of hours in seconds. It is wiring, like `cluster`, and may import
everything below.

`loop` has an event loop whose time jumps; `inference`, `training`, `weights` and `workers` are machines that take as long as they
are told to; `processes` lets a service die and begin again; `simulate` joins them with the real services, queue and ledger into a
whole run, and checks the ledger at every change.
"""
