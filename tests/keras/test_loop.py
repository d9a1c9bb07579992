"""The whole loop with a model of Keras: fault, shipped rules on a real Prometheus, rollback."""

import re
import sys
from pathlib import Path

import pytest

from alerting.control import ControlDirectory
from deploy.demo.servers import REPOSITORY, free_port, running
from deploy.demo.stack import stack

RUN = "keras-loop"
FAULT_STEP = 430
"""After step 300, by which all baselines have settled."""


@pytest.mark.timeout(500)
def test_a_fault_fires_the_shipped_rules_and_is_rolled_back(tmp_path: Path) -> None:
    port = free_port()
    chat = f"http://127.0.0.1:{free_port()}/"  # nobody's: whether people are told is not asked here
    with stack(tmp_path / "servers", exporter_port=port, chat_url=chat) as servers:
        train = [
            *(sys.executable, "-m", "deploy.demo.train_keras", f"--run={RUN}", f"--port={port}"),
            *(f"--log-dir={servers.runs}", "--steps=5000", "--save-every=100"),
            f"--fault-step={FAULT_STEP}",
        ]
        control = ControlDirectory(servers.runs / RUN / "control")
        with running("trainer", train, tmp_path, cwd=REPOSITORY) as trainer:
            firing = f'ALERTS{{alertname="ActRunaway", alertstate="firing", run="{RUN}"}}'
            trainer.wait_for(lambda: servers.query(firing), "ActRunaway", timeout=200)
            trainer.wait_for(
                lambda: control.status() is not None and control.status().generation == 1,
                "a rollback",
                timeout=60,
            )
            step = f'act_step{{run="{RUN}"}} and on (run) act_run_info{{generation="1"}}'
            trainer.wait_for(
                lambda: (servers.value(step) or 0) > FAULT_STEP, "the fault's step", timeout=120
            )
            assert servers.query(f'act_onset_step{{run="{RUN}"}}') == []  # absent in health
        log = trainer.log.read_text()
        assert re.search(r"step 43\d: (in|out)put of blocks\.1\.attn\S* went bad first", log)
        assert log.count(" fault: ") == 1
