"""The main job on one machine: a small training run, a fault, an alert, a rollback."""
