"""Each launcher's files: every configuration loads as its service would load it, every file passes its own checker."""

import os
import re
import socket
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from heterorl.common.errors import ConfigError
from heterorl.common.identity.tls import check_tls
from heterorl.launch.nodes import nodes_of
from heterorl.launch.render import _quoted, render, write_tree
from tests.support.launches import NODES, SCHEMAS, run_file, run_table
from tests.support.tools import check, tool

ROOT = Path(__file__).parents[3]
LAUNCHERS = ("compose", "systemd", "slurm", "k8s")


def configurations(launcher, run=None):
    """Name of each node to its TOML."""
    tree = render(launcher, run or run_file())
    if launcher != "k8s":
        return {Path(path).stem: tomllib.loads(text) for path, text in tree.items() if path.endswith(".toml")}
    documents = [document for text in tree.values() if text.startswith("# ") for document in manifests(text)]
    maps = [document for document in documents if document["kind"] == "ConfigMap"]
    return {each["metadata"]["name"]: tomllib.loads(each["data"]["node.toml"]) for each in maps}


def test_odd_characters_of_a_text_reach_every_service():
    odd = "a\u2028b\u0085c\u2029d\x9fe\ufefff\U000e0001g\th\ni\rj\x0bk\u00e9"
    run = run_file(run={**run_table()["run"], "task": {"name": "jsonl:/data/train.jsonl", "prompt": odd}})

    for launcher in LAUNCHERS:
        assert configurations(launcher, run)["learner"]["task"]["prompt"] == odd, launcher


def test_model_under_a_path_with_odd_characters_is_mounted_and_made_readable_from_there():
    path = "/models/My Model $x"
    run = run_file(run={**run_table()["run"], "model_dir": path})

    mounts = yaml.safe_load(render("compose", run)["gpu.example/compose.yaml"])["services"]["learner"]["volumes"]
    # Compose reads $$ as $, and puts a variable in place of $x.
    assert {mount["source"].replace("$$", "$") for mount in mounts if "Model" in mount["source"]} == {path}
    assert not any("$" in str(mount).replace("$$", "") for mount in mounts)
    assert f"sudo chmod -R a+rX '{path}'" in render("systemd", run)["README.md"]


def manifests(text):
    try:
        return [document for document in yaml.safe_load_all(text) if isinstance(document, dict) and "kind" in document]
    except yaml.YAMLError:
        return []


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_configuration_is_its_services(launcher):
    kinds = {node.name: node.kind for node in nodes_of(run_file())}

    found = configurations(launcher)

    assert sorted(found) == sorted(NODES)
    for name, table in found.items():
        config = SCHEMAS[kinds[name]].model_validate(table)
        check_tls(config.tls, key="coordinator", address="coord.example:50051")
        assert bool(getattr(config.tls, "revoked", "")) == (kinds[name] in ("coordinator", "relay"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_renders_are_equal_and_say_all_in_the_readme(launcher):
    first, second = (render(launcher, run_file()) for _ in range(2))

    assert list(first.items()) == list(second.items())
    assert all(f"| {name} |" in first["README.md"] for name in NODES)
    assert "./certs.sh" in first["README.md"]
    assert launcher == "slurm" or "/models/start" in first["README.md"]


def test_files_can_be_read_by_the_services_users_whatever_the_umask(tmp_path):
    umask = os.umask(0o077)
    try:
        write_tree(render("compose", run_file()), tmp_path / "out")
    finally:
        os.umask(umask)

    found = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o755}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o644, 0o755}


@pytest.mark.process
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_are_clean(launcher, tmp_path):
    write_tree(render(launcher, run_file()), tmp_path / "out")

    check(tool("shellcheck"), *map(str, sorted((tmp_path / "out").rglob("*.sh"))))
    for script in (tmp_path / "out").rglob("*.sbatch"):
        check(tool("shellcheck"), str(script))


