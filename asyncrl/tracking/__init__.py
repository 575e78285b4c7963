"""Tracking: where metrics go. The only room that imports mlflow, and that on a thread of its own.

    service ─ RemoteTracker ─ rpc track ─▶ supervisor ─▶ Hub ─┬─▶ MlflowTracker ─▶ MLflow, else mlflow_spool.jsonl ─▶ replay
                                                              └─▶ ConsoleProgress
    failed groups ─▶ FailedSamples ─▶ failed_samples.jsonl

Imports protocols, transport (remote calls), messages, config, errors.
"""
