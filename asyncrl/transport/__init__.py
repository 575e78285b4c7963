"""Transport: the bounded queue's broker and its two ends, and remote calls. The only room that holds ZeroMQ for samples and
control. Imports messages, protocols, config, errors, clock."""
