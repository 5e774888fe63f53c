"""Keys on disk, signatures over exact bytes, and whom a node trusts."""

import logging
import os
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import ValidationError
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, UnsignedManifest, WrongSignature
from heterorl.common.identity.signing import Signer, Trust, load_signer, new_key, signed_by
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig

# RFC 8032, section 7.1, test 2: secret key, public key, message of one byte, signature.
SECRET = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
PUBLIC = "ed25519:3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
SIGNATURE = (
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def signer_of(secret: str = SECRET) -> Signer:
    return Signer(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))


def test_signature_is_the_standards():
    signer = signer_of()

    assert signer.public_key == PUBLIC
    assert signer.sign(b"\x72").hex() == SIGNATURE
    assert signed_by(b"\x72", bytes.fromhex(SIGNATURE), [PUBLIC]) == PUBLIC


def test_key_file_is_the_owners_alone_and_is_read_back(tmp_path):
    path = tmp_path / "learner.key"
    made = new_key(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_signer(path).public_key == made.public_key
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        new_key(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o010])
def test_key_that_others_can_touch_is_refused_with_the_remedy(tmp_path, mode):
    path = tmp_path / "learner.key"
    new_key(path)
    path.chmod(mode)

    with pytest.raises(ConfigError, match="chmod 600"):
        load_signer(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_key_of_another_user_is_given_to_this_one_and_not_made_anew(tmp_path):
    path = tmp_path / "learner.key"
    new_key(path)
    tmp_path.chmod(0o755)
    os.seteuid(10001)
    try:
        with pytest.raises(ConfigError) as closed:
            load_signer(path)
    finally:
        os.seteuid(0)

    assert "chown 10001" in str(closed.value)
    assert "keys new" not in str(closed.value)


def test_what_is_no_key_is_refused_without_showing_it(tmp_path):
    path = tmp_path / "learner.key"
    path.touch(mode=0o600)
    body = "MC4CAQAwBQYDK2VwBCIEIBROKEN-SECRET"
    path.write_text(f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError) as broken:
        load_signer(path)
    assert "SECRET" not in str(broken.value)
    assert broken.value.__cause__ is None

    other = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(other)
    with pytest.raises(ConfigError, match="not an Ed25519 key"):
        load_signer(path)
    with pytest.raises(ConfigError, match="keys new"):
        load_signer(tmp_path / "missing")
    with pytest.raises(ConfigError):
        load_signer(tmp_path)


def test_every_flipped_bit_breaks_the_signature():
    signer = signer_of()
    data = bytes(range(40))
    signature = signer.sign(data)

    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        assert signed_by(bytes(flipped), signature, [PUBLIC]) is None
    for position in range(8 * len(signature)):
        flipped = bytearray(signature)
        flipped[position // 8] ^= 1 << position % 8
        assert signed_by(data, bytes(flipped), [PUBLIC]) is None
    assert signed_by(data, signature[:-1], [PUBLIC]) is None


def test_trust_takes_any_of_its_keys_so_that_a_key_can_be_exchanged(tmp_path):
    old, new, stranger = (new_key(tmp_path / name) for name in ("old", "new", "stranger"))
    trust = Trust([old.public_key, new.public_key])

    for signer in (old, new):
        assert trust.check(b"manifest", signer.sign(b"manifest"), version=3) == signer.public_key
    with pytest.raises(WrongSignature, match="version 3.*2 trusted keys.*keys show"):
        trust.check(b"manifest", stranger.sign(b"manifest"), version=3)
    with pytest.raises(UnsignedManifest, match="version 3 is not signed.*signing_key"):
        trust.check(b"manifest", b"", version=3)


def test_no_keys_accept_everything_and_say_so_once(caplog):
    trust = Trust()
    with caplog.at_level(logging.WARNING):
        shown = [trust.check(b"a", b"", version=0), trust.check(b"b", b"x" * 64, version=1)]

    assert shown == ["unsigned", "unsigned"]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["trusted_keys is empty"]


@pytest.mark.parametrize("key", ["", PUBLIC.removeprefix("ed25519:"), PUBLIC[:-1], PUBLIC.upper(), PUBLIC + "0"])
def test_configurations_refuse_what_is_not_a_public_key(key):
    assert SamplerConfig(trusted_keys=(PUBLIC,)).trusted_keys == (PUBLIC,)
    with pytest.raises(ValidationError, match="trusted_keys"):
        SamplerConfig(trusted_keys=(key,))
    with pytest.raises(ConfigError, match="trusted_keys"):
        signed_by(b"", b"", [key])


def test_learner_that_trusts_without_signing_is_refused():
    with pytest.raises(ValidationError, match="its own versions"):
        LearnerConfig(trusted_keys=(PUBLIC,))


def test_command_makes_a_key_and_prints_only_its_public_half(tmp_path):
    path = tmp_path / "k"
    made = CliRunner().invoke(app, ["keys", "new", str(path)])
    shown = CliRunner().invoke(app, ["keys", "show", str(path)])

    assert made.output == shown.output == load_signer(path).public_key + "\n"
    assert (made.exit_code, shown.exit_code) == (0, 0)


def test_signer_does_not_show_its_key():
    assert SECRET not in repr(signer_of()) + str(vars(signer_of()))
