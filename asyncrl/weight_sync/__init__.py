"""Weight sync: the plan of a version's shards, the trainer's staging slots, the buckets that travel and the receiver in a server.
Imports protocols, transport, messages, errors; what a server loads imports torch, numpy, pyzmq and msgpack only."""
