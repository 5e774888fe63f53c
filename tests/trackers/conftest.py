"""What needs a tracker's package is collected where the packages are: `make test-trackers`."""

import os
import tempfile
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("wandb") and find_spec("tensorboard") else ["test_*.py"]
if not collect_ignore_glob:
    # trackio asks for its directory when it is imported; processes that a test starts have the same one.
    _DIRECTORY = tempfile.TemporaryDirectory(prefix="trackio-")
    os.environ["TRACKIO_DIR"] = _DIRECTORY.name
