"""Weight sync: how a version gets from the trainer's shards into a server's live parameters.

    trainer rank     shards ─▶ publisher ─▶ slots (shared memory)        plan: which bytes are which part of what (pure)
    ParameterSync    channel ──wire──▶ receiver ─▶ staging ─▶ WeightTarget.commit        (in the server's process)
    rollouter        fleet_client

Imports protocols, transport, messages, errors; what a server loads (receiver, staging, slots, plan, wire) imports torch, numpy,
pyzmq and msgpack only.
"""
