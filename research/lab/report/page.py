"""The page of the report, as a template; every value goes through autoescape."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ results.title or results.experiment or "experiment" }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
h1 { margin-bottom: 0 } .lead, .note { color: #51606e; margin-top: .2rem } .note { font-size: .92rem }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .8rem; margin: 1.5rem 0 }
.number { border: 1px solid #d8dee4; border-radius: .5rem; padding: .5rem 1rem }
.number b { display: block; font-size: 1.5rem } .number span { color: #51606e; font-size: .9rem }
img { width: 100%; min-width: 46rem; border: 1px solid #d8dee4; border-radius: .5rem; margin: .5rem 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0 1.5rem }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tr.baseline { background: #fdf1e8 }
td.text { text-align: left; white-space: pre-wrap } .bad { color: #b00020; font-weight: 600 }
</style></head><body>
<h1>{{ results.title or results.experiment or "Experiment" }}</h1>
<p class="lead">Experiment {{ results.experiment or "without a name" }}, heterorl {{ results.heterorl_version or "?" }},
configuration {{ results.config_digest or "?" }}.
All numbers: <a href="runs.csv">runs.csv</a>, <a href="comparisons.csv">comparisons.csv</a>,
<a href="differences.json">differences.json</a>.</p>
<div class="numbers">{% for label, value in numbers %}
<div class="number"><b>{{ value }}</b><span>{{ label }}</span></div>{% endfor %}</div>
<p>Algorithms: {{ results.arms | map(attribute="label") | join(", ") }}.</p>
{% if results.failed %}<h2 class="bad">Failed runs</h2>
<p class="note">They are in no mean and no figure. A mean over the runs that survived flatters an algorithm whose other
runs did not.</p>
<div class="scroll"><table><tr><th>run</th><th>algorithm</th><th>task</th><th>delay</th><th>seed</th>
<th>error</th></tr>
{% for run in results.failed %}<tr class="bad"><td>{{ run.run_id }}</td><td>{{ run.arm.label }}</td>
<td>{{ run.task }}</td>
<td>{{ run.place.label }}</td><td>{{ run.seed }}</td><td class="text">{{ run.failed }}</td></tr>{% endfor %}
</table></div>{% endif %}
{% if unbalanced %}<p class="bad">Groups are not all accounted for in:
{{ unbalanced | map(attribute="run_id") | join(", ") }}.</p>{% endif %}
{% if results.missing_files %}<p class="bad">Without a file of series and evaluations, so absent from curves:
{{ results.missing_files | join(", ") }}.</p>{% endif %}
{% if results.num_not_finite %}<p class="bad">{{ results.num_not_finite }} numbers are NaN or infinite; they are left
out of all means.</p>{% endif %}
<h2>Best, last and gap</h2>
<p class="note">Mean and 95 % t-interval over seeds; one seed has no interval. Best is the best single checkpoint;
best per benchmark lets each benchmark choose its own, which flatters. Gap is best minus last. Collapsed: the
share of seeds that lost more than half of what they had gained, and more than {{ collapse_margin }}, or whose loss was
not finite, which counts as a last accuracy of 0; with Wilson's 95 % interval, and the seeds that failed. Late
rise: the end minus a quarter of the steps before, each the mean of three evaluations; flat where its interval lies
within {{ flat_tolerance }} of 0 on both sides.</p>
{% if results.tuning %}<p class="note">Learning rates were chosen by the engine {{ results.tuning.engine }} on
{{ results.tuning.device }}; * stands where the grid ends at the choice, so that a rate beyond it may be better.</p>
{% endif %}
{% if unfinished %}<p class="bad">Without delay these are not shown to be flat, so the order of the arms may still turn
when training goes on: {{ unfinished | join(", ") }}.</p>{% endif %}
{% for title, table in tables %}<h3>{{ title }}</h3>
<div class="scroll"><table><tr><th>algorithm</th><th>last</th><th>last, worst seed</th>
<th>best</th><th>best, worst seed</th>
<th>best per benchmark</th><th>gap</th><th>warm start</th><th>late rise</th><th>lr</th><th>seeds</th><th>collapsed</th>
<th>failed</th></tr>
{% for row in table %}<tr{% if row.arm.algorithm == baseline %} class="baseline"{% endif %}><td>{{ row.arm.label }}</td>
<td>{{ row.last | pm }}</td><td>{{ "%.3f" | format(row.last.lowest) if row.last else "-" }}</td>
<td>{{ row.best | pm }}</td><td>{{ "%.3f" | format(row.best.lowest) if row.best else "-" }}</td>
<td>{{ row.best_per_benchmark | pm }}</td><td>{{ row.gap | pm }}</td>
<td>{{ "%.3f" | format(row.warm_start.mean) if row.warm_start else "-" }}</td><td>{{ row.flatness }}</td>
<td>{{ row.lr }}{{ "*" if row.is_at_edge }}</td>
<td>{{ row.num_finished }}</td>
<td{% if row.num_collapsed %} class="bad"{% endif %}>{{ row.collapse_share }}</td>
<td{% if row.num_failed %} class="bad"{% endif %}>{{ row.num_failed }}</td></tr>
{% endfor %}</table></div>{% endfor %}
{% for picture, look_for, data in pictures %}<h2>{{ picture.title }}</h2>
<p class="note">{{ picture.caption }} {{ look_for }}</p>
<div class="scroll"><img alt="{{ picture.title }}" src="data:image/png;base64,{{ data }}"></div>
{% endfor %}
<h2>Against {{ baseline }} on the same seeds</h2>
{% if comparisons %}<p class="note">Mean of the paired differences (algorithm minus {{ baseline }}) with its 95 %
t-interval. p: paired t-test; Holm: the same, corrected for the number of comparisons in the table; exact: all sign
flips of the differences, which with n seeds cannot go below 2 / 2^n; seen: the true difference that so many pairs of
this spread show in 80 of 100 cases, before correction. "Differs" means below 0.05 after correction; "no
difference shown" does not mean equal. Differences are joined by seed; a seed that failed on either side is left
out.</p>
{% for title, table in comparisons %}<h3>{{ title }}</h3>
<div class="scroll"><table><tr><th>algorithm</th><th>difference</th><th>pairs</th><th>p</th><th>p, Holm</th>
<th>p, sign flips</th><th>p, Wilcoxon</th><th>seen</th><th>verdict</th></tr>
{% for c in table %}<tr><td>{{ c.arm.label }}</td><td>{{ c.difference | pm(signed=true) }}</td>
<td>{{ c.difference.num }}</td>
<td>{{ c.t_p | p }}</td><td>{{ c.adjusted_p | p }}</td><td>{{ c.sign_flip_p | p }}</td><td>{{ c.wilcoxon_p | p }}</td>
<td>{{ "%.3f" | format(c.detectable) if c.detectable is not none else "-" }}</td>
<td class="text">{{ c.verdict }}</td></tr>
{% endfor %}</table></div>{% endfor %}
{% else %}<p>No seed was run with both {{ baseline }} and another algorithm.</p>{% endif %}
</body></html>
"""
