"""What a series costs those who scrape and judge it.

All numbers were measured by `python -m tests.benchmarks.scale`: 200 exporters and 450,000 series,
Prometheus 2.42 with the shipped rules, on two cores; docs/scale.md has the figures and what they
leave out. They say how large, not how much to the percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from act_exporter.capacity.series import Series

DAYS = 30
"""What prometheus.yml's readers are told to keep; see docs/scale.md."""

# In memory, resident, a series that is scraped each 15 s. Twice of what was measured after a
# quarter of an hour, on a busy machine, which took more than an idle one: the head later holds two
# hours and more, and is compacted.
MEMORY_BYTES = 2 * 4_700
_OWN_BYTES = 100e6  # of Prometheus with hardly a series

SAMPLE_BYTES = 5.2  # in a block, where a busy machine scrapes at uneven times; 3.9 where even
INDEX_BYTES = 87  # of a series, in each block
_BLOCKS = 14  # that 30 days are in, most of them 3 days long: Prometheus merges up to a tenth

LINE_BYTES = 13  # of a page, a series; between machines it is compressed, to an eighth

# Seconds of one core from one scrape to the next, all of Prometheus' work in them: for each scraped
# series, and besides for each watched tensor of a run in a storm, whose alerts are worded anew each
# time. Not the time of an evaluation, which other work on the same cores makes longer.
SERIES_SECONDS = 8.4e-6
ALERTING_SECONDS = 6.4e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one run, on one Prometheus.

    Attributes:
        samples: a second.
        disk: bytes, for `DAYS`.
        memory: bytes.
        bandwidth: bytes a second that arrive, compressed.
        quiet: seconds of one core for a scrape of all and an evaluation of all rules, in health.
        storm: likewise where each layer of each rank breaks each rule.
    """

    samples: float
    disk: float
    memory: float
    bandwidth: float
    quiet: float
    storm: float


def cost(series: Series, interval: float) -> Cost:
    """The cost of `series` that are scraped each `interval` seconds."""
    scraped = series.exporters * series.page
    samples = series.total / interval
    return Cost(
        samples=samples,
        disk=samples * DAYS * 86_400 * SAMPLE_BYTES + series.total * INDEX_BYTES * _BLOCKS,
        memory=series.total * MEMORY_BYTES + _OWN_BYTES,
        bandwidth=scraped * LINE_BYTES / interval,
        quiet=scraped * SERIES_SECONDS,
        storm=scraped * SERIES_SECONDS + series.tensors * ALERTING_SECONDS,
    )
