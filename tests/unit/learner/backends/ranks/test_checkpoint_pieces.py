"""Ranks write one checkpoint together: the files of one process, also where ranks cannot see rank 0's directory."""

import errno
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heterorl.common.errors import CorruptStore, HeterorlError
from heterorl.learner.backends.ranks import checkpoint_reader, checkpoint_writer
from heterorl.learner.backends.ranks.checkpoint_reader import open_together, read_checkpoint_files
from heterorl.learner.backends.ranks.checkpoint_writer import Writing
from heterorl.learner.backends.ranks.sharded_state import Piece, Pieces, ShardedState
from tests.support.thread_ranks import on_all_ranks

SHAPES = {"a": (5, 3), "b": (7,), "c": ()}
FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


class _State(ShardedState):
    def __init__(self, ranks, *, steps=3):
        self.shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
        self._steps = steps
        self._whole = {
            (key, name): torch.randn(shape, generator=torch.Generator().manual_seed(len(key) + ord(name)))
            for key in ("", "exp_avg", "exp_avg_sq")
            for name, shape in self.shapes.items()
        }
        own = {}
        for name, shape in self.shapes.items():
            cuts = np.linspace(0, shape.numel(), ranks.world_size + 1).astype(int).tolist()
            own[name] = Piece(start=cuts[ranks.rank], size=cuts[ranks.rank + 1] - cuts[ranks.rank])
        self.pieces = Pieces(own, shapes=self.shapes, ranks=ranks)

    def read(self, name, key, *, start, size):
        begin = self.pieces.own[name].start + start
        return self._whole[key, name].reshape(-1)[begin : begin + size]

    def put(self, name, key, whole):
        raise NotImplementedError

    def reset(self, *, steps):
        raise NotImplementedError

    def steps(self):
        return self._steps


def _write(directories, *, world_size, one_machine=True, steps=3, is_beside=False):
    """Each rank into the directory that it takes for the checkpoint's."""

    def work(ranks):
        ranks.are_on_one_machine = one_machine
        state = _State(ranks, steps=steps)
        if not is_beside:
            Writing(directories[ranks.rank], state, ranks, applied_steps=5, overlaps=False).wait()
            return
        writing = Writing(directories[ranks.rank], state, ranks, applied_steps=5)
        # What a step does meanwhile.
        for values in state._whole.values():
            values.fill_(9.0)
        if ranks.rank == 0:
            # The state of random numbers is one for all threads, and rank 0 has copied it.
            torch.rand(3)
        writing.wait()

    return on_all_ranks(world_size, work)


@pytest.fixture
def alone(tmp_path):
    directory = tmp_path / "alone"
    directory.mkdir()
    assert _write([directory], world_size=1) == [None]
    return directory


