"""Python imports this at start because the folder is on PYTHONPATH: make absent GPU packages importable."""

import absent_packages

absent_packages.install()
