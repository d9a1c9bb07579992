"""`act-exporter watch`: the pages of one run's exporters in a terminal, for people on a login node.

It reads `/metrics` as Prometheus does, of however many ranks, and nothing else: metric names are
the contract, so that it works with any exporter that has them.
"""
