"""The cache's directory: indexed as it is found, bounded, one process's."""

import os
import shutil
from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError
from heterorl.relay.cache import CacheDirectory

A, B, C = ("a" * 64, "b" * 64, "c" * 64)


@pytest.fixture
def make(tmp_path):
    opened = []

    def make(max_bytes=30):
        while opened:
            opened.pop().close()
        opened.append(CacheDirectory(tmp_path, max_bytes=max_bytes))
        return opened[-1]

    yield make
    while opened:
        opened.pop().close()


def arrive(cache, digest, num_bytes=10):
    assert cache.expect(digest, num_bytes, keep=())
    (cache.incoming / digest).write_bytes(bytes(num_bytes))
    cache.adopt(digest, cache.move(digest))


def test_the_index_is_what_is_there(make, tmp_path):
    cache = make()
    arrive(cache, A)
    (cache.incoming / B).write_bytes(b"begun")
    (cache.incoming / "rubbish").write_bytes(b"?")

    again = make()

    assert again.path(A).read_bytes() == bytes(10)
    assert again.path(B) is None
    assert again.num_bytes == 15
    assert {path.name for path in again.incoming.iterdir()} == {B}


def test_the_longest_unused_goes_first_also_after_a_restart(make):
    cache = make()
    for number, digest in enumerate((A, B)):
        arrive(cache, digest)
        os.utime(cache.path(digest), (number, number))
    cache.path(A)

    cache = make()
    assert cache.expect(C, 20, keep=())

    assert (cache.path(A) is not None, cache.path(B)) == (True, None)


def test_what_is_begun_and_given_up_goes_before_what_is_whole(make):
    cache = make()
    arrive(cache, A)
    assert cache.expect(B, 15, keep=())
    assert not cache.expect(C, 20, keep={B})
    assert cache.path(A) is not None
    assert cache.expect(C, 20, keep=())
    assert (cache.path(A) is not None, cache.num_bytes) == (True, 30)


def test_what_goes_on_needs_room_for_what_is_missing(make):
    cache = make()
    assert cache.expect(A, 20, keep=())
    (cache.incoming / A).write_bytes(bytes(18))

    cache = make()

    assert cache.num_bytes == 18
    assert cache.expect(A, 20, keep=())
    assert cache.expect(A, 20, keep=())
    assert cache.num_bytes == 20


def test_a_disk_smaller_than_the_bound_makes_room_too(make, tmp_path, monkeypatch, caplog):
    def usage(_directory):
        return SimpleNamespace(free=25 - sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))

    def kept():
        return {path.name for path in (tmp_path / "payloads").iterdir()}

    monkeypatch.setattr(shutil, "disk_usage", usage)
    cache = make(1 << 30)
    arrive(cache, A)
    arrive(cache, B)
    # What no disk holds costs nothing that is kept.
    assert not cache.expect(C, 30, keep=())
    assert kept() == {A, B}
    assert "payload cccccccccccc is passed on, the disk of cache_dir lacks 25 bytes" in caplog.text

    arrive(cache, C)
    assert kept() == {B, C}

    assert cache.expect(A, 15, keep=())
    assert kept() == {C}
    # A fetch that a full disk broke off has its room reserved already.
    (cache.incoming / A).write_bytes(bytes(3))
    (tmp_path / "foreign").write_bytes(bytes(10))
    assert cache.expect(A, 15, keep=())
    assert kept() == set()


def test_a_smaller_bound_counts_at_once(make):
    cache = make()
    arrive(cache, A)
    arrive(cache, B)

    assert make(max_bytes=10).num_bytes == 10


def test_a_directory_has_one_user(make, tmp_path):
    make()
    with pytest.raises(ConfigError, match="another process"):
        CacheDirectory(tmp_path, max_bytes=1)
