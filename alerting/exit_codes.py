"""What the exit codes mean between trainer, supervisor and scheduler; from BSD's sysexits.

Not 1 and 2, which Python and shells give for any error, nor above 125, which shells give for
signals.
"""

RESTART = 75
"""Start it again: nothing is broken. Of a trainer that wants a new process, and of a supervisor
that was told to end before its trainer had finished (EX_TEMPFAIL)."""

HALTED = 78
"""The guard halted the run: starting it again does not help, people must look (EX_CONFIG)."""

GAVE_UP = 69
"""The supervisor's: restart after restart brought no progress (EX_UNAVAILABLE)."""
