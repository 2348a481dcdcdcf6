"""Named datasets: their official files, mixes of them, and the embedded one."""
