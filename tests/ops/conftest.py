"""Puts this folder's own modules on the path, and keeps torch's threads at what the machine has."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
