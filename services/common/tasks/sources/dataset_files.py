"""Rows of a dataset by name: commit, download, mapped Arrow table, digest.

A branch moves, so nodes that start on two days would train on two datasets: a name has a commit. A repository is
downloaded once; later starts need no network (HF_HUB_OFFLINE=1).
"""

import contextlib
import glob
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from heterorl.common.errors import ConfigError, DependencyMissing, ServiceUnreachable
from heterorl.common.process.hub import is_away
from heterorl.common.tasks.source_config import DataConfig
from heterorl.common.tasks.sources.arrow_rows import ArrowRows

_SAVED = ("state.json", "dataset_dict.json")
"""Files of `save_to_disk`."""


def load_directory(key: str, directory: Path, split: str, config: DataConfig) -> ArrowRows:
    """A split of a directory in the hub's or `save_to_disk`'s layout.

    Raises:
        ConfigError: no such directory, subset, split or file, or it cannot be read.
        DependencyMissing: the datasets library is not installed.
    """
    if not directory.is_dir():
        raise ConfigError(key, f"{directory} is not a directory", action="check the path")
    if any((directory / name).exists() for name in _SAVED):
        return _saved(key, directory, split)
    files = {split.partition("[")[0]: list(config.files)} if config.files else None
    return _built(
        key,
        str(directory),
        split=split,
        cache_dir=config.cache_dir,
        texts=(config.prompt, config.answer),
        name=config.subset or None,
        data_files=files,
    )


def load_parquet(key: str, pattern: str, *, cache_dir: str) -> ArrowRows:
    """Rows of Parquet files, in the order of their names."""
    # Wildcards may stand in any part of the path.
    found = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))  # noqa: PTH207
    if not found:
        raise ConfigError(key, f"there is no file {pattern}", action="check the path and its pattern")
    library()
    files = _with_rows(key, found)
    return _built(key, "parquet", split="train", cache_dir=cache_dir, data_files={"train": [*map(glob.escape, files)]})


def _with_rows(key: str, files: Sequence[str]) -> list[str]:
    """Files with rows; raises ConfigError for other columns, or no Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas: dict[str, pa.Schema] = {}
    for file in files:
        try:
            about = pq.read_metadata(file)
        except (OSError, pa.ArrowException) as error:
            problem = f"cannot read {file} as Parquet: {_words(error)}"
            raise ConfigError(
                key, problem, action="name complete files of Parquet, such as DIRECTORY/*.parquet"
            ) from error
        if about.num_rows:
            schemas[file] = about.schema.to_arrow_schema()
    if not schemas:
        raise ConfigError(key, f"{files[0]} has no rows", action="name files with rows")
    first = next(iter(schemas))
    for file, schema in schemas.items():
        if other := sorted({*schema.names} ^ {*schemas[first].names}):
            problem = f"{file} and {first} have not the same columns: only one of them has {other[0]}"
            raise ConfigError(key, problem, action="name files with the same columns")
        for name in schema.names:
            if pa.types.is_null(schemas[first].field(name).type) and not pa.types.is_null(schema.field(name).type):
                problem = f"{name} is null in each row of {first}, which then has no type for it, unlike {file}"
                raise ConfigError(key, problem, action="write the column's type into the first file, or leave that out")
    return list(schemas)


def library() -> Any:
    """The datasets library, without progress bars."""
    try:
        import datasets
    except ImportError as error:
        raise DependencyMissing("datasets", "data") from error
    datasets.disable_progress_bars()
    return datasets


def _built(key: str, path: str, *, split: str, cache_dir: str, texts: Sequence[str] = (), **options: Any) -> ArrowRows:
    datasets = library()
    root = Path(cache_dir) / "datasets" if cache_dir else Path(datasets.config.HF_DATASETS_CACHE)
    try:
        config = datasets.load_dataset_builder(path, cache_dir=str(root), **options).config
        listed = config.data_files or {}
        if hasattr(config, "converters") and config.features is None:
            # Of CSV. The library would read 003 as 3, and NA as null.
            options |= {"converters": dict.fromkeys(texts, str), "keep_default_na": False, "na_values": [""]}
        digests = {Path(file): file_digest(Path(file)) for name in sorted(listed, key=str) for file in listed[name]}
        # The library knows a file by its path and time, which another content may have too.
        place = root / blake3.blake3(b"".join(digests.values())).hexdigest()[:32]
        builder = datasets.load_dataset_builder(path, cache_dir=str(place), **options)
        # The library converts to Arrow once, under a lock; every process maps the result.
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        action = "check name, split and revision, and that the files are complete"
        if "datasets dtype" in str(error):
            action = "leave that column out, or write it as text"
        raise ConfigError(key, f"cannot read split {split} of {path}: {_words(error)}", action=action) from error
    wanted = {part.strip().partition("[")[0] for part in split.split("+")}
    sources = [digests[Path(file)] for name in sorted(listed, key=str) if str(name) in wanted for file in listed[name]]
    if not sources:
        raise ConfigError(
            key,
            f"split {split} of {path} has no files, whose digest would identify it",
            action="write it with save_to_disk or to Parquet, and name that",
        )
    return ArrowRows(_named_classes(rows), digest_of([split, options.get("name")], sources))


def _saved(key: str, directory: Path, split: str) -> ArrowRows:
    datasets = library()
    name = split.partition("[")[0]
    place = directory / name if (directory / "dataset_dict.json").exists() else directory
    if not place.is_dir():
        raise ConfigError(key, f"{directory} has no split {name}", action="name a split of this directory")
    if name != split:
        raise ConfigError(key, f"{directory} was written by save_to_disk: take a whole split of it, not {split}")
    try:
        rows = datasets.load_from_disk(str(place))
        state = json.loads((place / "state.json").read_bytes())
        # Other Arrow files there are caches of the library.
        named = [file_digest(place / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            key, f"cannot read {place}: {_words(error)}", action="copy the file again, or name another one"
        ) from error
    if state.get("_indices_data_files"):
        # The library ignores indices, so all rows would be back.
        raise ConfigError(key, f"{place} keeps its choice of rows in a file of indices", action=_SAVE_AGAIN)
    return ArrowRows(_named_classes(rows), digest_of([split, None], named))


def _named_classes(rows: Any) -> Any:
    """A dataset's table; classes by name, such as A, not by number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = rows.data.table
    for name, feature in rows.features.items():
        if isinstance(feature, library().ClassLabel) and feature.names:
            numbers = table[name]
            # -1 is a row without a class.
            known = pc.if_else(pc.greater_equal(numbers, 0), numbers, pa.scalar(None, numbers.type))
            named = pa.chunked_array([pa.array(feature.names).take(part) for part in known.chunks], pa.string())
            table = table.set_column(table.schema.get_field_index(name), name, named)
    return table


