"""Near duplicates and nearest neighbors of many rows: seconds of CPU against all pairs, and what is found.

python benchmarks/near_duplicates.py [--sizes ROWS ...] [--without-neighbors]

It writes results/near_duplicates.json.

The rows are those of explore_refit.py (generated features of 256 dimensions: ten classes and as many
others), of which one in twenty is a near copy of another. "all pairs" is a product of all rows with all
others in blocks, which is left out above MOST_PAIRS rows. Near duplicates are found exactly up to 100,000
rows, above that by an index; recall is of SAMPLE rows, which are compared with all. For nearest neighbors the
index is asked for ten of each row, and its recall is measured on 200 rows. One thread.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from explore_refit import generated
from timing import read_results, write_results

from ropaws.insight import neighbors

MOST_PAIRS = 30_000
BLOCK, COPIES, NOISE, SAMPLE = 1024, 20, 0.005, 2000


def rows(count: int) -> torch.Tensor:
    """One row in COPIES is another one with a little noise."""
    points = generated(count)[0]
    random = torch.Generator().manual_seed(1)
    copies = torch.randperm(count, generator=random)[: count // COPIES]
    sources = torch.randint(count, (len(copies),), generator=random)
    points[copies] = points[sources] + NOISE * torch.randn(len(copies), points.shape[1], generator=random)
    return points


def all_pairs(points: torch.Tensor) -> torch.Tensor:
    """Whether each row has a near duplicate.   ->  (n,) bool"""
    unit = F.normalize(points, dim=1)
    found = torch.zeros(len(unit), dtype=torch.bool)
    for start in range(0, len(unit), BLOCK):
        near = (unit[start : start + BLOCK] @ unit.T >= neighbors.ALIKE).sum(dim=1)
        found[start : start + BLOCK] = near > 1  # each is alike itself
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = work()
    return round(time.process_time() - began, 1), found


def recall(points: torch.Tensor, groups: Any) -> float:
    """Of a sample of rows: the share of those with near duplicates that are in a group."""
    unit = F.normalize(points, dim=1)
    some = torch.randperm(len(points), generator=torch.Generator().manual_seed(2))[:SAMPLE]
    alike = [(unit[part] @ unit.T >= neighbors.ALIKE).sum(dim=1) > 1 for part in some.split(BLOCK // 8)]
    # A row that has near duplicates is in a group, unless these have all joined other groups.
    return round(float((groups[some[torch.cat(alike)].numpy()] >= 0).mean()), 4)


def measured(count: int, with_neighbors: bool) -> dict[str, Any]:
    points = rows(count)
    seconds, groups = timed(lambda: neighbors.near_duplicates(points))
    found = {"near_duplicates": seconds, "in_groups": int((groups >= 0).sum())}
    found["recall"] = recall(points, groups)
    if count <= MOST_PAIRS:
        found["all_pairs"], _ = timed(lambda: all_pairs(points))
    if with_neighbors:
        exact, neighbors.EXACT = neighbors.EXACT, min(neighbors.EXACT, count - 1)
        found["index"], nearest = timed(lambda: neighbors.other_neighbors(points, 10))
        found["index_recall"] = round(nearest.recall, 4)
        neighbors.EXACT = exact
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[20_000, 100_000, 1_000_000], metavar="ROWS")
    parser.add_argument("--without-neighbors", action="store_true", help="near duplicates alone")
    torch.set_num_threads(1)
    options = parser.parse_args()
    for count in options.sizes:
        found = read_results("near_duplicates").get("rows", {})
        now = measured(count, not options.without_neighbors)
        write_results("near_duplicates", {"rows": found | {str(count): found.get(str(count), {}) | now}})


if __name__ == "__main__":
    main()
