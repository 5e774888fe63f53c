"""Keys with which no start succeeds, found from the file alone and once more at the start."""

import itertools
import json

import pytest
from pydantic import ValidationError

from heterorl.cli import check_config, main
from heterorl.cli.check_config import load_service, problems
from heterorl.common.errors import ConfigError
from heterorl.common.model.contract import LoraConfig, SamplingConfig
from heterorl.common.process import logs
from heterorl.common.process.config_file import InvalidConfig
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.adoption import adopt
from heterorl.sampler.engines import build_engines
from heterorl.sampler.sampler_config import SamplerConfig, VllmEngineConfig
from tests.support.certificates import DAY, Certificates, paths
from tests.support.run import CONTRACT
from tests.support.statements import statement

VLLM = {"engine.kind": "vllm"}
DEEPSPEED, FSDP2 = {"backend.kind": "deepspeed"}, {"backend.kind": "fsdp2"}
LEARNERS = {
    "adapters and deepspeed": ({**DEEPSPEED, "lora.rank": 8}, "lora", "use backend fsdp2 or torch"),
    "reference model and deepspeed": (
        {**DEEPSPEED, "loss.kind": "grpo", "loss.reference_kl": 0.1}, "loss.reference_kl", 'set backend.kind to "fsdp2"',
    ),
    "liger on a CPU": ({"backend.liger": True}, "liger", "set device to cuda"),
    "liger on a CPU in ranks": ({**FSDP2, "backend.liger": True}, "liger", "set device to cuda"),
    "members above the group": (
        {"group_size": 8, "sampling.min_members": 9}, "sampling.min_members", "at most group_size",
    ),
}  # fmt: skip
SAMPLERS = {
    "replayed routing": ({**VLLM, "sampling.router_replay": "rollout"}, "sampling.router_replay", "use engine hf"),
    "truncation at a temperature": (
        {**VLLM, "sampling.top_p": 0.9, "sampling.temperature": 0.7}, "sampling", "use top_p = 1",
    ),
    "lowest tokens cut at a temperature": (
        {**VLLM, "sampling.top_k": 20, "sampling.temperature": 0.7}, "sampling", "use top_p = 1",
    ),
    "low temperature": ({**VLLM, "sampling.temperature": 0.001}, "sampling.temperature", "set a higher temperature"),
    "high temperature": ({**VLLM, "sampling.temperature": 2.1}, "sampling.temperature", "set a lower temperature"),
    "no room for a prompt": (
        {**VLLM, "engine.max_model_len": 512, "sampling.max_new_tokens": 512}, "engine.max_model_len", "512 tokens hold no prompt with sampling.max_new_tokens = 512",
    ),
    "large adapters": ({**VLLM, "lora.rank": 1024}, "lora.rank", "set a smaller rank"),
    "members above the group": (
        {"group_size": 8, "sampling.min_members": 9}, "sampling.min_members", "at most group_size",
    ),
}  # fmt: skip
ROWS = [
    pytest.param(service, *row, id=f"{service}: {name}")
    for service, rows in (("learner", LEARNERS), ("sampler", SAMPLERS))
    for name, row in rows.items()
]
LOCAL = {"coordinator": "127.0.0.1:50051", "tls.insecure": True}


def loaded(service, keys):
    return load_service(service, None, [f"{key}={json.dumps(value)}" for key, value in {**LOCAL, **keys}.items()])


@pytest.mark.parametrize(("service", "keys", "key", "action"), ROWS)
def test_keys_that_no_start_accepts_are_a_problem_of_the_file(service, keys, key, action):
    with pytest.raises(InvalidConfig) as caught:
        loaded(service, keys)

    assert key in str(caught.value)
    assert action in str(caught.value)


@pytest.mark.parametrize(
    ("service", "keys"),
    [
        ("learner", {**FSDP2, "lora.rank": 8}),
        ("learner", {**FSDP2, "loss.kind": "grpo", "loss.reference_kl": 0.1}),
        ("learner", {"backend.liger": True, "backend.device": "cuda:1"}),
        ("learner", {"group_size": 8, "sampling.min_members": 8}),
        ("sampler", {**VLLM, "sampling.top_p": 0.9}),
        ("sampler", {**VLLM, "sampling.top_p": 0.9, "sampling.temperature": 0.7, "sampling.logprob_mode": "raw"}),
        ("sampler", {**VLLM, "lora.rank": 512}),
        ("sampler", {**VLLM, "sampling.temperature": 2.0}),
        ("sampler", {**VLLM, "engine.max_model_len": 513, "sampling.max_new_tokens": 512}),
        # As for `heterorl evaluate --max-new-tokens`.
        ("sampler", {**VLLM, "engine.max_model_len": 64}),
        ("sampler", {"lora.rank": 1024, "sampling.temperature": 0.001, "sampling.router_replay": "rollout"}),
    ],
)
def test_their_neighbours_are_valid(service, keys):
    assert list(problems(service, loaded(service, keys), is_loading=False)) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sampling": SamplingConfig(router_replay="rollout")}, "sampling.router_replay"),
        ({"sampling": SamplingConfig(temperature=0.001)}, "sampling.temperature"),
        ({"sampling": SamplingConfig(temperature=2.1)}, "sampling.temperature"),
        ({"lora": LoraConfig(rank=1024)}, "lora.rank"),
        (
            {"engine": VllmEngineConfig(max_model_len=64), "sampling": SamplingConfig(max_new_tokens=64)},
            "engine.max_model_len",
        ),
    ],
)
def test_a_start_of_vllm_refuses_them_before_the_model_is_read(changes, key):
    config = SamplerConfig.model_validate({"engine": {"kind": "vllm"}, "model_dir": "/nothing"})
    config = config.model_copy(update=changes)

    with pytest.raises(ConfigError) as caught:
        build_engines(config, end_token_ids=())
    assert caught.value.key == key


