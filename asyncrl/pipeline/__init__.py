"""Pipeline: the Python API. `Pipeline`, `launch`, `Run`."""
