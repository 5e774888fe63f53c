"""Each fact leads to its own finding and remedy; nothing here touches a network."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from heterorl.cli.doctor import target_of
from heterorl.common.identity.spiffe import Identity, Role
from heterorl.common.model.model_shape import shape_of_directory
from heterorl.common.rpc.maintenance import Diagnosis
from heterorl.common.types.common import LoraSettings
from heterorl.doctor import link_checks, machine_checks
from heterorl.doctor.check import Check, Failure, Level, checks_json, checks_table, exit_code, fail, ok, skip, warn
from heterorl.doctor.link_checks import Connected, Handshake, MessageTrial, Reached
from heterorl.doctor.machine_checks import Device, Disk, Versions
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.loss.loss_config import LossConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.run import CONTRACT
from tests.support.training import tiny_model

ME = Identity(run="run", site="eu-1", role=Role.SAMPLER, serial=1, not_before=0.0, not_after=100 * 86400.0)
SERVER = dataclasses.replace(ME, site="main", role=Role.COORDINATOR)
FACTS = Diagnosis(
    server_time=0.0, run_id="run", heterorl_version="0.1.0", python_version="3.12.1", grpc_version="1.85",
    max_message_bytes=16 << 20, head_version=3, bytes_full=1 << 30, contract=CONTRACT,
)  # fmt: skip
GIB = 1 << 30
SLOW = Failure(kind="timeout", detail="no answer in 5 s")


def reached(*trips, ahead=0.0):
    return Reached(round_trips=trips or (0.01,), diagnosis=FACTS, ahead_s=ahead, uncertainty_s=0.005)


def trial(way, size, error="", *, late=False):
    return MessageTrial(direction=way, num_bytes=size, seconds=0.5, error=error, is_timeout=late)


def messages(*trials, own=16 << 20):
    return link_checks.judge_messages(trials, own_limit=own, server_limit=16 << 20)


FINE = (trial("up", 1 << 20), trial("down", 1 << 20))
VERSIONS = Versions(heterorl="0.1.0", python="3.12.1", grpc="1.85", torch="2.9")


def certificate(**changes):
    return link_checks.judge_certificate(
        dataclasses.replace(ME, **changes), role=Role.SAMPLER, site="eu-1", server=SERVER
    )


def disk(fact, role=Role.SAMPLER):
    return machine_checks.judge_disk(fact, key="state_dir", role=role, state_bytes=GIB)


def memory(fact, role=Role.SAMPLER, pass_bytes=0):
    return machine_checks.judge_memory(fact, role=role, is_on_gpu=False, state_bytes=GIB, pass_bytes=pass_bytes)


def device(fact, share=0.0):
    return machine_checks.judge_device(
        fact, device="cuda:0", role=Role.SAMPLER, state_bytes=GIB, need_bytes=2 * GIB, share=share
    )


def contract(**changes):
    return machine_checks.judge_contract(dataclasses.replace(CONTRACT, **changes), diagnosis=FACTS)


def gpu(free):
    return Device(name="card", free_bytes=free, total_bytes=80 * GIB)


CASES = [
    (link_checks.judge_dns("coord", ("10.0.0.1",)), Level.OK, "coord is 10.0.0.1"),
    (link_checks.judge_dns("::1", ("::1",)), Level.OK, "::1 is an address"),
    (link_checks.judge_dns("coord", Failure(kind="unknown", detail="no such name")), Level.FAIL, "add it to DNS"),
    (link_checks.judge_dns("coord", SLOW), Level.FAIL, "resolver"),
    (link_checks.judge_port("c:1", Connected(address="10.0.0.1", seconds=0.01)), Level.OK, "10 ms"),
    (link_checks.judge_port("c:1", SLOW), Level.FAIL, "firewalls"),
    (link_checks.judge_port("c:1", Failure(kind="refused")), Level.FAIL, "its `listen`"),
    (link_checks.judge_port("c:1", Failure(kind="refused"), is_own=True), Level.WARN, "start the coordinator"),
    (link_checks.judge_port("c:1", Failure(kind="unreachable", detail="no route")), Level.FAIL, "routes"),
    (link_checks.judge_handshake("c", Handshake(protocol="TLSv1.3", server=SERVER)), Level.OK, SERVER.uri),
    (link_checks.judge_handshake("c", Handshake(protocol="TLSv1.3", server=ME)), Level.FAIL, "not a coordinator"),
    (link_checks.judge_handshake("c", Handshake(protocol="TLSv1.3", server=None)), Level.FAIL, "not a node of a run"),
    (certificate(), Level.OK, ME.uri),
    (certificate(role=Role.LEARNER), Level.FAIL, "with role sampler"),
    (certificate(site="eu-2"), Level.FAIL, "set `site` to eu-2"),
    (certificate(run="other"), Level.FAIL, "join run run"),
    (link_checks.judge_certificate(SLOW, role=Role.SAMPLER, site="", server=None), Level.FAIL, "heterorl join"),
    (link_checks.judge_expiry(ME, now=0.0), Level.OK, "100 days"),
    (link_checks.judge_expiry(ME, now=90 * 86400.0), Level.WARN, "certs renew"),
    (link_checks.judge_expiry(ME, now=101 * 86400.0), Level.FAIL, "expired 24.0 hours ago"),
    (link_checks.judge_expiry(ME, now=-3600.0), Level.FAIL, "clock"),
    (link_checks.judge_expiry(SLOW, now=0.0), Level.SKIP, "was not read"),
    # The middle of 10, 20 and 90 ms.
    (link_checks.judge_answer(reached(0.01, 0.09, 0.02)), Level.OK, "round trip 20 ms (median of 3, worst 90 ms)"),
    (link_checks.judge_answer(reached(2.0)), Level.WARN, "slow"),
    (link_checks.judge_answer(Failure(kind="Unauthenticated", detail="revoked")), Level.FAIL, "revoked or expired"),
    (link_checks.judge_answer(Failure(kind="PermissionDenied")), Level.FAIL, "coordinator's run"),
    (link_checks.judge_answer(Failure(kind="old")), Level.FAIL, "same release"),
    (link_checks.judge_answer(SLOW), Level.FAIL, "does not answer"),
    (link_checks.judge_answer(Failure(kind="Unreachable", detail="x")), Level.FAIL, "proxies"),
    # 5 ms of what is seen may be the line's.
    (link_checks.judge_clock(reached(ahead=5.004)), Level.OK, "5 s behind"),
    (link_checks.judge_clock(reached(ahead=-5.1)), Level.WARN, "5.1 s ahead of"),
    (link_checks.judge_clock(reached(ahead=301.0)), Level.FAIL, "set-ntp"),
    (messages(*FINE), Level.OK, "up 1 MiB at 2.1 MB/s"),
    (messages(*FINE, own=1 << 20), Level.WARN, "set max_message_bytes to the coordinator's 16777216"),
    (messages(*FINE, trial("down", 16 << 20, "UNAVAILABLE: reset")), Level.FAIL, "proxy"),
    (messages(*FINE, trial("down", 16 << 20, "late", late=True)), Level.WARN, "the link is slow"),
    (messages(trial("up", 1 << 16, "late", late=True)), Level.FAIL, "MTU"),
    (disk(Disk(path="/x", free_bytes=4 * GIB, sync_s=0.001)), Level.OK, "a durable write takes 1 ms"),
    (disk(Disk(path="/x", free_bytes=3 * GIB // 2, sync_s=0.001)), Level.WARN, "2 GiB is recommended"),
    (disk(Disk(path="/x", free_bytes=GIB // 2, sync_s=0.001)), Level.FAIL, "at least 1 GiB"),
    (disk(Disk(path="/x", free_bytes=4 * GIB, sync_s=0.2)), Level.WARN, "put state_dir on a faster"),
    # Of a learner a checkpoint takes seven times the published state.
    (disk(Disk(path="/x", free_bytes=21 * GIB, sync_s=0.001), Role.LEARNER), Level.OK, "21 GiB free"),
    (disk(Disk(path="/x", free_bytes=20 * GIB, sync_s=0.001), Role.LEARNER), Level.WARN, "21 GiB is recommended"),
    (disk(Disk(path="/x", free_bytes=6 * GIB, sync_s=0.001), Role.LEARNER), Level.FAIL, "at least 7 GiB"),
    (disk(Disk(path="/x", free_bytes=7 * GIB, sync_s=0.001, kept_bytes=14 * GIB), Role.LEARNER), Level.OK, "7 GiB"),
    (disk(Failure(kind="full", detail="x")), Level.FAIL, "free space there"),
    (disk(Failure(kind="readonly", detail="x")), Level.FAIL, "mount it writable"),
    (disk(Failure(kind="denied", detail="x")), Level.FAIL, "give this user write access"),
    (disk(SLOW), Level.FAIL, "does not finish"),
    # A sampler on the CPU: four times the published state; a learner ten times.
    (memory(5 * GIB), Level.OK, "needs about 5 GiB"),
    (memory(4 * GIB), Level.WARN, "larger machine"),
    (memory(GIB - 1), Level.FAIL, "more memory"),
    (memory(9 * GIB, role=Role.LEARNER), Level.WARN, "needs about 21 GiB"),
    (
        memory(22 * GIB, role=Role.LEARNER, pass_bytes=3 * GIB),
        Level.WARN,
        "a pass takes up to 3 GiB: lower backend.mic",
    ),
    (memory(GIB, role=Role.COORDINATOR), Level.OK, "1 GiB available"),
    (memory(SLOW), Level.SKIP, "no answer"),
    (device(None), Level.OK, "not configured"),
    (device(gpu(2 * GIB)), Level.OK, "2 GiB of 80 GiB free"),
    (device(gpu(72 * GIB), 0.9), Level.OK, "72 GiB of 80 GiB free"),
    # A learner has half of it.
    (device(gpu(40 * GIB), 0.9), Level.WARN, "lower engine.memory_share: its engines may take 0.5 together"),
    (device(gpu(GIB)), Level.WARN, "about 2 GiB"),
    (device(gpu(GIB - 1)), Level.FAIL, "larger GPU"),
    (device(Failure(kind="no_torch")), Level.FAIL, "install torch, in a clone of heterorl: pip install '.[sampler]'"),
    (device(Failure(kind="no_cuda")), Level.FAIL, "driver"),
    (device(Failure(kind="no_device")), Level.FAIL, "number"),
    (device(Failure(kind="unusable")), Level.FAIL, "held or full"),
    (device(SLOW), Level.FAIL, "nvidia-smi"),
    (
        machine_checks.judge_versions(VERSIONS, role=Role.SAMPLER, diagnosis=FACTS),
        Level.OK,
        "coordinator: heterorl 0.1.0",
    ),
    (machine_checks.judge_versions(VERSIONS, role=Role.SAMPLER, diagnosis=None), Level.OK, "torch 2.9"),
    (
        machine_checks.judge_versions(
            dataclasses.replace(VERSIONS, heterorl="0.2.0"), role=Role.SAMPLER, diagnosis=FACTS
        ),
        Level.WARN,
        "install heterorl 0.1.0",
    ),
    (
        machine_checks.judge_versions(dataclasses.replace(VERSIONS, torch=None), role=Role.LEARNER, diagnosis=FACTS),
        Level.FAIL,
        "install torch, in a clone of heterorl: pip install '.[learner]'",
    ),
    (
        machine_checks.judge_versions(
            dataclasses.replace(VERSIONS, torch=None), role=Role.COORDINATOR, diagnosis=FACTS
        ),
        Level.OK,
        "torch none",
    ),
    (
        machine_checks.judge_versions(
            dataclasses.replace(VERSIONS, engine="vllm 0.32.0"), role=Role.SAMPLER, diagnosis=FACTS
        ),
        Level.OK,
        "vllm 0.32.0; coordinator",
    ),
    (
        machine_checks.judge_versions(
            dataclasses.replace(VERSIONS, engine=Failure(kind="vllm", detail="vllm 0.31.0 is installed")),
            role=Role.SAMPLER,
            diagnosis=FACTS,
        ),
        Level.FAIL,
        "in a clone of heterorl: pip install '.[vllm]'",
    ),
    (contract(), Level.OK, "match the run"),
    (contract(tokenizer_digest="9" * 64), Level.FAIL, "copy the tokenizer's files"),
    (contract(chat_template_digest="9" * 64), Level.FAIL, "use_chat_template"),
    (contract(task_digest="9" * 64), Level.FAIL, "data, reward and environment files"),
    (contract(layout_id="9" * 64), Level.FAIL, "published_dtype"),
    (contract(vocab_size=21), Level.FAIL, "run's model"),
    (contract(num_prompts=51), Level.FAIL, "data file"),
    (contract(group_size=3), Level.FAIL, "group_size"),
    (contract(sampling=dataclasses.replace(CONTRACT.sampling, top_k=3)), Level.FAIL, "learner's [sampling]"),
    (contract(lora=LoraSettings(rank=4, alpha=8.0, target_modules=("q",))), Level.FAIL, "learner's [lora]"),
    (machine_checks.judge_groups(16, counted=16), Level.OK, "a version takes 16 groups, as the coordinator counts"),
    (machine_checks.judge_groups(16, counted=8), Level.WARN, "too little work ahead, so that samplers idle"),
    (machine_checks.judge_groups(8, counted=16), Level.WARN, "set the coordinator's groups_per_version to 8"),
    (machine_checks.judge_contract(None, diagnosis=FACTS), Level.SKIP, "model_dir is not set"),
    (machine_checks.judge_contract(CONTRACT, diagnosis=None), Level.SKIP, "the model loads"),
    (machine_checks.judge_contract(SLOW, diagnosis=None), Level.FAIL, "local disk"),
    (
        machine_checks.judge_contract(Failure(kind="unstated"), diagnosis=dataclasses.replace(FACTS, contract=None)),
        Level.WARN,
        "start the learner",
    ),
    (
        machine_checks.judge_contract(Failure(kind="model", detail="no tokenizer"), diagnosis=None),
        Level.FAIL,
        "model_dir or",
    ),
    (
        machine_checks.judge_contract(CONTRACT, diagnosis=dataclasses.replace(FACTS, contract=None)),
        Level.WARN,
        "start the learner",
    ),
]


@pytest.mark.parametrize(("check", "level", "words"), CASES, ids=lambda value: getattr(value, "name", None))
def test_fact_leads_to_its_own_words(check, level, words):
    assert check.level is level, check
    assert words in f"{check.finding} {check.remedy}"


@pytest.mark.parametrize(
    "kind", ["timeout", "files", "authority", "hostname", "server_expired", "server_not_yet", "refused_us", "not_tls"]
)
def test_every_broken_handshake_has_a_remedy(kind):
    check = link_checks.judge_handshake("coord", Failure(kind=kind, detail="x"))

    assert check.level is Level.FAIL
    assert ("--host coord" in check.remedy) == (kind == "hostname")


def test_remedies_tell_failures_apart():
    remedies = [check.remedy for check, level, _ in CASES if level is Level.FAIL]

    # [task] has two digests, and four lacks of room ask for the same.
    assert len(set(remedies)) >= len(remedies) - 4


def test_base_weights_of_adapters_are_the_runs_own_matter():
    stated = dataclasses.replace(
        FACTS,
        contract=dataclasses.replace(
            CONTRACT, lora=LoraSettings(rank=4, alpha=8.0, target_modules=("q",), base_digest="b" * 64)
        ),
    )
    mine = dataclasses.replace(CONTRACT, lora=LoraSettings(rank=4, alpha=8.0, target_modules=("q",)))

    assert machine_checks.judge_contract(mine, diagnosis=stated).level is Level.OK
    assert machine_checks.judge_contract(CONTRACT, diagnosis=stated).level is Level.FAIL


@pytest.mark.parametrize(
    "name",
    [field.name for field in dataclasses.fields(CONTRACT) if type(getattr(CONTRACT, field.name)) in (int, float)],
)
def test_each_number_of_a_contract_has_a_remedy(name):
    check = contract(**{name: getattr(CONTRACT, name) + 1})

    assert check.level is Level.FAIL
    assert check.remedy


@pytest.mark.parametrize(
    ("loss", "tokens", "level", "finding", "remedy"),
    [
        (
            {"kind": "gepo_whole"},
            300,
            Level.OK,
            "= 0.3 nats a completion (docs/losses.md, long completions): 85% of",
            "",
        ),
        (
            {"kind": "gepo_whole"},
            4_000,
            Level.WARN,
            "= 4 nats a completion (docs/losses.md, long completions): 15% of",
            "5 x KL a token",
        ),
        ({"kind": "gspo"}, 4_000, Level.WARN, "100% of", "set loss.drift_limit or take topr"),
        ({"kind": "gepo_1s", "drift_limit": 20.0}, 4_000, Level.OK, "4 nats", ""),
        ({"kind": "custom", "function": "no.such:loss"}, 5, Level.FAIL, "", "correct [loss]"),
    ],
)
def test_a_loss_is_judged_by_the_engines_mismatch_times_the_length(loss, tokens, level, finding, remedy):
    config = TypeAdapter(LossConfig).validate_python(loss)
    check = machine_checks.judge_loss(config, max_new_tokens=tokens)

    assert check.level is level
    assert finding in check.finding
    assert remedy in check.remedy


def test_only_a_failure_makes_the_exit_code_1_and_foreign_text_stays_text():
    lines = [ok("a", "[/x]"), warn("b", "x", "y"), skip("c", "z")]

    assert exit_code(lines) == 0
    assert exit_code([*lines, fail("d", "x", "y")]) == 1
    assert checks_json(lines)["is_ok"] is True
    assert checks_json(lines)["checks"][1] == {"name": "b", "level": "warn", "finding": "x", "remedy": "y"}
    assert checks_table(lines, title="[/t]").row_count == 3


def test_failure_without_a_remedy_cannot_be_made():
    with pytest.raises(AssertionError):
        Check(name="a", level=Level.FAIL, finding="x")
    with pytest.raises(AssertionError):
        Check(name="a", level=Level.OK, finding="x", remedy="y")


def test_relay_of_two_coordinators_is_checked_against_the_first():
    target = target_of("relay", RelayConfig(coordinator="run.example:50051,standby.example:50051"))

    assert (target.host, target.port) == ("run.example", 50051)


def test_files_that_cannot_be_looked_at_are_findings_and_no_end(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    # No user may look behind such a name, as behind a directory without the right to search it.
    hidden = tmp_path / ("a" * 300) / "state"

    found = machine_checks.measure_disk(hidden)
    disk = machine_checks.judge_disk(found, key="state_dir", role=Role.LEARNER, state_bytes=0)
    config = SimpleNamespace(model_dir=str(tmp_path))
    contract = machine_checks.judge_contract(
        machine_checks.measure_contract(config, published_dtype="bf16"), diagnosis=None
    )

    assert (disk.level, disk.finding) == (Level.FAIL, f"{hidden}: File name too long")
    assert contract.level is Level.FAIL
    assert "model.safetensors" in contract.finding
    assert [machine_checks.model_bytes(str(place)) for place in (tmp_path, hidden)] == [0, 0]


def test_weights_in_fp32_count_as_published_and_kept_checkpoints_as_room(tmp_path):
    (tmp_path / "checkpoints" / "v1").mkdir(parents=True)
    for path in (tmp_path / "model.safetensors", tmp_path / "checkpoints" / "v1" / "masters"):
        path.write_bytes(bytes(100))
    found = {}
    for dtype in ("float32", "bfloat16"):
        (tmp_path / "config.json").write_text(f'{{"torch_dtype": "{dtype}"}}')
        found[dtype] = machine_checks.model_bytes(str(tmp_path))

    assert found == {"float32": 50, "bfloat16": 100}
    assert machine_checks.measure_disk(tmp_path).kept_bytes == 100


@pytest.mark.parametrize(
    ("engine", "devices", "copies", "share"),
    [
        ({}, ("cpu",), 1, 0),
        ({"device": "cuda:1"}, ("cuda:1",), 1, 0),
        ({"device": "cuda", "engines": 3}, ("cuda",), 3, 0),
        ({"devices": [0, 5]}, ("cuda:0", "cuda:5"), 1, 0),
        ({"kind": "vllm"}, ("cuda",), 1, 0.9),
        ({"kind": "vllm", "engines": 2, "memory_share": 0.4}, ("cuda",), 2, 0.8),
        ({"kind": "vllm", "devices": [2, 3], "tensor_parallel_size": 2}, ("cuda:2", "cuda:3"), 0.5, 0.9),
    ],
)
def test_each_gpu_that_an_engine_takes_is_looked_at(engine, devices, copies, share, monkeypatch):
    monkeypatch.setattr(machine_checks, "measure_versions", lambda engine: VERSIONS)

    target = target_of("sampler", SamplerConfig(engine=engine))

    assert (target.devices, target.copies, target.memory_share) == (devices, copies, share)


def test_vllm_built_for_the_cpu_needs_no_gpu(monkeypatch):
    built = dataclasses.replace(VERSIONS, engine="vllm 0.32.0+cpu")
    monkeypatch.setattr(machine_checks, "measure_versions", lambda engine: built)

    assert target_of("sampler", SamplerConfig(engine={"kind": "vllm"})).devices == ("cpu",)


def test_a_learners_memory_is_of_its_ranks_and_trained_weights():
    of_ranks = target_of("learner", LearnerConfig(backend={"kind": "fsdp2", "device": "cuda"}))
    of_adapters = target_of("learner", LearnerConfig(lora={"rank": 8}))

    assert (of_ranks.devices, of_ranks.copies, of_ranks.sized_as) == (("cuda",), 0, None)
    assert (of_adapters.copies, of_adapters.sized_as) == (1, Role.SAMPLER)


def test_a_pass_of_a_learner_counts_as_its_keys_say(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    keep, recompute = ({"micro_batch_tokens": 1000}, {"micro_batch_tokens": 1000, "gradient_checkpointing": True})
    shape = shape_of_directory(tmp_path)

    found = [
        target_of("learner", LearnerConfig(model_dir=str(tmp_path), backend=backend)).pass_bytes
        for backend in (keep, recompute)
    ]

    assert found == [int(shape.activations(1000, width=4, is_checkpointed=each)) for each in (False, True)]
    assert found[0] > 2 * found[1] > 0
    assert target_of("learner", LearnerConfig(model_dir="a/hub-id")).pass_bytes == 0


def test_a_learners_groups_are_those_of_a_version_and_not_of_a_step():
    assert target_of("learner", LearnerConfig(groups_per_step=8, steps_per_version=2)).groups_per_version == 16


def test_a_gpu_is_absent_or_cannot_be_used(monkeypatch):
    torch = pytest.importorskip("torch")

    def memory_of(place):
        if place.index == 1:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return (3 - place.index) * GIB, 4 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory_of)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)

    assert machine_checks.measure_devices(["cuda:0", "cuda:3"]) == Failure(
        kind="no_device", detail="no cuda:3: torch sees 3 GPUs"
    )
    assert machine_checks.measure_devices(["cuda:1"]) == Failure(
        kind="unusable", detail="CUDA error: out of memory (cuda:1)"
    )
    assert machine_checks.measure_devices(["cuda:0", "cuda:2"]) == Device(
        name="cuda:2", free_bytes=GIB, total_bytes=4 * GIB
    )


def test_a_model_that_cannot_be_measured_for_a_missing_package_fails_the_check(monkeypatch):
    monkeypatch.setitem(sys.modules, "heterorl.common.text.prompter", None)

    check = machine_checks.judge_contract(
        machine_checks.measure_contract(LearnerConfig(), published_dtype="bf16"), diagnosis=None
    )

    assert check.level is Level.FAIL
    assert "heterorl.common.text.prompter" in check.finding
