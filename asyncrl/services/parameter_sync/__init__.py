"""ParameterSync: which version each server confirmed, which slot is free, who takes traffic. `fleet` decides, `service` moves."""