def test_a_joining_sampler_is_refused_only_for_what_its_file_states():
    keys = {"join": {}, "sampling": {"min_members": 9, "top_p": 0.9, "temperature": 0.7}, "engine": {"kind": "vllm"}}
    keys["engine"]["max_model_len"] = 64
    config = SamplerConfig.model_validate(keys)

    def adopted(group_size, logprob_mode, max_new_tokens=4):
        drawn = SamplingConfig(
            min_members=9, top_p=0.9, temperature=0.7, max_new_tokens=max_new_tokens, logprob_mode=logprob_mode
        ).model_dump(mode="json")
        return adopt(config, statement(CONTRACT, sampling=drawn, group_size=group_size))

    assert adopted(16, "raw").config.group_size == 16
    with pytest.raises(ConfigError, match="min_members"):
        adopted(8, "raw")
    with pytest.raises(ConfigError, match="before truncation"):
        adopted(16, "processed")
    with pytest.raises(ConfigError, match="64 tokens hold no prompt"):
        adopted(16, "raw", 64)


def test_a_custom_loss_with_a_reference_is_refused_where_the_backend_has_none():
    loss = {"kind": "custom", "function": "mine:loss", "reads_reference": True}

    with pytest.raises(ValidationError, match="loss.reads_reference: needs log-probs of a reference model"):
        LearnerConfig.model_validate({"backend": {"kind": "deepspeed"}, "loss": loss})


SITES = {"coordinator": "main", "learner": "learner", "sampler": "eu-1", "relay": "eu"}


@pytest.mark.parametrize("service", sorted(SITES))
def test_certificates_that_no_start_takes_are_a_problem_of_their_key(service, tmp_path, monkeypatch):
    # What follows the certificates would load torch.
    monkeypatch.setattr(check_config, "_packages", lambda *_: [("no_such_package", "none")])
    certificates = Certificates(tmp_path / "certs")
    serves = service in ("coordinator", "relay")

    def found(**changes):
        files = paths(certificates.node(service, SITES[service]))
        if serves:
            files["revoked"] = str(certificates.authority.revoked_path)
        keys = {f"tls.{key}": str(path) for key, path in {**files, **changes}.items()}
        if service == "sampler":
            keys["site"] = SITES[service]
        overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        config = load_service(service, None, overrides)
        checked = itertools.takewhile(lambda error: str(error).startswith("tls."), problems(service, config))
        problems_of_tls = [str(error).partition(" (")[0] for error in checked]
        if problems_of_tls and not serves:
            # Its model is found missing after them, and torch is not loaded.
            with pytest.raises(ConfigError) as refused:
                main._serve(service, None, [*overrides, "model_dir=/nothing"], "console")
            assert str(refused.value).startswith(problems_of_tls[0])
        return problems_of_tls

    for name in ("configure", "bind"):
        monkeypatch.setattr(logs, name, lambda **_: None)
    other = certificates.node("operator", "me")
    expired = certificates.odd(uris=[f"spiffe://run/site/eu-1/role/{service}"], end=-DAY / 2)
    (tmp_path / "old.crt").write_bytes(expired.cert)
    (tmp_path / "old.key").write_bytes(expired.key)
    (tmp_path / "list").write_text("not a number")

    assert found() == []
    assert found(cert=tmp_path / "no.crt") == [f"tls.cert: cannot read {tmp_path}/no.crt: No such file or directory"]
    assert found(ca=tmp_path / "list")[0].startswith("tls.ca: holds no PEM certificate")
    assert found(key=other / "node.key") == ["tls.key: is not the key of tls.cert"]
    assert found(cert=other / "node.crt", key=other / "node.key") == [
        f"tls.cert: names spiffe://run/site/me/role/operator; this is a {service}"
        + " of site eu-1" * (service == "sampler")
    ]
    (problem,) = found(cert=tmp_path / "old.crt", key=tmp_path / "old.key")
    assert problem.startswith("tls.cert: ")
    assert "expired" in problem
    if serves:
        assert found(revoked=tmp_path / "list")[0].startswith("tls.revoked: cannot read")


@pytest.mark.parametrize(
    ("service", "key"),
    [
        *(("coordinator", "data_dir"), ("relay", "cache_dir"), ("sampler", "state_dir"), ("learner", "state_dir")),
        ("learner", "signing_key"),
    ],
)
def test_files_that_no_start_takes_are_a_problem_of_their_key(service, key, tmp_path):
    (tmp_path / "file").write_text("no key\n")
    (tmp_path / "file").chmod(0o600)
    keys = {"tls.insecure": True, "state_dir": str(tmp_path / "state"), key: str(tmp_path / "file")}
    if service in ("coordinator", "relay"):
        del keys["state_dir"]
    config = load_service(service, None, [f"{name}={json.dumps(value)}" for name, value in keys.items()])

    assert next(problems(service, config)).key == key
    if key == "signing_key":
        (tmp_path / "file").unlink()
        assert next(problems(service, config)).key == key
