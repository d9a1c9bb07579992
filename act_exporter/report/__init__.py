"""`act-exporter report`: what happened to a run, from its journals, on a page for people.

Data goes one way: `piece` (a file as columns), `recording` (all of them as one run), `incident`
(where it went wrong), `story` (one incident in facts), then `words`, `pictures` and `page`.
"""
