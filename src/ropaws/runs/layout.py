"""What a run folder looks like: the names of its files, and settings that do not change its result.

This module imports nothing, so that reports can share it without loading torch.
"""

# Written by training
CONFIG = "config.json"  # all settings
DATA = "data.json"  # classes, label split, normalization
SPLIT = "split.txt"  # indices of the labeled images, for --data.split of another run
ENVIRONMENT = "environment.json"  # versions, device, precision, the reasons for chosen settings
METRICS = "metrics.jsonl"  # one line of numbers per step
UNREADABLE = "unreadable.txt"  # image files that were left out, and why
CHECKPOINT = "checkpoint.pt"
PREVIOUS_CHECKPOINT = "checkpoint.previous.pt"
MODEL = "model.safetensors"
SUPPORT = "support.safetensors"  # embeddings of the labeled images
SNAPSHOTS = "snapshots"  # weights of earlier steps, see train.keep_every
INPUTS = "inputs"  # arrays that train_on was given

# Written by analyses
EMBEDDINGS = "embeddings.safetensors"  # what the method says of the pool and of the test images
EVALUATION = "evaluation.json"
GALLERY = "gallery.json"  # thumbnails and what they show
FORMER_GALLERY = "pictures.json"  # as 0.1.0 called it
REPORT = "report.html"
ONNX = "model.onnx"  # what `ropaws export` writes, if no other place is named
PT2 = "model.pt2"
CARD = "README.md"
SUPERVISED = "supervised"  # a run of the supervised baseline
FINETUNED = "finetuned"  # a run of the fine-tuned network
FINETUNE_RESULTS = "finetune.json"
FROZEN = "frozen"  # the run with a frozen backbone that a run of the whole network started from
LINEAR = "linear"  # a run of the linear probe
LINEAR_RESULTS = "linear.json"

# Settings that say where and how fast a run computes, not what: a run may be resumed with others, and runs
# that differ in these alone are repetitions of one another.
WITHOUT_EFFECT = frozenset((
    "train.device", "train.precision", "train.checkpoint_every", "train.keep_every", "train.compile",
    "train.log", "train.threads",
    "data.workers", "data.cache", "data.cache_gb", "data.memory_gb", "data.download", "data.root",
    "data.feature_cache",
))  # fmt: skip

# Settings that 0.1.0 called by another name (section, former, current), and those that it did not have.
FORMER_SETTINGS = (("data", "picture_size", "image_size"), ("augment", "grey", "grayscale"))
LATER_SETTINGS = {
    "optim.name": "lars", "optim.schedule": "cosine", "support.images_per_step": None,
    "model.init_projection": False, "model.frozen": False, "model.frozen_views": 4, "model.head": "mlp",
    "augment.interpolation": "bilinear", "data.crop": "center",
}  # fmt: skip
# Settings of `data` that every run has written: a config with all of them and no data.crop is a former one.
DATA_SETTINGS = frozenset((
    "source", "labeled", "unlabeled", "test", "root", "download", "extra", "labels_per_class",
    "label_fraction", "split", "memory_gb", "cache", "cache_gb", "workers",
))  # fmt: skip
