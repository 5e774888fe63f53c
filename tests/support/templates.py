"""Chat templates of the shapes that models ship, written here; tokens are those of `tests.support.tokenizers`."""

QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}"
    "{%- endif %}{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and '</think>' in message.content %}"
    "{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- else %}{%- set content = message.content %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Tools first, and thoughts that are left out of earlier turns."""
DATED = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}\n"
    "{{- '<|im_start|>system\\n' + system + ' Today: ' }}"
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y %H:%M') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}{{- date_string + '<|im_end|>' }}\n"
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}\n"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The date in the system's turn."""
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
"""No system's turn, and roles that alternate."""
MARKED = (
    "{% for message in messages %}\n  {% if message.role == 'assistant' %}\n"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}\n"
    "  {% else %}\n{{ {'role': message.role, 'text': message.content} | tojson(indent=1) }}\n  {% endif %}\n"
    "  {% if loop.index > 3 %}{% break %}{% endif %}\n{% endfor %}"
)
"""Marks of the assistant's tokens, JSON and a loop that ends early."""
THINKING = QWEN.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
"""The answer begins inside its thoughts."""
SWITCHED = (
    "{%- set switch = namespace(off=false) %}{%- for message in messages %}{%- if message['role'] != 'assistant' and"
    " '/no_think' in message['content'] %}{%- set switch.off = true %}{%- endif %}{%- endfor %}"
) + QWEN.replace(
    "'<|im_start|>assistant\\n' }}",
    "'<|im_start|>assistant\\n' ~ ('<think></think>' if switch.off else '<think>\\n') }}",
)
"""The same, unless a message of the system or the user switches it off, as in Nemotron-Nano-v2."""
