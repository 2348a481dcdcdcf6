"""Label a folder of JPEGs with an exported run: onnxruntime, Pillow and NumPy, neither torch nor ropaws.

ropaws export runs/mine --out model.onnx
python examples/label_folder.py model.onnx photos/pool

Expect a line for each image: path, label or out-of-class, confidence, in-domain probability,
nearest labeled image. They are those of `ropaws predict`, but for the precision that a run computes in.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
facts = {name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}
size = facts["preprocessing"]["size"]
for path in sorted(Path(sys.argv[2]).rglob("*.jp*g")):
    image = Image.open(path, formats=["JPEG"])  # whatever a file is called
    image.draft("RGB", (size, size))  # decodes large photographs at a fraction of their size
    image = ImageOps.exif_transpose(image)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side)).convert("RGB")
    pixels = np.asarray(square.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0))
    probs, in_domain, nearest, _ = session.run(None, {"images": pixels.transpose(2, 0, 1)[None].copy()})
    known = in_domain[0] >= facts["threshold"]
    label = f"{facts['class_names'][probs[0].argmax()]} {probs.max():.4f}" if known else "out-of-class -"
    print(path, label, f"{in_domain[0]:.4f}", facts["labeled_names"][nearest[0]])
