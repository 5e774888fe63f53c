"""What needs a tracker's package is collected where the packages are: `make test-trackers`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("wandb") and find_spec("tensorboard") else ["test_*.py"]
