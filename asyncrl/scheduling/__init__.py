"""Scheduling: what may start, what trains next, how a batch is cut. Pure functions and small state machines of plain values:
no clock, socket or process. Imports messages and errors."""
