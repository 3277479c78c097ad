"""Triton kernels under the interpreter, against kernels/reference: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`.

The interpreter takes the place of the compiler for a whole process, so these tests have one of their own; in any other
process this folder is empty.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
