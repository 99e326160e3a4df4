"""`python -m dcp_rs`: the command `dcp-rs`."""

from __future__ import annotations

import sys

from dcp_rs.cli import main

if __name__ == "__main__":
    sys.exit(main())
