"""Draw a run's telemetry, finished or still going: layers over steps.

python scripts/heatmap.py outputs/NAME [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fp8train.analysis.heatmap import PICTURE, plot_samples, read_samples
from fp8train.config import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, help=f"default RUN/{PICTURE}")
    arguments = parser.parse_args()
    try:
        samples = read_samples(arguments.run)
        if samples is None:
            raise ConfigError(
                f"{arguments.run} holds no telemetry: train with precision.telemetry.every=50, on "
                f"a backend other than transformer_engine, under a precision that quantises"
            )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    path = arguments.out or arguments.run / PICTURE
    plot_samples(samples, path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
