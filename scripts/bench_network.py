"""What gradients and weights cost on a slow network, by method: bytes, and seconds on real sockets.

    python scripts/bench_network.py [--json FILE] [--plot FILE] [--nodes 2 4]
                                    [--rates 1gbit 100mbit] [--steps 5]

Nodes are network namespaces of this machine, one process and one thread on each, and a rate limit
by tc on what each of them sends; that takes root and iproute2. All methods train the same FP8 model
in turns, with weights gathered once a step.

- bytes/parameter: that a node sends in a step, counted by its network device, headers included;
  of the FP8 linears alone it is that without what embedding, head and norms send in these formats.
- wire: seconds of a step's collectives, each begun by all nodes together.
- quantise: CPU seconds of casts, scales, sums and, for BF16, conversions.
- step: seconds of a whole step, where bytes travel while backward goes on.

Ratios are to BF16 sent by the same all-to-all and all-gather. "FSDP2" is its own reduce-scatter in
BF16, which gloo sends as an all-reduce, so it is no yardstick.

Exit code: 0, 1 when E5M2 with FP8 weights misses a target (2.1·(N−1)/N bytes a parameter of the FP8
linears; 0.55 of BF16's wire time; at 100 Mbit/s 0.6 of wire and quantise together), 77 when this
machine permits no namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console
from rich.table import Table

from fp8train.data.dataset import prepare
from fp8train.environment import write_record
from scripts.namespaces import INTERFACE, NotPermitted, nodes
from scripts.network_node import BASELINE, OURS, configuration

NODE = ROOT / "scripts" / "network_node.py"
MOST_BYTES, MOST_WIRE, MOST_TOTAL = 2.1, 0.55, 0.6  # times (N − 1)/N; of BF16's seconds
SLOW = "100mbit"
SKIPPED = 77


def measure(count: int, rates: list[str], steps: int) -> list[dict[str, Any]]:
    """All rows of so many nodes."""
    with nodes(count) as made, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        words = [sys.executable, str(NODE), str(result), *rates, str(steps)]
        meeting = {
            "MASTER_ADDR": made.address(0),
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        children = [
            subprocess.Popen(
                made.command(node, *words),
                env=os.environ | meeting | {"RANK": str(node)},
            )
            for node in range(count)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"bench_network: nodes ended with exit codes {codes}")
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    add_ratios(rows)
    return rows


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """To BF16 at the same rate."""
    for rate in {row["bandwidth"] for row in rows}:
        some = [row for row in rows if row["bandwidth"] == rate]
        (base,) = [row for row in some if row["method"] == BASELINE]
        whole = base["wire_seconds"] + base["quantise_seconds"]
        for row in some:
            total = row["wire_seconds"] + row["quantise_seconds"]
            row["wire_ratio_to_bf16"] = row["wire_seconds"] / base["wire_seconds"]
            row["total_ratio_to_bf16"] = total / whole


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that E5M2 with FP8 weights misses."""
    found = []
    for row in rows:
        if row["method"] != OURS:
            continue
        where = f"{row['nodes']} nodes, {row['bandwidth']}"
        most = {
            "bytes_per_linear_parameter": MOST_BYTES * (row["nodes"] - 1) / row["nodes"],
            "wire_ratio_to_bf16": MOST_WIRE,
        }
        if row["bandwidth"] == SLOW:
            most["total_ratio_to_bf16"] = MOST_TOTAL
        for key, limit_ in most.items():
            if row[key] > limit_:
                found.append(f"{where}: {key} {row[key]:.3f}, at most {limit_:.3f}")
    return found


def bandwidth(text: str) -> str:
    """What --rates takes: bits a second as tc writes them."""
    if not re.fullmatch(r"[1-9][0-9]*[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"{text}: write 100mbit, 1gbit or the like")
    return text


def network(count: int, rate: str) -> str:
    """As people write it: 2 nodes, 1 Gbit/s."""
    for unit, name in (("gbit", "Gbit/s"), ("mbit", "Mbit/s")):
        rate = rate.replace(unit, f" {name}")
    return f"{count} nodes, {rate}"


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("bytes/parameter", "of linears", "wire s", "quantise s", "step s", "wire", "total")
    for count, rate in dict.fromkeys((row["nodes"], row["bandwidth"]) for row in rows):
        table = Table("method", *columns, title=f"{network(count, rate)}; ratios to BF16")
        for row in rows:
            if (row["nodes"], row["bandwidth"]) == (count, rate):
                table.add_row(
                    row["method"],
                    f"{row['bytes_per_parameter']:.2f}",
                    f"{row['bytes_per_linear_parameter']:.2f}",
                    *(f"{row[f'{key}_seconds']:.3f}" for key in ("wire", "quantise", "step")),
                    *(f"{row[f'{key}_ratio_to_bf16']:.2f}" for key in ("wire", "total")),
                )
        Console(width=120).print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Wire and quantisation by method, a panel for each network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    networks = list(dict.fromkeys((row["nodes"], row["bandwidth"]) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(networks), figsize=(3 * len(networks) + 2, 3.5), layout="constrained", squeeze=False
    )
    for axes, (count, rate) in zip(panels[0], networks, strict=True):
        some = [row for row in rows if (row["nodes"], row["bandwidth"]) == (count, rate)][::-1]
        names = [row["method"] for row in some]
        wire = [row["wire_seconds"] for row in some]
        axes.barh(names, wire, label="wire")
        casts = [row["quantise_seconds"] for row in some]
        axes.barh(names, casts, left=wire, label="quantise")
        most = max(map(sum, zip(wire, casts, strict=True)))
        axes.set(title=network(count, rate), xlabel="seconds a step", xlim=(0, 1.05 * most))
        axes.tick_params("y", labelleft=axes is panels[0][0])
    panels[0][-1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--plot", type=Path, help="also draw wire and quantise seconds")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[2, 4], choices=range(2, 17), metavar="N"
    )
    parser.add_argument("--rates", type=bandwidth, nargs="+", default=["1gbit", SLOW])
    parser.add_argument("--steps", type=int, default=5, help="of each method and rate")
    arguments = parser.parse_args()
    first = configuration(BASELINE, arguments.nodes[0])
    prepare(first.data, first.trainer.sequence_length)  # once, before nodes ask for it
    rows = []
    try:
        for count in arguments.nodes:
            rows += measure(count, arguments.rates, arguments.steps)
    except NotPermitted as reason:
        print(f"bench_network: skipped, it can't make network namespaces: {reason}")
        return SKIPPED
    show(rows)
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        config = {"steps": arguments.steps, "model": asdict(first.model)}
        write_record(arguments.json, "bench_network", config, rows)
    for target in missed(rows):
        print(f"bench_network: missed: {target}", file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
