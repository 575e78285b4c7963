"""Config: one strict, frozen schema of pipeline.yaml, its loader, and the checks that refuse what would hang or mislead."""