@pytest.mark.process
@pytest.mark.parametrize(("run_there", "code"), [("", 0), ("my-run", 0), ("another", 2)])
def test_secrets_of_a_cluster_never_replace_those_of_another_run(tmp_path, run_there, code):
    write_tree(render("k8s", run_file()), tmp_path / "out")
    for name in NODES:
        (tmp_path / "out" / "credentials" / name).mkdir(parents=True)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(
        f'#!/bin/bash\nif [[ $1 == get ]]; then printf %s {run_there!r}; else echo "$@" >> {tmp_path}/said; fi\n'
    )
    kubectl.chmod(0o755)

    done = subprocess.run(
        [tmp_path / "out" / "secrets.sh"], env={**os.environ, "PATH": f"{kubectl.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == code, done.stderr
    assert (tmp_path / "said").exists() == (code == 0)
    assert ("belongs to run another" in done.stderr) == (code == 2)


def test_samplers_see_their_own_gpus_under_the_numbers_that_they_have_there():
    devices = {name: configurations(name)["sampler-eu-2"]["engine"]["devices"] for name in LAUNCHERS}

    # A unit sees the machine's; a container, a job and a pod see theirs alone.
    assert devices == {"systemd": [2, 3], "compose": [0, 1], "slurm": [0, 1], "k8s": [0, 1]}
    document = yaml.safe_load(render("compose", run_file())["eu.example/compose.yaml"])
    reserved = document["services"]["sampler-eu-2"]["deploy"]["resources"]["reservations"]["devices"]
    assert [each["device_ids"] for each in reserved] == [["2", "3"]]


@pytest.mark.process
def test_compose_files_satisfy_specification_and_program(tmp_path):
    write_tree(render("compose", run_file()), tmp_path / "out")
    found = sorted((tmp_path / "out").glob("*/compose.yaml"))

    assert len(found) == 4
    for path in found:
        check(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path))
    for path in found:
        check(tool("docker-compose"), "-f", str(path), "config", "--quiet")


def test_containers_that_serve_are_asked_on_their_own_port():
    relay = yaml.safe_load(render("compose", run_file())["eu.example/compose.yaml"])["services"]["relay-eu"]
    standing_by = yaml.safe_load(render("compose", with_standby())["b.example/compose.yaml"])["services"]

    # The image has a check for port 50051, which a relay does not have, and a standby only once it serves.
    assert relay["healthcheck"]["test"][:4] == ["CMD", "heterorl", "health", "127.0.0.1:50061"]
    assert standing_by["coordinator-2"]["healthcheck"] == {"disable": True}


def with_standby():
    """Two coordinators that share PostgreSQL and a bucket, and one sampler."""
    postgres = {"url": "postgresql://heterorl@db.example/run", "standby": ["b.example"]}
    config = {"payloads": {"bucket": "my-bucket"}}
    coordinator = {"host": "a.example", "postgres": postgres, "config": config}
    return run_file(coordinator=coordinator, relays=[], samplers=[{"site": "us", "host": "us.example"}])


def test_on_one_host_containers_dial_names_and_publish_on_loopback_alone():
    table = run_table()
    table |= {"relays": [], "samplers": [{"site": "us"}], "learner": {}, "coordinator": {"host": "127.0.0.1"}}
    tree = render("compose", run_file(**table))

    services = yaml.safe_load(tree["127.0.0.1/compose.yaml"])["services"]
    assert tomllib.loads(tree["127.0.0.1/config/sampler-us.toml"])["coordinator"] == "coordinator:50051"
    assert services["coordinator"]["ports"] == ["127.0.0.1:50051:50051", "127.0.0.1:9101:9101"]
    assert "--host 127.0.0.1 --host coordinator" in tree["certs.sh"]


@pytest.mark.parametrize("launcher", ["compose", "k8s"])
def test_containers_do_not_dial_loopback_of_their_host(launcher):
    table = run_table()
    table |= {"relays": [], "samplers": [{"site": "us"}], "learner": {}, "coordinator": {"host": "127.0.0.1"}}
    assert render(launcher, run_file(**table), ["coordinator"])
    with pytest.raises(ConfigError, match=r"coordinator\.host: sampler-us is a container and .* 127\.0\.0\.1:50051"):
        render(launcher, run_file(**table), ["us"])
    table |= {"relays": [{"site": "us", "host": "localhost"}], "samplers": [{"site": "us.1", "relay": "us"}]}
    with pytest.raises(ConfigError, match=r"relays\.host: sampler-us-1 .* localhost:50061"):
        render("compose", run_file(**table), ["coordinator", "us.1"])


def test_a_coordinator_alone_on_a_host_with_a_name_is_reached_by_this_name():
    run = run_file(coordinator={"host": "box.example"}, relays=[], samplers=[{"site": "us"}], learner={})
    tree = render("compose", run)

    coordinator = yaml.safe_load(tree["box.example/compose.yaml"])["services"]["coordinator"]
    assert "--coordinator box.example:50051\n" in tree["certs.sh"]
    assert coordinator["ports"] == ["50051:50051", "127.0.0.1:9101:9101"]


@pytest.mark.process
def test_units_are_the_installed_ones_with_the_names_of_nodes(tmp_path):
    shipped = ROOT / "services" / "launch" / "units" / "heterorl-sampler@.service"
    tree = render("systemd", run_file())
    unit = tree["us.example/etc/systemd/system/heterorl-sampler-us.service"]

    assert unit == shipped.read_text().replace("%i", "sampler-us")
    for path, text in tree.items():
        if path.endswith(".service"):
            assert "%i" not in text
            # The program is installed by deploy/install.sh; here another one stands in its place.
            copy = tmp_path / Path(path).name
            programs = ("/opt/heterorl/current/bin/heterorl", "/opt/heterorl/current-vllm/bin/heterorl")
            for program in programs:
                text = text.replace(program, "/bin/true")
            copy.write_text(text)
            check(tool("systemd-analyze"), "verify", "--man=no", str(copy))


@pytest.mark.process
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_revocation_reaches_coordinator_and_relays_by_the_commands_of_the_readme(launcher, tmp_path):
    tree = render(launcher, run_file())
    write_tree(tree, tmp_path)
    # Instead of the authority's program: no key, no wait.
    program = tmp_path / "heterorl"
    program.write_text(
        '#!/bin/bash\nfor last; do :; done\nmkdir -p certs "$last"; touch certs/revoked "$last/node.crt"\n'
    )
    program.chmod(0o755)
    issue = ["env", "-C", str(tmp_path), f"HETERORL={program}", "./certs.sh"]
    check(*issue)
    (tmp_path / "certs" / "revoked").write_text("2a  # sampler us\n")
    check(*issue)

    lists = [path for path in tmp_path.rglob("*revoked") if path.parent.name != "certs"]
    assert [(path.read_text(), stat.S_IMODE(path.stat().st_mode)) for path in lists] == [
        ("2a  # sampler us\n", 0o644)
    ] * 2
    words = " ".join(tree["README.md"].split())
    assert {"compose": "HOST/secrets/NODE/revoked", "slurm": "credentials/NODE/revoked"}.get(launcher, "") in words
    assert "After `heterorl certs revoke` run " in words
    if launcher != "systemd":
        assert {path.parent.name for path in lists} == {"coordinator", "relay-eu"}
        return
    # Install and the one command after a revocation copy it to where the configuration has it.
    assert "cp -rT coord.example/etc /etc" in tree["README.md"]
    assert "sudo cp HOST/etc/heterorl/*.revoked /etc/heterorl/\n" in tree["README.md"]
    for path in lists:
        assert f'revoked = "/etc/heterorl/{path.name}"' in path.with_suffix(".toml").read_text()


@pytest.mark.process
def test_a_copy_to_a_host_leaves_the_nodes_of_another_run(tmp_path):
    def copy(run_id):
        run = run_file(run={**run_table()["run"], "id": run_id}, coordinator={"host": "gpu.example"})
        tree = render("systemd", run)
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        write_tree(tree, place)
        (line,) = (line for line in tree["README.md"].splitlines() if "cp -rT gpu.example/etc /etc" in line)
        line = line.replace("sudo deploy/install.sh", "true").replace("sudo ", "").replace("/etc/h", f"{etc}/h")
        line = line.replace(" /etc ", f" {etc} ")
        return subprocess.run(["bash", "-c", line], cwd=place, capture_output=True, text=True)

    etc = tmp_path / "host"
    (etc / "heterorl").mkdir(parents=True)
    (etc / "heterorl" / "coordinator.toml").write_text("# The coordinator of one run.\n")

    assert [copy(run_id).returncode for run_id in ("one.run", "one.run", "one-run")] == [0, 0, 1]
    assert [line.partition(". ")[0] for line in copy("one-run").stdout.splitlines()] == [
        "# coordinator of run one.run", "# learner of run one.run",
    ]  # fmt: skip
    assert "one.run" in (etc / "heterorl" / "learner.toml").read_text()


def test_learner_on_several_machines_is_an_agent_on_each():
    table = run_table()
    learner = {**table["learner"], "nnodes": 2, "other_hosts": ["gpu-2.example"], "devices": [2, 3]}
    tree = render("systemd", run_file(learner=learner))

    unit = "etc/systemd/system/heterorl-learner.service"
    first, second = (tree[f"{host}/{unit}"] for host in ("gpu.example", "gpu-2.example"))
    assert first.replace("--node-rank 0 ", "--node-rank 1 ") == second != first
    assert "torch.distributed.run --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr gpu.example" in first
    assert "\nEnvironment=CUDA_VISIBLE_DEVICES=2,3\n" in first
    # The operator's file is optional; the launcher writes none.
    assert "HETERORL_" not in first.partition("[Service]")[2]
    assert "EnvironmentFile=-/etc/heterorl/learner.env" in first
    assert not any(path.endswith(".env") for path in tree)
    script = render("slurm", run_file(learner=learner))["learner.sbatch"]
    assert "#SBATCH --nodes=2" in script
    assert "--nproc-per-node 2" in script
    for refusing in ("compose", "k8s"):
        with pytest.raises(ConfigError, match="learner.nnodes"):
            render(refusing, run_file(learner=learner))


@pytest.mark.parametrize(("launcher", "part"), [("systemd", "coordinator"), ("compose", "eu"), ("k8s", "us")])
def test_machines_of_a_learner_that_slurm_starts_bind_no_other_launcher(launcher, part):
    run = run_file(learner={**run_table()["learner"], "nnodes": 2})

    assert "README.md" in render(launcher, run, [part])
    with pytest.raises(ConfigError, match="learner"):
        render(launcher, run, [part, "learner"])


def test_coordinator_with_postgres_finds_its_directory_and_password():
    postgres = {"url": "postgresql://heterorl@db.example/run", "standby": ["b.example"]}
    coordinator = {"host": "a.example", "data_dir": "/shared/run", "postgres": postgres}
    run = run_file(coordinator=coordinator, relays=[], samplers=[{"site": "us", "host": "us.example"}])

    tree = render("systemd", run)

    unit = tree["b.example/etc/systemd/system/heterorl-coordinator-2.service"]
    assert "--config /etc/heterorl/coordinator-2.toml --log json --standby" in unit
    assert "--set data_dir=/shared/run" in unit
    assert "ReadWritePaths=/shared/run\n" in unit
    assert "LoadCredential=tls:/etc/heterorl/credentials/coordinator-2\n" in unit
    with pytest.raises(ConfigError, match="coordinator.data_dir"):
        render("k8s", run)


def test_coordinator_over_plaintext_reads_the_password_of_its_store():
    table = run_table()
    postgres = {"url": "postgresql://heterorl@db.example/run"}
    coordinator = {"host": "127.0.0.1", "postgres": postgres}
    table |= {"relays": [], "samplers": [{"site": "us"}], "learner": {}, "coordinator": coordinator}

    tree = render("systemd", run_file(**table, tls={"insecure": True}))

    unit = tree["127.0.0.1/etc/systemd/system/heterorl-coordinator.service"]
    path = re.search(r"^Environment=PGPASSFILE=(.*)$", unit, re.MULTILINE)[1]
    assert f"sudo install -o heterorl -g heterorl -m 0600 PGPASS {path} " in tree["README.md"]
    # libpq reads no file that a group can read, and systemd may give credentials mode 0440.
    assert not path.startswith("%d")
    assert "LoadCredential" not in unit
    assert "tls.ca" not in unit


@pytest.mark.parametrize("name", ["passfile", "sslrootcert", "sslcert", "sslkey"])
def test_file_of_the_store_that_units_do_not_see_is_refused(name):
    def written(path, launcher="systemd", **config):
        url = f"postgresql://heterorl@db.example/run?sslmode=verify-full&{name}={path.replace('/', '%2F')}"
        coordinator = {"host": "coord.example", "postgres": {"url": url}, "config": config}
        return render(launcher, run_file(coordinator=coordinator))

    with pytest.raises(ConfigError, match=rf"coordinator\.postgres\.url \({name}\)"):
        written("/home/me/root.crt")
    with pytest.raises(ConfigError, match=r"coordinator\.config\.payloads\.credentials_file"):
        written("/etc/heterorl/x", payloads={"bucket": "mine", "credentials_file": "/root/.aws/credentials"})
    assert written("/etc/heterorl/root.crt")
    assert written("/home/me/root.crt", launcher="slurm")


PLACES = {"learner": "state_dir", "relay-eu": "cache_dir", "sampler-us": "state_dir"}


def with_places(place="/big/{}"):
    """The example with a directory of state for each node of PLACES."""
    table = run_table()
    owners = {"learner": table["learner"], "relay-eu": table["relays"][0], "sampler-us": table["samplers"][1]}
    for name, key in PLACES.items():
        owners[name]["config"] = {key: place.format(name)}
    return run_file(**table)


def test_a_directory_of_state_in_a_config_table_is_the_nodes():
    units, compose, jobs = (render(launcher, with_places()) for launcher in ("systemd", "compose", "slurm"))

    for name, key in PLACES.items():
        place = f"/big/{name}"
        (unit,) = (text for path, text in units.items() if path.endswith(f"/heterorl-{name}.service"))
        assert f"--set {key}={place}\n" in unit
        assert f"ReadWritePaths={place}\n" in unit
        services = [yaml.safe_load(text)["services"] for path, text in compose.items() if path.endswith("compose.yaml")]
        (service,) = (each[name] for each in services if name in each)
        assert {"type": "bind", "source": place, "target": place, "read_only": False} in service["volumes"]
        assert tomllib.loads(jobs[f"config/{name}.toml"])[key] == place


@pytest.mark.parametrize(("launcher", "owner"), [("systemd", "heterorl"), ("compose", "10001")])
def test_a_directory_of_state_is_made_for_its_node_before_the_start(launcher, owner):
    text = render(launcher, with_places())["README.md"]

    # A unit does not start without it, and Docker would make it for root.
    made = f"sudo install -d -o {owner} -g {owner} -m 0700 /big/sampler-us    # on us.example\n"
    assert made in text
    assert text.index(made) < text.index("enable --now" if launcher == "systemd" else "cd us.example &&")
    assert "install -d" not in render(launcher, run_file())["README.md"]


def test_directory_of_backups_is_the_coordinators_to_write():
    run = run_file(coordinator={"host": "coord.example", "config": {"backup_dir": "/backups"}})
    systemd, compose = render("systemd", run), render("compose", run)

    unit = systemd["coord.example/etc/systemd/system/heterorl-coordinator.service"]
    assert "\nReadWritePaths=/backups\n" in unit
    assert "--set data_dir=/var/lib/heterorl/coordinator" in unit
    assert "-m 0700 /backups    # on coord.example\n" in systemd["README.md"]
    service = yaml.safe_load(compose["coord.example/compose.yaml"])["services"]["coordinator"]
    assert {"type": "bind", "source": "/backups", "target": "/backups", "read_only": False} in service["volumes"]
    assert "-m 0700 /backups    # on coord.example\n" in compose["README.md"]
    with pytest.raises(ConfigError, match=r"coordinator\.config\.backup_dir: Kubernetes stores it"):
        render("k8s", run)


@pytest.mark.parametrize("place", ["/home/me/{}", "/tmp/{}", "/srv/../root/{}"])
def test_a_directory_of_state_that_units_do_not_see_is_refused(place):
    # PrivateTmp would delete it when the unit stops.
    with pytest.raises(ConfigError, match=r"cache_dir: units of systemd cannot read"):
        render("systemd", with_places(place))
    assert render("slurm", with_places(place))


def test_a_directory_of_state_that_no_launcher_can_give_is_refused():
    with pytest.raises(ConfigError, match=r"relays\.config\.cache_dir: Kubernetes stores it"):
        render("k8s", with_places())
    with pytest.raises(ConfigError, match=r"relays\.config\.cache_dir: 'state/relay-eu' is not a path from /"):
        render("systemd", with_places("state/{}"))
    samplers = [{**run_table()["samplers"][0], "config": {"state_dir": "/big/eu"}}]
    with pytest.raises(ValueError, match=r"config\.state_dir: count = 2 samplers cannot share it"):
        run_file(samplers=samplers)
    # Another launcher's coordinator may have one.
    run = run_file(coordinator={"host": "coord.example", "data_dir": "/shared/run"})
    assert "01-sampler-us.yaml" in render("k8s", run, ["us"])


def test_manifests_satisfy_the_api_of_kubernetes():
    validator = pytest.importorskip("kubernetes_validate")
    tree = render("k8s", run_file())
    documents = [document for path, text in tree.items() if path.endswith(".yaml") for document in manifests(text)]

    # Six nodes, two of which serve.
    assert len(documents) == 6 * 2 + 2
    for document in documents:
        validator.validate(document, "1.34", strict=True)
    wrong = {**documents[0], "datas": {}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, "1.34", strict=True)


@pytest.mark.process
def test_coordinator_that_listens_and_does_not_answer_is_not_alive(tmp_path):
    tree = render("k8s", run_file())
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in manifests(tree["01-coordinator.yaml"])
        if document["kind"] == "StatefulSet"
    )
    command = pod["containers"][0]["livenessProbe"]["exec"]["command"]
    (tmp_path / "heterorl").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "heterorl").chmod(0o755)

    def alive(port):
        script = command[-1].replace("50051", str(port))
        return subprocess.run([*command[:-1], script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}).returncode

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert alive(port) == 3
    # As while a start waits for its store, and in a standby.
    assert alive(port) == 0


