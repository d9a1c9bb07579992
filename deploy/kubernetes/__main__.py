"""Render the manifests for a cluster, from the plain files beside this folder.

python -m deploy.kubernetes, in the folder that `act-exporter assets` has written, after
prometheus/rules, alerting/alertmanager.yml and alerting/receiver.yml are as you want them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploy.kubernetes.alertmanager import ConversionError
from deploy.kubernetes.render import Cluster, render


def main() -> None:
    """Write the files, in place of those that were rendered before; others are left alone."""
    default = Cluster()
    parser = argparse.ArgumentParser(prog="python -m deploy.kubernetes", description=__doc__)
    parser.add_argument(
        "--namespace", default=default.namespace, help="of trainers and receiver (%(default)s)"
    )
    parser.add_argument(
        "--monitoring",
        default=default.monitoring,
        help="the namespace of Prometheus and Alertmanager (%(default)s)",
    )
    parser.add_argument("--image", default=default.image, help="the receiver's (%(default)s)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(__file__).parent / "manifests",
        help="the folder to write into (%(default)s)",
    )
    given = parser.parse_args()
    cluster = Cluster(namespace=given.namespace, monitoring=given.monitoring, image=given.image)
    try:
        texts = render(cluster)
        given.output.mkdir(parents=True, exist_ok=True)
        for name, text in sorted(texts.items()):
            (given.output / name).write_text(text)
    except (ConversionError, OSError) as error:
        sys.exit(f"deploy.kubernetes: {error}")
    print(f"{len(texts)} files in {given.output}")


if __name__ == "__main__":
    main()
