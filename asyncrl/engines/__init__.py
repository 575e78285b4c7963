"""Engines: the embedded inference engine, the client that speaks SGLang's protocol, and the FSDP2 training engine.
Imports protocols, algorithms, scheduling, transport, messages, config, errors."""
