"""The exporter's own page at `/`: what is wrong, where it began, and what was done about it.

For people, without a Prometheus or Grafana. A request goes in at `page`; `view` makes data of the
newest snapshots (with `rows`, `incident`, `guard` and the `conditions` of shipped `alerts`), and
`html` writes it down, with `svg` and `words`. Only `trail`, which keeps the last steps, runs in the
training thread.
"""

from act_exporter.live.html import POLICY
from act_exporter.live.page import LivePage
from act_exporter.live.trail import Trail
from act_exporter.live.view import Source

__all__ = ["POLICY", "LivePage", "Source", "Trail"]
