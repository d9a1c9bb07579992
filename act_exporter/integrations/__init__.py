"""Exporters for trainers that do not use torch: each module has a `start_exporter` of its own."""