@pytest.mark.parametrize("launcher", ["compose", "k8s"])
def test_plaintext_is_refused_where_nodes_meet_over_a_network(launcher):
    table = run_table()
    table |= {"relays": [], "samplers": [{"site": "us"}], "learner": {}, "coordinator": {"host": "127.0.0.1"}}
    run = run_file(**table, tls={"insecure": True})

    with pytest.raises(ConfigError, match="tls.insecure"):
        render(launcher, run)
    assert "certs.sh" not in render("systemd", run)
    assert "LoadCredential" not in render("systemd", run)["127.0.0.1/etc/systemd/system/heterorl-coordinator.service"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_readme_says_where_each_coordinator_finds_the_secrets_of_its_stores(launcher):
    def words(payloads):
        postgres = {"url": "postgresql://me@db.example/runs", "standby": ["two.example"]}
        coordinator = {"host": "coord.example", "postgres": postgres, "config": {"payloads": payloads}}
        return render(launcher, run_file(coordinator=coordinator))["README.md"]

    text = words({"bucket": "mine", "credentials_file": "/etc/heterorl/bucket"})

    assert "## Secrets of the stores" in text
    assert "PostgreSQL's password" in text or "PGPASSFILE" in text
    assert ("`sslrootcert`" in text) == (launcher != "slurm")
    assert "`/etc/heterorl/bucket`" in text
    if launcher == "systemd":
        # install.sh writes heterorl-coordinator.service, which the run's own has to replace.
        assert "sudo deploy/install.sh coordinator && sudo cp -rT two.example/etc /etc" in text
        assert "PGPASS /etc/heterorl/coordinator-2.pgpass    # on the host of coordinator-2" in text
        assert "on the host of coordinator and of coordinator-2" in text
        assert "-m 0600 KEYS /etc/heterorl/bucket\n" in text
    assert "environment of each coordinator or from its machine's role" in words({"bucket": "mine"})
    assert "Secrets of the stores" not in render(launcher, run_file())["README.md"]


def limits(launcher, tree, node):
    """Where a rendered node's limit of memory stands; None for none."""
    if launcher == "compose":
        found = {name: each for path, text in tree.items() if path.endswith("compose.yaml")
                 for name, each in yaml.safe_load(text)["services"].items()}  # fmt: skip
        return found[node].get("mem_limit")
    text = next(text for path, text in tree.items() if re.search(rf"{node}\.(service|sbatch|yaml)$", path))
    if launcher == "k8s":
        container = manifests(text)[-1]["spec"]["template"]["spec"]["containers"][0]
        return container.get("resources", {}).get("limits", {}).get("memory")
    found = re.findall(r"^(?:#SBATCH --mem|MemoryMax)=(.*)$", text, re.MULTILINE)
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_memory_has_the_limit_that_the_run_says_or_none(launcher):
    table = run_table()
    bare = render(launcher, run_file())
    samplers = [{**each, "memory": "512m"} for each in table["samplers"]]
    relays = [{**each, "memory": "2g"} for each in table["relays"]]
    learner = {**table["learner"], "memory": "200g"}
    tree = render(launcher, run_file(learner=learner, samplers=samplers, relays=relays))

    assert [limits(launcher, bare, name) for name in ("learner", "sampler-eu-1", "sampler-us")] == [None] * 3
    # Shared memory of a node with GPUs counts against its limit and comes on top.
    wanted = {"learner": "208g", "sampler-eu-1": "8704m", "sampler-us": "512m", "relay-eu": "2g"}
    spelt = {name: text if launcher == "compose" else text.upper() for name, text in wanted.items()}
    if launcher == "k8s":
        spelt = {name: f"{text}i" for name, text in spelt.items()}
    assert {name: limits(launcher, tree, name) for name in wanted} == spelt
    own = {"compose": "4g", "k8s": "4Gi", "slurm": None, "systemd": "8G"}
    assert limits(launcher, bare, "coordinator") == own[launcher]


@pytest.mark.parametrize("memory", ["200", "200 GB", "0g", "-1g", "many"])
def test_an_amount_of_memory_without_its_unit_is_refused(memory):
    with pytest.raises(ValueError, match=r"learner\.memory"):
        run_file(learner={**run_table()["learner"], "memory": memory})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_parts_of_a_run_by_two_launchers_make_the_whole(launcher):
    first = render(launcher, run_file(), ["coordinator", "eu"])
    second = render(launcher, run_file(), ["learner", "us"])

    def table(tree):
        return set(re.findall(r"^\| \d+ \| (\S+) \|", tree["README.md"], re.MULTILINE))

    assert (table(first), table(second)) == (
        {"coordinator", "relay-eu", "sampler-eu-1", "sampler-eu-2"}, {"learner", "sampler-us"},
    )  # fmt: skip
    # One authority, and nobody's certificate twice.
    issued = [re.findall(r"^issue \S+ (\S+ \S+)", tree["certs.sh"], re.MULTILINE) for tree in (first, second)]
    assert len({*issued[0], *issued[1]}) == len(issued[0]) + len(issued[1]) == len(NODES) + 1
    assert all("authority=certs\n" in tree["certs.sh"] for tree in (first, second))
    # What the other launcher starts is dialled by its host.
    text = "".join(text for path, text in second.items() if "sampler-us" in path or path.endswith("compose.yaml"))
    assert "coord.example:50051" in text or launcher == "compose"
    assert "coordinator:50051" not in text
    assert "targets/my-run.yml" in first
    assert "targets/my-run.yml" not in second
    assert "operator" not in second["README.md"]


def test_nodes_dial_names_within_a_launcher_and_hosts_beyond_it():
    whole, part = (
        {node.name: node for node in nodes_of(run_file(), dial="name", parts=parts)}
        for parts in ((), ("eu", "learner"))
    )

    assert whole["learner"].config["coordinator"] == "coordinator:50051"
    assert part["learner"].config["coordinator"] == "coord.example:50051"
    assert part["sampler-eu-1"].config["coordinator"] == "relay-eu:50061"
    assert part["sampler-eu-1"].needs == ("relay-eu",)
    with pytest.raises(ConfigError, match=r"--part: the run has no part 'asia'.*use coordinator, learner, eu"):
        nodes_of(run_file(), parts=("asia",))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_operators_commands_know_the_standby_too(launcher):
    script = render(launcher, with_standby())["certs.sh"]

    assert "issue operator operator me --coordinator a.example:50051,b.example:50051\n" in script


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_prometheus_is_told_where_the_coordinator_is(launcher):
    table = run_table()
    coordinator = {**table["coordinator"], "config": {"metrics_port": 9200, "metrics_host": "0.0.0.0"}}
    trees = [render(launcher, run_file(**changes)) for changes in ({}, {"coordinator": coordinator})]

    own, other = (yaml.safe_load(tree["targets/my-run.yml"])[0] for tree in trees)
    assert own["labels"] == {"run": "my-run", "service": "coordinator"}
    expected = {"k8s": ("coordinator:9101", "coordinator:9200")}.get(launcher, ("127.0.0.1:9101", "coord.example:9200"))
    if launcher == "compose":
        # Its port is published on loopback alone.
        expected = ("127.0.0.1:9101", "127.0.0.1:9200")
    assert (own["targets"][0], other["targets"][0]) == expected


def test_prometheus_in_a_cluster_asks_each_coordinator_also_one_that_stands_by():
    tree = render("k8s", with_standby())

    (entry,) = yaml.safe_load(tree["targets/my-run.yml"])
    services = [each for path in ("01-coordinator.yaml", "02-coordinator-2.yaml") for each in manifests(tree[path])]
    services = [each for each in services if each["kind"] == "Service"]
    assert entry["targets"] == ["coordinator:9101", "coordinator-2:9101"]
    assert [each["metadata"]["name"] for each in services] == ["coordinator", "coordinator-2"]
    # It is ready only once it serves.
    assert [each["spec"]["publishNotReadyAddresses"] for each in services] == [True, True]


def test_manifests_are_read_by_people():
    text = render("k8s", run_file())["03-learner.yaml"]

    assert "  node.toml: |\n    # learner of run my-run." in text
    assert "defaultMode: 0440}" in text
    container = manifests(text)[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"requests": {"cpu": "8"}, "limits": {"nvidia.com/gpu": 2}}
    assert tomllib.loads(manifests(text)[0]["data"]["node.toml"])["group_size"] == 4


def test_a_run_whose_name_is_a_number_stays_a_text_in_yaml():
    run = run_file(run={**run_table()["run"], "id": "2026"})

    (entry,) = yaml.safe_load(render("compose", run)["targets/2026.yml"])
    (pod,) = (each for each in manifests(render("k8s", run)["03-learner.yaml"]) if each["kind"] == "StatefulSet")

    assert entry["labels"]["run"] == "2026"
    assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "2026"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_certificates_in_a_config_table_are_refused_rather_than_replaced(launcher):
    relays = [{**run_table()["relays"][0], "config": {"tls": {"revoked": "/srv/revoked"}}}]

    with pytest.raises(ConfigError, match=r"relays\.config\.tls: the launcher sets this table"):
        render(launcher, run_file(relays=relays))


def test_names_are_as_long_as_kubernetes_takes_them():
    def tree(site, launcher="k8s"):
        # Each of Kubernetes' labels takes 63 characters, the last of them a letter or digit.
        run = {**run_table()["run"], "id": "r" * 62 + "--"}
        return render(launcher, run_file(run=run, relays=[], samplers=[{"site": site, "host": "us.example"}]))

    longest = f"{'a' * 32}.{'b' * 11}"
    documents = manifests(tree(longest)["03-sampler-" + longest.replace(".", "-") + ".yaml"])
    labels = [each["metadata"]["labels"]["app.kubernetes.io/part-of"] for each in documents]
    assert labels == ["r" * 62] * 2
    with pytest.raises(ConfigError, match=r"samplers\.site: the name sampler-a+-b+ has 53 characters"):
        tree(longest + "b")
    assert "README.md" in tree(longest + "b", "systemd")


@pytest.mark.parametrize("text", ["a \N{GRINNING FACE} b", "a\N{LINE SEPARATOR}b", 'a"b\\c', "a$b\x7f"])
def test_a_text_of_the_run_is_the_same_text_in_yaml(text):
    assert yaml.safe_load(f"key: {_quoted(text)}") == {"key": text}
