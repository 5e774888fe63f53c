"""An error of one rank alone, while ranks meet, build or train, ends all of them within a stated time.

The ranks are processes. What goes wrong on one is put into it when a module is imported. torch alone would end none of
them within the limit of a test, so that limit is the only clock here.
"""

import os
import socket
import subprocess
import sys

import pytest

from heterorl.learner.learner_config import LearnerConfig
from tests.support.limits import PATIENCE
from tests.support.patched import patched_path
from tests.support.ports import free_port
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

pytestmark = pytest.mark.slow
TIMEOUT_S = 4.0 * PATIENCE

FAIL = """
def fail(*_, **__):
    from heterorl.common.errors import CorruptStore
    raise CorruptStore("a file is lost here alone")

def stand_still(*_, **__):
    import os, signal
    os.kill(os.getpid(), signal.SIGSTOP)
"""
FAIL_ONCE = """
def fail_once(call):
    has_failed = []
    def either(*arguments, **options):
        if has_failed:
            return call(*arguments, **options)
        has_failed.append(1)
        raise MemoryError("no room here alone")
    return either
"""
READ = "module._fill = fail"
STEP = "module.ShardedBackend._train = fail"
HANG = "module.ShardedBackend._train = stand_still"
SHARDED = "heterorl.learner.backends.ranks.sharded_backend"


@pytest.mark.parametrize(
    ("module", "change"),
    [("heterorl.learner.backends.fsdp2", READ), (SHARDED, STEP), (SHARDED, HANG)],
    ids=["build", "step", "hang"],
)
def test_error_or_hang_of_one_rank_alone_ends_the_others_within_the_stated_time(tmp_path, module, change):
    tiny_model().save_pretrained(tmp_path / "model")
    path = patched_path(tmp_path / "path", module, f"if '--rank' in sys.argv: {change}", FAIL)
    config = LearnerConfig.model_validate(
        {
            "model_dir": str(tmp_path / "model"),
            "sampling": {"max_new_tokens": 16},
            "backend": {"kind": "fsdp2", "threads": 1, "micro_batch_tokens": 64},
        }
    )
    ranks = Ranks(2, first_on_path=path, timeout_s=TIMEOUT_S)

    with pytest.raises(AssertionError, match="ended with code 1"):
        ranks.ask(config, [["touch", str(tmp_path / "built")], ["train", 0]])

    assert ranks.close() == 1
    assert (tmp_path / "built").exists() is (change != READ)


@pytest.mark.parametrize("is_alone", [False, True], ids=["all", "rank-1"])
def test_step_that_cannot_begin_is_rank_0s_error_and_leaves_all_ranks_there(tmp_path, is_alone):
    """A publication under way then takes the time that it needs, whatever a rank waits for one that has left."""
    tiny_model().save_pretrained(tmp_path / "model")
    change = f"if {is_alone} and '--rank' in sys.argv: module.build_batch = fail_once(module.build_batch)"
    path = patched_path(tmp_path / "path", SHARDED, change, FAIL_ONCE)
    config = LearnerConfig.model_validate(
        {
            "model_dir": str(tmp_path / "model"),
            "sampling": {"max_new_tokens": 16},
            "loss": {"kind": "bnpo"},
            "backend": {"kind": "fsdp2", "threads": 1, "micro_batch_tokens": 64},
        }
    )
    # No rank is silent here, however slow the machine.
    ranks = Ranks(2, first_on_path=path, timeout_s=15 * TIMEOUT_S)

    first, then = ranks.ask(config, [["train_rewarded", 0, 0.5 if is_alone else 5.0], ["train_rewarded", 1, 0.5]])

    assert first["error"] == ("RanksDiffer" if is_alone else "ConfigError")
    assert ("rank 1 has met" if is_alone else "beta needs rewards in [0, 1]") in first["message"]
    assert then["num_groups"] == 5
    assert ranks.close() == 0


# Rank 1 stands still in the midst of making the groups, or after it has met the others.
JOINING = """
import os, signal, sys, time
import torch.distributed as dist
from heterorl.common.process import logs
from heterorl.learner.backends.ranks.rank_group import RankGroup
from heterorl.learner.backends.ranks.rank_env import rank_env_of
from heterorl.learner.learner_config import LearnerConfig

logs.configure(level="WARNING")
rank_env = rank_env_of(os.environ)
def stand_still(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)
if rank_env.rank and sys.argv[1] == "groups":
    dist.new_group = stand_still
rank_group = RankGroup(rank_env, timeout_s=float(sys.argv[2]))
print("met", flush=True)
if rank_env.rank and sys.argv[1] == "met":
    stand_still()
backend = {"kind": "fsdp2", "threads": 1}
rank_group.join(LearnerConfig.model_validate({"model_dir": "none", "backend": backend}))
"""


@pytest.mark.parametrize("where", ["met", "groups"])
def test_rank_that_stands_still_while_ranks_join_ends_all_of_them_within_the_stated_time(where):
    port = free_port()
    environment = os.environ | {
        "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOINING, where, str(TIMEOUT_S)],
            env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [process.stdout.readline() for process in processes] == ["met\n", "met\n"]

        (_, log), _ = (process.communicate() for process in processes)

        assert [process.returncode for process in processes] == [1, -9]
        assert f"no sign of life from rank 1 for {TIMEOUT_S:g} s" in log
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


# Nothing of torch's ends this in less than five minutes, and it holds the thread that it is in.
MEETING = """
import sys
from heterorl.common.process import logs
from heterorl.learner.backends.ranks import rank_group
from heterorl.learner.backends.ranks.rank_env import RankEnv

logs.configure(level="WARNING")
rank_group.MEETING_S = 0.5
rank_env = RankEnv(rank=1, local_rank=0, world_size=2, local_world_size=1, host="127.0.0.1", port=int(sys.argv[1]))
rank_group.RankGroup(rank_env)
"""


def test_rank_whose_store_does_not_answer_ends_within_the_stated_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-c", MEETING, str(silent.getsockname()[1])]

        ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 1
    assert "rank 1 has not met the others in 0.5 s" in ended.stderr
