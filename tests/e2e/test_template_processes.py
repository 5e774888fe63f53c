"""Templates of every shape through a run of real processes: two sites in other time zones, rewards computed again."""

import json

import pytest

from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.engines import write_model
from tests.support.links import PLAINTEXT
from tests.support.templates import DATED, NO_SYSTEM, QWEN, THINKING
from tests.support.tokenizers import sentencepiece, words

SHAPES = {
    "dated": lambda: words(eos="<|end|>", bos_token="<s>", chat_template=DATED),
    "thinking": lambda: words(eos="<|im_end|>", chat_template=THINKING),
    "no-system": lambda: words(eos="<|end|>", bos_token="<s>", chat_template=NO_SYSTEM),
    "tools-first": lambda: words(eos="<|im_end|>", chat_template=QWEN),
    "base": lambda: words(eos="<|end|>"),
    "sentencepiece": lambda: sentencepiece(clean_up_tokenization_spaces=True),
}
ZONES = {"site-east": "Pacific/Kiritimati", "site-west": "Etc/GMT+12"}
"""Their dates are never the same."""


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("shape", SHAPES)
async def test_sites_in_other_time_zones_write_the_same_prompts(tmp_path, monkeypatch, shape):
    rows = [{"prompt": f"{number} plus one is , x", "answer": f"{number + 1}"} for number in range(24)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = SHAPES[shape]()
    shared = {
        "task": {"name": f"jsonl:{questions}", "evaluation_size": 2},
        "use_chat_template": bool(tokenizer.chat_template),
    }
    cluster = Cluster(
        tmp_path, learner={**shared, "verification": {"recompute_rewards": True}}, sampler=shared
    )  # fmt: skip
    cluster.model_dir = write_model(tmp_path / "own", vocab_size=len(tokenizer))
    for path in cluster.model_dir.glob("*token*"):
        path.unlink()
    tokenizer.save_pretrained(cluster.model_dir)
    for name in ("coordinator", "learner", *ZONES):
        with monkeypatch.context() as patch:
            patch.setenv("TZ", ZONES.get(name, "UTC"))
            cluster.start(name)
    try:
        async with CoordinatorClient(cluster.address, tls=PLAINTEXT) as client:
            status = await cluster.until(client, are_both_trained_on)
    finally:
        cluster.stop()

    assert {site.site: (site.quarantine, site.groups_failed) for site in status.sites} == dict.fromkeys(ZONES, ("", 0))


def are_both_trained_on(status):
    accepted = [site.groups_accepted for site in status.sites]
    # As much as is consumed cannot be of one of them alone.
    return len(accepted) == 2 and all(accepted) and status.ledger.consumed > max(accepted)