@pytest.fixture(autouse=True)
def random_state():
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_files_are_those_of_one_process(alone, tmp_path, monkeypatch, one_machine, is_shared, is_beside):
    monkeypatch.setattr(checkpoint_writer, "BLOCK_ELEMENTS", 2)
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    directories = [shared, shared, shared if is_shared else elsewhere]

    assert _write(directories, world_size=3, one_machine=one_machine, is_beside=is_beside) == [None] * 3

    assert sorted(path.name for path in shared.iterdir()) == sorted(FILES)
    assert all((shared / name).read_bytes() == (alone / name).read_bytes() for name in FILES)
    assert set(load_file(shared / FILES[1])) == {
        "random/cpu", *(f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step") for name in SHAPES)
    }  # fmt: skip
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    assert read_checkpoint_files(shared, shapes).applied_steps == 5


@pytest.mark.parametrize("others", ["the same", "nothing", "another run's"])
def test_checkpoint_comes_back_on_ranks_that_do_not_see_it(alone, tmp_path, others):
    """Another machine may have nothing under that name, or what an earlier run left there."""
    elsewhere = alone if others == "the same" else tmp_path / "elsewhere"
    if others == "another run's":
        elsewhere.mkdir()
        _write([elsewhere], world_size=1, steps=0)

    def work(ranks):
        state = _State(ranks)
        files = open_together(elsewhere if ranks.rank else alone, state.shapes, ranks)
        found = {}
        state.put = lambda name, key, whole: found.update({(name, key): whole.clone()})
        state.reset = lambda *, steps: found.update(steps=steps)
        return files.restore(state, ranks), found, state._whole

    for applied_steps, found, whole in on_all_ranks(3, work):
        assert applied_steps == 5
        assert found.pop("steps") == 3
        assert found.keys() == {(name, key) for key, name in whole}
        assert all(found[name, key].equal(whole[key, name].reshape(-1)) for name, key in found)


def test_checkpoint_that_rank_0_cannot_read_is_refused_on_all(alone, tmp_path):
    def work(ranks):
        return open_together(alone if ranks.rank else tmp_path, _State(ranks).shapes, ranks)

    assert [type(answer) for answer in on_all_ranks(2, work)] == [CorruptStore, CorruptStore]


@pytest.mark.parametrize("others", ["the same", "nothing"])
@pytest.mark.parametrize("bad", [0, 1])
def test_read_that_fails_on_one_rank_fails_on_all_and_none_waits(alone, tmp_path, others, bad):
    def fail(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    def rank_0s_file(files):
        return getattr(files.moments, "_own", None)

    def work(ranks):
        state = _State(ranks)
        files = open_together(tmp_path if ranks.rank and others == "nothing" else alone, state.shapes, ranks)
        is_bad = ranks.rank == bad
        state.reset = lambda *, steps: None
        state.put = lambda name, key, whole: fail() if is_bad and (name, key) == ("b", "exp_avg") else None
        if is_bad and rank_0s_file(files) is not None:
            own = rank_0s_file(files).flat
            rank_0s_file(files).flat = lambda name: fail() if name == "exp_avg/a" else own(name)
        files.restore(state, ranks)

    answers = on_all_ranks(2, work)

    assert [type(answer) for answer in answers] == [CorruptStore, CorruptStore]
    assert "Stale file handle" in str(answers[bad])


def test_tensor_that_rank_0_cannot_read_is_put_nowhere(alone, tmp_path):
    def work(ranks):
        state, put = _State(ranks), set()
        files = open_together(tmp_path if ranks.rank else alone, state.shapes, ranks)
        state.reset = lambda *, steps: None
        state.put = lambda name, key, whole: put.add((name, key))
        if not ranks.rank:
            own = files.moments._own.flat
            files.moments._own.flat = lambda name: {}["disk"] if name == "exp_avg_sq/a" else own(name)
        with pytest.raises(CorruptStore, match="rank 0 cannot read exp_avg_sq/a"):
            files.restore(state, ranks)
        return put

    whole = {(name, key) for name in SHAPES for key in ("", "exp_avg", "exp_avg_sq")}
    assert on_all_ranks(2, work) == [whole - {("a", "exp_avg_sq")}] * 2


@pytest.mark.parametrize("what", ["memory", "broadcast"])
def test_rank_that_cannot_receive_a_tensor_ends_and_by_that_the_others(alone, tmp_path, monkeypatch, what):
    """It has left a broadcast that the others are in: what it went into next would be taken for that one."""
    here = threading.local()

    def fail(*_, **__):
        raise RuntimeError("can't allocate memory")

    class Torch:
        def __getattr__(self, name):
            return fail if name == "zeros" and here.is_full else getattr(torch, name)

    monkeypatch.setattr(checkpoint_reader, "torch", Torch())

    def work(ranks):
        here.is_full = False
        state = _State(ranks)
        files = open_together(tmp_path if ranks.rank else alone, state.shapes, ranks)
        state.reset = lambda *, steps: None
        state.put = lambda *_: None
        here.is_full = ranks.rank == 1 and what == "memory"
        if ranks.rank == 1 and what == "broadcast":
            ranks.broadcast = fail
        files.restore(state, ranks)

    first, second = on_all_ranks(2, work)

    assert (type(first), str(first)) == (RuntimeError, "Connection closed by peer")
    assert (type(second), str(second)) == (RuntimeError, "can't allocate memory")


def test_state_before_the_first_step_has_no_moments(tmp_path):
    assert _write([tmp_path] * 2, world_size=2, steps=0) == [None, None]

    assert set(load_file(tmp_path / FILES[1])) == {"random/cpu"}


@pytest.mark.parametrize("is_beside", [True, False])
def test_checkpoint_that_rank_0_reads_otherwise_than_it_was_written_is_none(tmp_path, monkeypatch, is_beside):
    own = checkpoint_writer.CheckpointLayout.digest
    monkeypatch.setattr(
        checkpoint_writer.CheckpointLayout,
        "digest",
        lambda self, state, rank: b"torn" if rank == 1 else own(self, state, rank),
    )

    first, second = _write([tmp_path] * 2, world_size=2, one_machine=False, is_beside=is_beside)

    assert isinstance(first, OSError)
    assert "other bytes than rank 1 wrote" in str(first)
    assert second is None


def test_full_disk_of_one_rank_is_rank_0s_error_and_none_waits(tmp_path, monkeypatch):
    def work(ranks):
        state = _State(ranks)
        if ranks.rank == 1:
            monkeypatch.setattr(state, "read", _full)
        writing = Writing(tmp_path, state, ranks, applied_steps=5, overlaps=False)
        (writing.end if ranks.rank else writing.wait)()

    first, second = on_all_ranks(2, work)

    assert isinstance(first, OSError)
    assert first.errno == errno.ENOSPC
    assert second is None


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("full", [0, 1])
def test_disk_that_fills_up_beside_a_step_is_rank_0s_error_and_the_next_checkpoint_is_written(
    alone, tmp_path, monkeypatch, full, one_machine
):
    later = tmp_path / "later"
    later.mkdir()
    own = checkpoint_writer.write_runs

    def write_runs(directory, runs, **options):
        # Found by the directory that rank is given, because both are threads of this process.
        return _full() if directory.name == f"full-{full}" else own(directory, runs, **options)

    monkeypatch.setattr(checkpoint_writer, "write_runs", write_runs)

    def work(ranks):
        ranks.are_on_one_machine = one_machine
        state = _State(ranks)
        place = tmp_path / f"full-{ranks.rank}"
        place.symlink_to(tmp_path)
        first = Writing(place, state, ranks, applied_steps=5)
        try:
            first.wait()
            problem = None
        except OSError as error:
            problem = error
        first.end()
        second = Writing(later, state, ranks, applied_steps=5)
        second.wait()
        return problem

    first, second = on_all_ranks(2, work)

    assert first.errno == errno.ENOSPC
    assert (second is None) is (full == 0)
    assert all((later / name).read_bytes() == (alone / name).read_bytes() for name in FILES)


@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyError("exp_avg"), SystemExit(3)])
def test_any_error_of_a_checkpoint_thread_keeps_the_checkpoint_from_its_name_and_none_waits(
    alone, tmp_path, monkeypatch, error, broken, one_machine
):
    own = checkpoint_writer.write_runs

    def write_runs(directory, runs, **options):
        if directory.name == f"broken-{broken}":
            raise error
        return own(directory, runs, **options)

    monkeypatch.setattr(checkpoint_writer, "write_runs", write_runs)

    def work(ranks):
        ranks.are_on_one_machine = one_machine
        place = tmp_path / f"broken-{ranks.rank}"
        place.symlink_to(tmp_path)
        writing = Writing(place, _State(ranks), ranks, applied_steps=5)
        try:
            writing.wait()
        except BaseException as found:  # noqa: BLE001 - looked at below
            return found
        return None

    first, second = on_all_ranks(2, work)

    assert first is error if broken == 0 else isinstance(first, HeterorlError)
    assert second is (error if broken else None)


