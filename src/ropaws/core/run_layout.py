"""What a run folder looks like: the names of its files, and settings that do not change its result.

This module imports nothing, so that reports can share it without loading torch.
"""

FORMAT = 2  # of run folders, in config.json: a folder of another format is refused

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
REPORT = "report.html"
NEW_CLASSES = "new-classes"  # groups of likely new classes, and labels made of them
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

# Settings that say where images and weights are.
PLACES = frozenset((
    "data.source", "data.labeled", "data.unlabeled", "data.out_of_class", "data.test", "data.extra",
    "data.split", "model.init",
))  # fmt: skip
