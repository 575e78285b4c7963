"""Tracking: where metrics go (files, MLflow, the terminal). The only room that imports mlflow. Imports protocols, messages, config, errors."""