_SAVE_AGAIN = "open it with the library that wrote it, call flatten_indices(), and save it again"


def file_digest(path: Path) -> bytes:
    """blake3 of a file's bytes."""
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).digest()


def digest_of(words: Sequence[object], files: Sequence[bytes]) -> str:
    """Digest of words and of files in order, without their paths."""
    return blake3.blake3(repr(list(words)).encode() + b"".join(files)).hexdigest()


def _words(error: BaseException) -> str:
    # The cause says more than the error of the library.
    cause = error.__cause__ or error
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:300]


def open_repository(text: str, config: DataConfig) -> tuple[ArrowRows, ArrowRows | None]:
    """Training rows, and the held-out split's rows if one is named.

    `text` is `NAME@COMMIT[split]`, or a directory with its split.

    Raises:
        ConfigError: no commit is named, or there is no such dataset, commit, subset or split.
        DependencyMissing: the datasets library is not installed.
    """
    key = "task.name"
    name = parse(key, text)
    if name.is_local:
        directory = Path(name.place).expanduser()
    elif not _COMMIT.fullmatch(name.revision):
        commit, known = "COMMIT", "40 digits from its page of commits"
        with contextlib.suppress(ConfigError):
            # One small file: the name of its cache directory is the commit.
            commit = download(key, name, files=("README.md",), cache_dir=config.cache_dir).name
            known = "its commit today"
        action = f"write hf:{name.place}@{commit}[{name.split}], {known}; or a directory"
        raise ConfigError(key, f"hf:{text} names no commit, and a branch moves", action=action)
    else:
        files = (*config.files, "README.md") if config.files else ()
        directory = download(key, name, files=files, cache_dir=config.cache_dir)

    held_out = None
    if split := config.evaluation_split:
        held_out = load_directory("task.data.evaluation_split", directory, split, config)
    return load_directory(key, directory, name.split, config), held_out


def open_parquet(path: str, evaluation_path: str, config: DataConfig) -> tuple[ArrowRows, ArrowRows | None]:
    """Rows of the Parquet files of a pattern, and a held-out file's."""
    held_out = None
    if evaluation_path:
        held_out = load_parquet("task.evaluation_path", evaluation_path, cache_dir=config.cache_dir)
    return load_parquet("task.name", path, cache_dir=config.cache_dir), held_out


_FORM = re.compile(r"(?P<place>[^@\[\]]+)(@(?P<revision>[^@\[\]]+))?(\[(?P<split>.+)\])?")
_LOCAL = re.compile(r"(?P<place>[/.~][^\[\]]*)(\[(?P<split>.+)\])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A dataset of the hub, or a directory of this machine.

    Example: HubName(place="openai/gsm8k", revision="e53f048856ff4f594e959d75785d2c2d37b678ee", split="train")
    """

    place: str
    revision: str
    split: str

    @property
    def is_local(self) -> bool:
        return self.place.startswith(("/", ".", "~"))


def parse(key: str, text: str) -> HubName:
    """Parse the text behind `hf:`; raise ConfigError for `key`."""
    found = _LOCAL.fullmatch(text) or _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(key, f"hf:{text} is not hf:NAME@COMMIT[split]", action="docs/recipes.md has an example")
    parts = found.groupdict()
    return HubName(place=parts["place"], revision=parts.get("revision") or "", split=parts["split"] or "train")


def download(key: str, name: HubName, *, files: Sequence[str], cache_dir: str) -> Path:
    """A repository's directory at a commit, from the hub, else the cache.

    Downloads the files of the patterns `files`, or all without patterns.

    Raises:
        ConfigError: it is not cached, and the hub refuses it.
        ServiceUnreachable: it is not cached, and the hub does not answer.
        DependencyMissing: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DependencyMissing("huggingface_hub", "data") from error
    try:
        place = snapshot_download(
            name.place,
            repo_type="dataset",
            revision=name.revision or None,
            allow_patterns=list(files) or None,
            cache_dir=str(Path(cache_dir) / "hub") if cache_dir else None,
        )
    except Exception as error:
        # Of the library and its HTTP client, which differ by release.
        problem = f"cannot get {name.place} at {name.revision} from the hub: {_words(error)}"
        action = "correct the name, or copy the cache of a machine that has it"
        if is_away(error):
            action += "; if the hub is away for now, the next start asks again"
            raise ServiceUnreachable(key, problem, action=action) from error
        raise ConfigError(key, problem, action=action) from error
    return Path(place)