def test_error_of_one_rank_that_is_no_disks_is_an_error_of_all(tmp_path, monkeypatch):
    def work(ranks):
        state = _State(ranks)
        if ranks.rank == 1:
            monkeypatch.setattr(state, "read", lambda *_, **__: {}["exp_avg"])
        Writing(tmp_path, state, ranks, applied_steps=5, overlaps=False).wait()

    assert [type(answer) for answer in on_all_ranks(2, work)] == [HeterorlError, KeyError]


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("place", [0, 1])
def test_rank_that_leaves_the_gathering_of_a_checkpoint_ends_and_by_that_the_others(tmp_path, place, is_beside):
    """Rank 0 waits for its tensor, and would wait for ever beside a rank that tells of it in another operation."""
    directories = [tmp_path / "0", tmp_path / "1"]

    def work(ranks):
        directory = directories[ranks.rank]
        directory.mkdir()
        state = _State(ranks)
        read = state.read

        def reading(name, key, **options):
            if name == "b" and key == "exp_avg" and ranks.rank == place:
                raise RuntimeError("can't allocate memory")
            return read(name, key, **options)

        state.read = reading
        Writing(directory, state, ranks, applied_steps=5, overlaps=is_beside)

    answers = on_all_ranks(2, work)

    assert [(type(answer), str(answer)) for answer in (answers[place], answers[1 - place])] == [
        (RuntimeError, "can't allocate memory"),
        (RuntimeError, "Connection closed by peer"),
    ]


def test_disk_that_fills_up_under_what_rank_0_receives_is_an_error_of_all_and_none_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "write_runs", _full)

    def work(ranks):
        directory = tmp_path / str(ranks.rank)
        directory.mkdir()
        Writing(directory, _State(ranks), ranks, applied_steps=5, overlaps=False)

    first, second = on_all_ranks(2, work)

    assert isinstance(first, OSError)
    assert first.errno == errno.ENOSPC
    assert isinstance(second, HeterorlError)


def _full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")
