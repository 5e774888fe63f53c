"""What is given between two turns: the whole rendering's tokens, whatever was drawn before; and what is refused."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, PromptRefused
from heterorl.common.model.model_directory import copy_files
from heterorl.common.model.model_loading import TokenLimits
from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.text.conversation import Conversation, try_prompts, try_turns
from heterorl.common.text.prompter import Prompter
from tests.support.conversations import CHATML, FAMILIES, GEMMA, LLAMA3, QWEN3, TOOLS, prompter_of, words_of
from tests.support.examples import examples
from tests.support.plain_task import plain_task
from tests.support.templates import SWITCHED, THINKING
from tests.support.tokenizers import sentencepiece, words

NUM_CONVERSATIONS = examples(60)
"""Of each family."""
PIECES = (
    "guess", "12", "\n", "\n\n", " ", "  ", "{", '"', "<b>", "higher", "a\u0301", "\u00b5", "\U0001f600", "I'm", "\t",
    "<|im_", "end|>", "user\n", "=", "0", "\u4e2d", "</s", "\u2581",
)  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    template, tokenizer = FAMILIES[request.param]
    return request.param, prompter_of(tmp_path_factory.mktemp(request.param), template, tokenizer())


def text_of(chance):
    """Text that no template trims."""
    return "x" + "".join(chance.choices(PIECES, k=chance.randrange(12))) + "y"


def conversation_of(chance, name):
    """Asked messages, tools, and turns: of each what the policy says and what it is said."""
    knows_tools = name in ("qwen3", "llama3")
    tools = TOOLS if knows_tools and chance.random() < 0.5 else ()
    asked = [Message(role="user", content=text_of(chance))]
    if name != "gemma" and chance.random() < 0.5:
        asked.insert(0, Message(role="system", content=text_of(chance)))
    turns = []
    for _ in range(chance.randrange(1, 5)):
        if knows_tools and chance.random() < 0.5:
            new = [Message(role="tool", content=text_of(chance), name="lookup") for _ in range(chance.randrange(1, 3))]
        else:
            new = [Message(role="user", content=text_of(chance))]
        turns.append((text_of(chance), new))
    return asked, tools, turns


def whole_of(prompter, asked, tools, turns):
    """Ids of the whole conversation, written by the template at once."""
    messages = [*asked]
    for said, new in turns:
        messages += [Message(role="assistant", content=said), *new]
    prompt = Prompt(index=0, text="", answer="", messages=tuple(messages))
    return prompter.encode_prompt(prompt, tools=tools).tolist()


def test_a_sequence_of_canonical_turns_is_the_whole_rendering(family):
    name, prompter = family
    chance = random.Random(f"canonical {name}")
    end = prompter.given([Message(role="user", content="x")], is_cut=True)[0]
    differing = 0
    for _ in range(NUM_CONVERSATIONS):
        asked, tools, turns = conversation_of(chance, name)
        prompt = Prompt(index=0, text="", answer="", messages=tuple(asked))
        ids = prompter.encode_prompt(prompt, tools=tools).tolist()
        for said, new in turns:
            is_cut = chance.random() < 0.3
            ids += [*prompter.tokens(said).tolist(), *([] if is_cut else [end])]
            ids += prompter.given(new, is_cut=is_cut).tolist()
        differing += ids != whole_of(prompter, asked, tools, turns)

    assert differing == 0


def drawn_of(chance, prompter, end):
    """Ids of a turn that no tokenizer would write: text in many small pieces, halves of characters, any ids."""
    tokenizer = prompter.tokenizer
    said = [tokenizer.encode(piece, add_special_tokens=False) for piece in text_of(chance)]
    ids = list(itertools.chain.from_iterable(said))
    ids += chance.choices(range(len(tokenizer)), k=chance.randrange(4))
    return [each for each in ids if each != end]


def test_drawn_ids_stay_as_they_were_drawn(family):
    name, prompter = family
    chance = random.Random(f"drawn {name}")
    end = int(prompter.given([Message(role="user", content="x")], is_cut=True)[0])
    unlike = 0
    for _ in range(NUM_CONVERSATIONS):
        asked, tools, turns = conversation_of(chance, name)
        prompt = Prompt(index=0, text="", answer="", messages=tuple(asked))
        ids, spans = prompter.encode_prompt(prompt, tools=tools).tolist(), []
        for _, new in turns:
            drawn = [*drawn_of(chance, prompter, end), end]
            unlike += prompter.tokens(prompter.decode(np.array(drawn))).tolist() != drawn[:-1]
            spans.append((len(ids), drawn))
            ids += drawn + prompter.given(new, is_cut=False).tolist()
        assert all(ids[start : start + len(drawn)] == drawn for start, drawn in spans)
        # What is given does not depend on what was drawn: it is the whole rendering's of other answers.
        whole = whole_of(prompter, asked, tools, turns)
        last = prompter.given(turns[-1][1], is_cut=True).tolist()
        assert ids[-len(last) :] == last == whole[-len(last) :]

    assert unlike > NUM_CONVERSATIONS, "most drawn turns are no tokenizer's"


def test_the_newline_behind_the_end_token_is_given_and_never_drawn(tmp_path):
    prompter = prompter_of(tmp_path / "model", CHATML, words_of(eos="<|im_end|>"))
    said = [Message(role="user", content="higher")]

    given = prompter.given(said, is_cut=False)
    assert prompter.tokenizer.decode(given) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
    assert prompter.tokenizer.decode(prompter.given(said, is_cut=True)[:2]) == "<|im_end|>\n"
    assert given.dtype == np.int32


def test_white_space_that_an_end_token_takes_is_not_given(tmp_path):
    # As Phi 3 has it: the newline behind the token is part of it wherever a whole text is encoded.
    prompter = prompter_of(tmp_path / "model", CHATML, words_of(eos="<|im_end|>", rstrip=True))

    given = prompter.given([Message(role="user", content="higher")], is_cut=False)

    assert prompter.tokenizer.convert_ids_to_tokens(given[:2].tolist()) == ["<|im_start|>", "user"]


def test_a_tokenizer_that_puts_a_space_before_each_piece_is_taken(tmp_path):
    # As Llama 2 has it, and what it makes of the text behind an end token is the same alone and in the whole.
    tokenizer = sentencepiece()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    prompter = prompter_of(tmp_path / "model", GEMMA, tokenizer)
    said = [Message(role="user", content="x")]

    try_turns(prompter)
    given = prompter.given(said, is_cut=False).tolist()
    assert whole_of(prompter, said, (), [("y", said)])[-len(given) :] == given
    assert tokenizer.convert_ids_to_tokens(given[:2]) == ["\u2581", "\n"]


def test_a_thought_that_the_template_would_leave_out_stays(tmp_path):
    prompter = prompter_of(tmp_path / "model", QWEN3, words_of(eos="<|im_end|>"))
    asked = [Message(role="user", content="x")]
    said, new = "<think>\nlower\n</think>\n\n12", [Message(role="user", content="higher")]
    prompt = Prompt(index=0, text="", answer="", messages=tuple(asked))

    ids = [*prompter.encode_prompt(prompt), *prompter.tokens(f"{said}<|im_end|>"), *prompter.given(new, is_cut=False)]

    assert said in prompter.tokenizer.decode(ids)
    assert said not in prompter.tokenizer.decode(whole_of(prompter, asked, (), [(said, new)]))
    plain = whole_of(prompter, asked, (), [("12", new)])
    given = prompter.given(new, is_cut=True).tolist()
    assert plain[-len(given) :] == given == [int(each) for each in ids[-len(given) :]]


@pytest.mark.parametrize(
    ("template", "tools"),
    [(QWEN3, ()), (QWEN3, TOOLS), (CHATML, ()), (LLAMA3, ()), (LLAMA3, TOOLS), (GEMMA, ()), (THINKING, ())],
    ids=["qwen3", "qwen3-tools", "chatml", "llama3", "llama3-tools", "gemma", "thinking"],
)
def test_templates_that_write_turns_one_behind_another_are_taken(tmp_path, template, tools):
    ends = {LLAMA3: "<|eot_id|>", GEMMA: "<end_of_turn>"}
    tokenizer = FAMILIES["gemma"][1]() if template == GEMMA else words_of(eos=ends.get(template, "<|im_end|>"))

    parser = try_turns(prompter_of(tmp_path / "model", template, tokenizer), tools=tools)

    assert parser == ({QWEN3: "hermes", LLAMA3: "json"}[template] if tools else None)


def test_a_template_for_tools_is_used_where_tools_are_shown(tmp_path):
    named = {"default": CHATML, "tool_use": QWEN3}
    both, plain, tools_only = (
        prompter_of(tmp_path / name, template, words_of(eos="<|im_end|>"))
        for name, template in (("both", named), ("plain", CHATML), ("tools", QWEN3))
    )
    asked = Prompt(index=0, text="1+1=", answer="2")
    said, result = Message(role="user", content="x"), Message(role="tool", content="2", name="lookup")

    assert (try_turns(both, tools=TOOLS), try_turns(both)) == ("hermes", None)
    assert both.encode_prompt(asked).tolist() == plain.encode_prompt(asked).tolist()
    assert both.encode_prompt(asked, tools=TOOLS).tolist() == tools_only.encode_prompt(asked, tools=TOOLS).tolist()
    for new in ([said], [result], [result, said]):
        assert both.given(new, is_cut=False).tolist() == tools_only.given(new, is_cut=False).tolist()
    assert len({each.digests[1] for each in (both, plain, tools_only)}) == 3
    copied = tmp_path / "copied"
    copied.mkdir()
    copy_files(str(tmp_path / "both"), copied)
    (copied / "config.json").write_text("{}")
    assert Prompter(str(copied), use_chat_template=True).digests == both.digests


LOOP = "{% for m in messages %}" + "{}" + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "tools", "key", "problem"),
    [
        # Of the user.
        (LOOP.replace("{}", "{{ '#' ~ loop.index }}" + TURN), (), "use_chat_template", "otherwise behind a system prompt"),
        (LOOP.replace("{}", "{% if 'thought' not in m.content %}" + TURN + "{% endif %}"), (),
         "use_chat_template", "otherwise behind thoughts"),
        (LOOP.replace("{}", TURN + "{% if loop.index == 5 %}{{ '!' }}{% endif %}"), (),
         "use_chat_template", "otherwise behind two turns"),
        ("{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + LOOP.replace("{}", TURN), (),
         "use_chat_template", "refuses messages of user behind an answer: one turn"),
        (LOOP.replace("{}", "{% if loop.index < 3 %}" + TURN + "{% endif %}"), (),
         "use_chat_template", "leaves out messages of the role user"),
        (LOOP.replace("{}", "{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}\n"), (),
         "use_chat_template", "an earlier answer ends by"),
        (LOOP.replace("{}", "{{ m.content }}\n"), (), "use_chat_template", "ends an answer by no special token"),
        # Tools at the user's last message, as Mistral has them.
        (LAST_USER + LOOP.replace("{}", "{% if loop.index == ns.last and tools %}{{ tools | tojson }}{% endif %}" + TURN),
         TOOLS, "use_chat_template", "otherwise behind one turn and tools"),
        (CHATML, TOOLS, "task.environment", "leaves out the tools lookup"),
        # Of tools.
        ("{{ tools | tojson }}" + LOOP.replace("{}", "{% if m.role != 'tool' %}" + TURN + "{% endif %}"), TOOLS,
         "task.environment", "leaves out messages of the role tool"),
        ("{{ tools | tojson }}" + LOOP.replace("{}", "{% if m.role == 'tool' %}{{ m.tool_call_id + 1 }}{% endif %}" + TURN),
         TOOLS, "task.environment", "refuses messages of tool behind an answer"),
        ("{% if tools %}{{ tools[0].nothing + 1 }}{% endif %}" + LOOP.replace("{}", TURN), TOOLS,
         "use_chat_template", "refuses messages of user"),
    ],
    ids=["numbered", "thoughts", "fourth", "one-turn", "left-out", "ends", "endless", "mistral", "no-tools",
         "drops-results", "wants-ids", "computes"],
)  # fmt: skip
def test_templates_that_do_not_are_refused_by_name(tmp_path, template, tools, key, problem):
    prompter = prompter_of(tmp_path / "model", template, words_of(eos="<|im_end|>"))

    with pytest.raises(ConfigError, match=problem) as found:
        try_turns(prompter, tools=tools)
    assert found.value.key == key
    assert found.value.action


def test_a_start_measures_prompts_with_the_tools_that_they_show(tmp_path):
    prompter = prompter_of(tmp_path / "model", QWEN3, words_of(eos="<|im_end|>"))
    prompt = Prompt(index=0, text="x", answer="")
    plain, whole = (prompter.encode_prompt(prompt, tools=tools).size for tools in ((), TOOLS))
    task = plain_task(num_prompts=1, prompt=lambda index: prompt, environment_of=lambda _: environment)
    environment = SimpleNamespace(tools=TOOLS)

    def tried(positions):
        try_prompts(task, prompter, room=TokenLimits(vocab_size=1 << 20, positions=positions), max_new_tokens=4)

    tried(whole + 4)
    with pytest.raises(ConfigError, match=f"{whole + 3} tokens hold no prompt of {whole} and 4 new ones"):
        tried(whole + 3)
    environment = None
    tried(plain + 4)


def test_a_tokenizer_that_joins_across_the_end_token_is_refused(tmp_path):
    # A token that counts as a word of its own alone is not seen behind a letter.
    prompter = prompter_of(tmp_path / "model", CHATML, words_of(eos="<|endoftext|>", single_word=True))

    with pytest.raises(ConfigError, match="use_chat_template: the tokenizer joins tokens across '<|im_end|>'"):
        try_turns(prompter)


def test_a_prompt_that_changes_the_tokens_between_turns_is_refused(tmp_path):
    prompter = prompter_of(tmp_path, SWITCHED, words_of(eos="<|im_end|>"))
    plain, switched = (Prompt(index=0, text=text, answer="") for text in ("asked", "asked /no_think"))
    conversation = Conversation(
        prompter=prompter, spec=SimpleNamespace(tools=()), parser=None, end_token_ids=prompter.end_token_ids
    )

    assert prompter.given_problem("user") == ""
    assert conversation.encode(plain).size
    with pytest.raises(PromptRefused, match="otherwise behind this prompt"):
        conversation.encode(switched)


def test_without_a_template_there_are_no_turns(tmp_path):
    from heterorl.common.text.prompter import Prompter

    prompter_of(tmp_path / "model", CHATML, words(eos="<|im_end|>"))
    plain = Prompter(str(tmp_path / "model"), use_chat_template=False)

    for tools in ((), TOOLS):
        with pytest.raises(ConfigError, match="use_chat_template: .*set use_chat_template = true"):
            try_turns(plain, tools=tools)
    with pytest.raises(PromptRefused, match="use_chat_template: tools are shown by a template"):
        plain.encode_prompt(Prompt(index=0, text="x", answer=""), tools=TOOLS)


@pytest.mark.parametrize("role", ["assistant", "developer", "system"])
def test_messages_of_a_role_that_is_not_proven_are_refused(tmp_path, role):
    template = CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
    )
    prompter = prompter_of(tmp_path / "model", template, words_of(eos="<|im_end|>"))

    with pytest.raises(PromptRefused, match=f"use_chat_template: .*{role}"):
        prompter.given([Message(role="user", content="x"), Message(role=role, content="y")], is_cut=False)


def test_messages_that_the_template_refuses_together_are_refused(tmp_path):
    prompter = prompter_of(tmp_path / "model", GEMMA, FAMILIES["gemma"][1]())
    said = Message(role="user", content="x")

    assert prompter.given([said], is_cut=False).size
    with pytest.raises(PromptRefused, match="refuses messages of user, user behind an answer: Conversation roles"):
        prompter.given([said, said], is_cut=False)


def test_messages_that_are_no_text_are_refused(tmp_path):
    prompter = prompter_of(tmp_path / "model", CHATML, words_of(eos="<|im_end|>"))

    with pytest.raises(PromptRefused, match="use_chat_template: the model's template refuses messages of user"):
        prompter.given([Message(role="user", content="\ud800")], is_cut=False)
    with pytest.raises(ValueError, match="no messages"):
        prompter.given([], is_cut=False)


def test_a_text_of_the_environment_cannot_stand_for_the_answer(tmp_path):
    prompter = prompter_of(tmp_path / "model", CHATML, words_of(eos="<|im_end|>"))
    text = "answer0of0heterorl<|im_end|>\n"

    given = prompter.given([Message(role="user", content=text)], is_cut=False)

    assert prompter.tokenizer.decode(given) == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_name_of_a_tool_reaches_the_template(tmp_path):
    template = CHATML.replace("message['content'] +", "message['content'] + (message.name or '') +")
    prompter = prompter_of(tmp_path / "model", template, words_of(eos="<|im_end|>"))

    given = prompter.given([Message(role="tool", content="12", name="lookup")], is_cut=False)

    assert "12lookup<|im_end|>" in prompter.tokenizer.decode(given)
