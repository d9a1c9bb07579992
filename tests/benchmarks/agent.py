"""What an agent costs a training node, and how much disk an outage of the central store takes.

    python -m tests.benchmarks.agent        (four minutes)

Writes build/bench/agent.json, for vmagent and for Prometheus in agent mode, each with the shipped
settings and a scrape a second, on the page of a real exporter whose values move:

    series                 on the page
    buffer_bytes           of disk a sample, while the centre is away
    catch_up_seconds       from the centre's return until it has all samples
    cpu_ms                 of a processor a scrape
    rss_mib                in memory at the end of the outage
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import torch
from torch.nn import functional as F

from act_exporter import start_exporter
from deploy.demo.servers import Server
from deploy.demo.train import GPT
from tests.benchmarks.report import parser_of, setting, write
from tests.integration import node
from tests.integration.node import Centre, Page, listed

LAYERS = 12
TRAINED_STEPS = 250
"""By then windows and baselines have values, and nearly each series has a sample."""
OUTAGE_SCRAPES = 50
FIRST_SCRAPES = 10
"""Before the disk is looked at for the first time: agent mode writes names only once."""

_NUMBER = re.compile(r"^(act_\S+\{.*\}) (\S*\.\S*)$", re.MULTILINE)


def main() -> None:
    """Measure both, and write the file."""
    parser = parser_of(__doc__, "agent.json", "a fifth of the outage")
    arguments = parser.parse_args()
    scrapes = OUTAGE_SCRAPES // 5 if arguments.quick else OUTAGE_SCRAPES
    page = moving(exporters_page())
    result = setting(("torch", "prometheus-client"), load_average=os.getloadavg()[0])
    for name, start in {"vmagent": node.vmagent, "agent mode": node.agent_mode}.items():
        with tempfile.TemporaryDirectory() as folder:
            result[name] = measure(Path(folder), start, page, scrapes)
        print(name, result[name])
    write(result, arguments.out)


def exporters_page() -> str:
    """The page of one rank of a GPT, after some training."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = GPT(layers=LAYERS, width=16, heads=2, context=8)
    optimizer = torch.optim.AdamW(model.parameters())
    with start_exporter(model, 0, run=node.RUN, max_overhead=None) as exporter:
        for _ in range(TRAINED_STEPS):
            tokens = torch.randint(0, 256, (2, 8))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            exporter.record(loss=loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return requests.get(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30).text


def moving(text: str) -> Callable[[int], str]:
    """That page with other digits at each scrape, as training gives them."""
    draw = random.Random(1).gauss

    def render(_number: int) -> str:
        return _NUMBER.sub(
            lambda found: f"{found[1]} {float(found[2]) * (1 + draw(0, 0.01))!r}", text
        )

    return render


def measure(
    folder: Path,
    start: Callable[[Path, str, dict[str, int]], Server],
    render: Callable[[int], str],
    scrapes: int,
) -> dict[str, Any]:
    """One agent, with a centre that is away at first."""
    page, centre = Page(render), Centre(folder)
    agent = start(folder, centre.url, {})
    config = folder / ("scrape.yml" if agent.name == "vmagent" else "prometheus-agent.yml")
    config.write_text(config.read_text().replace("200ms", "1s"))
    series = sum(not line.startswith("#") for line in render(1).splitlines())
    with page.up(), listed(folder, page.port):
        try:
            agent.start()
            page.wait_for_more(FIRST_SCRAPES)
            disk, seconds = disk_bytes(folder), processor_seconds(agent)
            page.wait_for_more(scrapes)
            disk, seconds = disk_bytes(folder) - disk, processor_seconds(agent) - seconds
            memory = resident_mib(agent)
            backlog = page.count * series
            centre.start()
            begun = time.monotonic()
            agent.wait_for(lambda: rows(centre) >= backlog, "all samples at the centre", 120)
            late = time.monotonic() - begun
        finally:
            agent.stop()
            centre.server.stop()
    return {
        "series": series,
        "buffer_bytes": round(disk / (scrapes * series), 2),
        "catch_up_seconds": round(late, 1),
        "cpu_ms": round(1000 * seconds / scrapes, 1),
        "rss_mib": round(memory),
    }


def disk_bytes(folder: Path) -> int:
    """What lies in the agent's buffer."""
    return sum(path.stat().st_size for path in folder.glob("*-data/**/*") if path.is_file())


def processor_seconds(server: Server) -> float:
    """Of all processors since it was started."""
    assert server.process is not None
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(server: Server) -> float:
    """Its memory now."""
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def rows(centre: Centre) -> int:
    """How many samples it has taken."""
    text = requests.get(f"{centre.url}/metrics", timeout=5).text
    found = re.search(r'^vm_rows_inserted_total\{type="promremotewrite"\} (\d+)$', text, re.M)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
