"""Services: rollouter, reward, trainer, message queue, parameter sync, inference server, supervisor. Each is coroutines over the
protocols; the wiring gives them real or simulated parts. Services do not import each other."""
