"""Images per second of `ropaws embed` against a plain timm loop and onnxruntime; and what int8 would cost.

python benchmarks/embed_speed.py --init dinov2-small.safetensors --data FOLDER --work FOLDER [--int8]

The same weights, view and images: solar cells of feature_collections.py (files of 300 px), each way from
files to features, without the start of the program. The plain ways are a DataLoader with as many workers as
there are cores, timm's own transform at this size and the network in float32, or in bf16 where this CPU has
it; onnxruntime gets the same batches. In turns, medians; seconds of the CPU, workers included, hold on a
busy machine. --int8: dynamic quantization of all linear layers by onnxruntime, its time per view and the
accuracy of logistic regression with 10 labels per class (CIFAR-10 below --data). Writes
results/embed_speed.json.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_collections import SOURCES
from PIL import Image
from sklearn.linear_model import LogisticRegression
from timing import median_ratio, write_results
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ropaws
from ropaws.core.cores import own_cores
from ropaws.core.hardware import fast_at_bf16
from ropaws.core.terminal import Terminal
from ropaws.embedding.backbones import ModelConfig, build_encoder, load_init
from ropaws.embedding.pretrained import NETWORKS, timm_name, weights_input
from ropaws.embedding.timm_backbone import import_timm
from ropaws.pool.augment import center_view

BATCH = 32  # of the plain ways; larger ones were not faster
QUIET = Terminal(quiet=True)
DRAWS, LABELS = 20, 10
INT8, WORTH = "onnxruntime int8", 1.5  # times as fast as the best other way, for its accuracy to matter


class Files(Dataset[Tensor]):
    """Image files through timm's transform."""

    def __init__(self, files: list[Path], transform: Callable[[Image.Image], Tensor]) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(Image.open(self.files[index]).convert("RGB"))


def network(backbone: str, init: Path) -> nn.Module:
    config = ModelConfig(backbone=backbone, init=init, frozen=True)
    encoder = build_encoder(config, channels=3)
    load_init(encoder, config, channels=3)
    return encoder.backbone.eval()


def onnx_session(net: nn.Module, size: int, path: Path, int8: bool = False) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    if not path.exists():
        batch = {0: torch.export.Dim("batch")}
        example = (torch.zeros(2, 3, size, size),)
        torch.onnx.export(net, example, path, dynamo=True, dynamic_shapes=(batch,), verbose=False)
    if int8:
        from onnxruntime.quantization import quantize_dynamic

        quantized = path.with_suffix(".int8.onnx")
        if not quantized.exists():
            quantize_dynamic(path, quantized, op_types_to_quantize=["MatMul", "Gemm"])
        path = quantized
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda views: torch.from_numpy(session.run(None, {name: views.numpy()})[0])


