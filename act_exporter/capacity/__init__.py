"""What a run costs those who watch it: series, samples, disk, memory and bandwidth, beforehand.

`series` counts as the exporter itself does, on the model of `decoder`; `cost` says what a series
then takes in Prometheus, by a measurement; `advice` what to do about it.
"""
