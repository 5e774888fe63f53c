"""Templates of every shape through a run of real processes: two sites in other time zones, rewards computed again."""

import json
from collections import defaultdict

import pytest

from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.sample import MAX_PAGE, SampleFilter, SamplePage
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
NUM_PROMPTS = 22


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("shape", SHAPES)
async def test_sites_in_other_time_zones_write_the_same_prompts(tmp_path, monkeypatch, shape):
    rows = [{"prompt": f"{number} plus one is , x", "answer": f"{number + 1}"} for number in range(NUM_PROMPTS + 2)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = SHAPES[shape]()
    shared = {
        "task": {"name": f"jsonl:{questions}", "evaluation_size": 2},
        "use_chat_template": bool(tokenizer.chat_template),
    }
    cluster = Cluster(
        tmp_path,
        coordinator={"samples_every": 1},
        learner={**shared, "verification": {"recompute_rewards": True}},
        sampler=shared,
    )
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
            prompts = await prompts_by_site(client)
    finally:
        cluster.stop()

    assert {site.site: (site.quarantine, site.groups_failed) for site in status.sites} == dict.fromkeys(ZONES, ("", 0))
    of_both = [tuple(ids.values()) for ids in prompts.values() if len(ids) == 2]
    assert of_both
    assert all(east == west for east, west in of_both)


def are_both_trained_on(status):
    accepted = [site.groups_accepted for site in status.sites]
    # As much as is consumed cannot be of one of them alone.
    return len(accepted) == 2 and min(accepted) >= NUM_PROMPTS and status.ledger.consumed > max(accepted)


async def prompts_by_site(client):
    """The ids of each kept prompt, by its number, then by site."""
    found, page = defaultdict(dict), SamplePage(limit=MAX_PAGE)
    while page is not None:
        listed = await client.list_samples(wanted=SampleFilter(), page=page)
        for summary in listed.samples:
            sample = await client.get_sample(sample_id=summary.id)
            found[summary.prompt_index][summary.site] = sample.prompt_token_ids.tolist()
        page = listed.next_page
    return found