def in_half(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def look(views: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(views).float()

    return look


def plain(
    look: Callable[[Tensor], Tensor], files: list[Path], backbone: str, size: int
) -> Callable[[], object]:
    expected = weights_input(backbone)
    assert expected is not None
    import_timm()
    from timm.data import create_transform

    transform = create_transform(
        (3, size, size), interpolation=expected.interpolation, crop_pct=1.0,
        mean=expected.normalize.mean, std=expected.normalize.std,
    )  # fmt: skip

    def way() -> object:
        loader = DataLoader(Files(files, transform), batch_size=BATCH, num_workers=own_cores())
        with torch.inference_mode():
            return torch.cat([look(views) for views in loader])

    return way


def ours(files: list[Path], backbone: str, init: Path, size: int) -> Callable[[], object]:
    pool = ropaws.Pool.open(files)
    embedding = ropaws.Embedder(backbone, init=init, size=size, console=QUIET).embedding(pool)

    def way() -> object:  # the network is there before, as it is for the others; the cache is empty
        with tempfile.TemporaryDirectory() as folder:
            return ropaws.Embedder(embedding, cache=folder, console=QUIET).embed(pool).features

    return way


def in_turns(ways: dict[str, Callable[[], object]], turns: int) -> tuple[dict[str, list[float]], ...]:
    """Seconds by the clock and of the CPU, workers included; the first turn is for warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            began, before = time.perf_counter(), os.times()
            way()
            after = os.times()
            if turn:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(sum(after[:4]) - sum(before[:4]))
        print({name: [round(s, 1) for s in values] for name, values in cpu.items()}, flush=True)
    return seconds, cpu


def int8_worth(
    net: nn.Module, size: int, data: Path, work: Path, backbone: str, turns: int
) -> dict[str, Any]:
    """Time per view of int8 against float32 and bf16, and its accuracy if it is fast enough to matter."""
    with np.load(data / "cifar10.npz") as arrays:
        images, labels = arrays["test_images"][:600], arrays["test_labels"][:600]
    expected = weights_input(backbone)
    assert expected is not None
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    views = center_view(pixels, size, expected.normalize, expected.interpolation)
    looks = {
        "float32": net,
        "bf16": in_half(net),
        "onnxruntime float32": onnx_session(net, size, work / f"{backbone}-{size}.onnx"),
        INT8: onnx_session(net, size, work / f"{backbone}-{size}.onnx", int8=True),
    }
    if not fast_at_bf16(torch.device("cpu")):
        del looks["bf16"]
    part = views[:BATCH]
    with torch.inference_mode():
        _, cpu = in_turns({name: lambda look=look: look(part) for name, look in looks.items()}, turns)
        plainly = min(statistics.median(cpu[name]) for name in looks if name != INT8)
        ratio = plainly / statistics.median(cpu[INT8])
        found: dict[str, Any] = {"times_as_fast_as_the_best": round(ratio, 2)}
        for name, look in looks.items():
            found[name] = {"ms_per_view": round(1000 * statistics.median(cpu[name]) / BATCH, 1)}
            if ratio >= WORTH:
                features = torch.cat([look(p) for p in views.split(BATCH)]).numpy()
                unit = features / np.linalg.norm(features, axis=1, keepdims=True)
                unit = unit - unit.mean(axis=0)
                right = statistics.fmean(_accuracy(unit, labels, seed) for seed in range(DRAWS))
                found[name]["accuracy"] = round(right, 2)
    return found


def _accuracy(rows: np.ndarray, labels: np.ndarray, seed: int) -> float:
    random = np.random.default_rng(seed)
    known = np.concatenate([random.permutation(np.flatnonzero(labels == c))[:LABELS] for c in range(10)])
    rest = np.setdiff1d(np.arange(len(rows)), known)
    model = LogisticRegression(C=10, max_iter=1000).fit(rows[known], labels[known])
    return 100 * float(model.score(rows[rest], labels[rest]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", choices=NETWORKS, default="dinov2-small")
    parser.add_argument("--init", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/embed_speed"))
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    backbone, size = options.backbone, NETWORKS[options.backbone].cpu_size
    assert timm_name(backbone) is not None
    net = network(backbone, options.init)
    if options.int8:
        worth = int8_worth(net, size, options.data, options.work, backbone, options.turns)
        write_results("embed_speed", {f"int8 of {backbone}": worth})
        return
    files = SOURCES["solar"](None, options.work).images[: options.images]
    ways = {
        "ropaws embed": ours(files, backbone, options.init, size),
        "timm, float32": plain(net, files, backbone, size),
        "timm, bf16": plain(in_half(net), files, backbone, size),
        "onnxruntime": plain(
            onnx_session(net, size, options.work / f"{backbone}-{size}.onnx"), files, backbone, size
        ),
    }
    if not fast_at_bf16(torch.device("cpu")):
        del ways["timm, bf16"]
    seconds, cpu = in_turns(ways, options.turns)
    mine = "ropaws embed"
    write_results(
        "embed_speed",
        {
            backbone: {
                "images": len(files),
                "size": size,
                "turns": options.turns,
                "images_per_cpu_second": {
                    n: round(len(files) / statistics.median(v), 2) for n, v in cpu.items()
                },
                "ours_times_as_fast": {
                    n: round(median_ratio(v, seconds[mine]), 2) for n, v in seconds.items() if n != mine
                },
                "ours_times_as_fast_by_cpu": {
                    n: round(median_ratio(v, cpu[mine]), 2) for n, v in cpu.items() if n != mine
                },
            }
        },
    )


if __name__ == "__main__":
    main()
