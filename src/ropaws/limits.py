"""What a file may hold at most: files travel between people, and a small one can ask for all memory.

Each limit is far above what ordinary data needs. Whoever needs more sets the environment variable that the
message names; no file and no config can raise a limit.
"""

import os
from dataclasses import dataclass

MB = 1 << 20
GB = 1 << 30


@dataclass(frozen=True)
class Limit:
    """A number that can be raised by an environment variable."""

    variable: str
    default: int
    unit: str = "bytes"

    @property
    def value(self) -> int:
        """As the environment says, or the default.

        Raises:
            ValueError: The variable is not a whole number above 0.
        """
        text = os.environ.get(self.variable, "")
        if not text:
            return self.default
        if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) == 0:
            raise ValueError(f"{self.variable} must be a whole number of {self.unit}, got {text[:40]!r}")
        return int(text)

    def check(self, count: int, what: object, *, most: int | None = None) -> None:
        """Raise an error if there is more than the limit.

        Args:
            count: How much there is.
            what: What the message begins with, such as a path.
            most: Instead of the value, where a caller allows more or less.

        Raises:
            ValueError: There is more; the message says how to allow it.
        """
        most = self.value if most is None else most
        if count > most:
            raise ValueError(
                f"{what} has {count:,} {self.unit}, more than {most:,}; if you trust it, set {self.variable}"
            )


PIXELS = Limit("ROPAWS_MOST_PIXELS", 40_000_000, "pixels")  # of an image; of a JPEG three times as many
IMAGE_FILE = Limit("ROPAWS_MOST_IMAGE_BYTES", GB)
JSON_FILE = Limit("ROPAWS_MOST_JSON_BYTES", 256 * MB)
PARSED = Limit("ROPAWS_MOST_PARSED_BYTES", 800 * MB, "bytes in memory")  # of a JSON file or a table
TABLE_FILE = Limit("ROPAWS_MOST_TABLE_BYTES", 256 * MB)
TENSOR_FILE = Limit("ROPAWS_MOST_TENSOR_BYTES", 16 * GB)  # weights, checkpoints, embeddings
ARRAYS = Limit("ROPAWS_MOST_ARRAY_BYTES", 256 * MB, "bytes in memory")  # or ten times the size of the file
DATASET_FILE = Limit("ROPAWS_MOST_DATASET_BYTES", 4 * GB)  # an official file of a named dataset
