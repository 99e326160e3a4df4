"""What holds for all tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from canary import pytest_configure  # noqa: F401 - pytest looks for it here
