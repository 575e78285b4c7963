"""Cluster: the Ray runtime that places, starts, watches and stops the services. The only room that imports ray."""
