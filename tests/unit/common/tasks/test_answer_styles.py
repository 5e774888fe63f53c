"""Styles in which models state an answer, and data sets write one: what is right, what is wrong."""

import pytest

from heterorl.common.tasks.answer_extraction import answer_of
from heterorl.common.tasks.rewards.answer_match import MatchedTask
from heterorl.common.tasks.rewards.math_comparison import answer_of_row, is_right
from heterorl.common.tasks.source_config import SourceConfig
from heterorl.common.tasks.task import Prompt


def box(text):
    return f"Thus the answer is $\\boxed{{{text}}}$."


OPTION = (
    [box("12"), box("D"), box(r"\textbf{(D)}\ 12"), "The answer is (D)."],
    [
        box("E"),
        box("13"),
        box(r"\textbf{(D)}\ 13"),
        "The answer is (D) 13.",
        box("(E) 12"),
        "(D) 13",
        "(D) 12 or 13",
        "The answer is (D) 13 or (D) 12.",
    ],
)
# An answer column, completions that are right, and completions that are wrong.
STYLES = [
    (r"\textbf{(D)}\ 12", *OPTION),
    (r"\boxed{\textbf{(D)}\ 12}", *OPTION),
    ("(D) 12", *OPTION),
    ("D. 12", *OPTION),
    ("D", [box("(D) 13"), "(D) 13"], [box("(C) 13")]),
    ("(B) 5 cm", [box("(B) 5 cm"), box("B"), box("5 cm"), box("(B) 5")], [box("(B) 5 m"), box("(A) 5 cm")]),
    ("(B) Paris", ["The answer is (B) Paris, France.", "B", "Paris", box("(B) Paris, France")], [box("(B) London"), "(A) Paris"]),
    ("(B) Paris", ["The answer is B. I hope this helps", "The answer is (B) as shown above."], ["The answer is (A) as shown."]),
    ("(B) 12", ["The answer is (B) because it is smallest.", "Answer: B. The others are wrong.", box("(B) twelve")], []),
    ("(B) increase", [box("(B) increases"), "(B) increases", "The answer is (B) increases."], [box("(B) decreases"), box("(C) increases"), box("(B) no increase")]),
    ("(B) true", [box("(B) true")], [box("(B) true or false"), box("(B) not true")]),
    ("(B) 0.33", [*map(box, ("(B) 1/3", r"(B)\ \frac13", "(B) 0.333")), "(B) 1/3"], [*map(box, ("(B) 0.4", "(B) 1/4", "(A) 1/3", "(B) 0.34"))]),
    ("(B) 1/3", [box("(B) 0.33"), "(B) 0.33"], [box("(B) 0.32")]),
    ("(B) 3.14159", [box("(B) 3.14"), box("(B) 3.1")], [box("(B) 3.15"), box("(A) 3.14")]),
    ("(B) 3.14", [box("(B) 3.14159")], [box("(B) 3.14999")]),
    # What a number is compared with is another number.
    ("12", ["So we need 7 more, not 9; the answer is 12.", "So x = 12 rather than 7."], ["So we need 7 rather than 12.", "3 less than 12", "It is 5 more than 12."]),
    ("7", ["So we need 7 rather than 12.", "So x = 7 other than 12"], ["12 rather than 7."]),
    # Numbers of names differ, unless one side has none.
    *((f"{name}=3", [box(f"{name}=3")], [box(f"{other}=3")]) for name, other in (
        ("a_5", "a_4"), ("x_1", "x_2"), ("a_n", "a_1"), ("P_A", "P_B"), ("v_0", "v_f"), ("x_{min}", "x_{max}"), ("x_1", "x_A"),
    )),
    ("S_1=1, S_2=3", [box("S_2=3, S_1=1")], [box("S_2=1, S_3=3")]),
    # A verdict, unless its opposite follows.
    ("Yes", [], ["Yes... no", "yes,no", "Yes. Wait, no.", "Yes, let me check. 91 = 7 * 13, hence it isn't prime."]),
    ("No", ["No, it is odd."], ["No, wait. Yes.", "No: yes"]),
    ("True", ["True."], ["True. Or rather false."]),
    # Hedges.
    *((one, [], [
        "either 3 or 4", "3 (or maybe 4)", "#### 3 (or maybe 4)", "<answer>3 (or maybe 4)</answer>", "The answer is 3 (or 4).",
        "The answer is 3 (or maybe 4).", "The answer is 3, or perhaps 4.", "The answer is 3, but it could be 4.",
        "The answer is $3$ (or maybe $4$).", r"\boxed{3} (or \boxed{4})", r"\boxed{3} or maybe \boxed{4}", box(r"3 \text{ (or 4)}"),
    ]) for one in "34"),
    ("1/2", ["The answer is 1/2 (or 0.5).", "The answer is maybe 1/2."], []),
    *((one, [], [
        "(B) or (C)", "B or C", "The answer is (B) or (C).", "The answer is B (or maybe C).", "The answer is (B), possibly (C).",
        "The answer is B, though it might be C.", "The answer is (B) Paris, or maybe (C) London.", box(r"\text{(B) or (C)}"),
        "The answer is Paris (or London).", "The answer is Paris, but it could be London.",
    ]) for one in ("B", "(B) Paris", "Paris")),
    ("Yes", ["Yes, because it is prime.", "**Yes**. It is.", 'The answer is "Yes".'], ["No, yes would be wrong.", "Yes or no", "Yes, it seems. The answer is no."]),
    ("salt and pepper", [box(r"\text{salt and pepper}"), "The answer is salt and pepper."], ["salt", "The answer is salt or pepper."]),
    ("Both A and B", ["The answer is both A and B."], ["The answer is A.", box("A and B")]),
    ("C", [
        "The answer is **(C)** and the others are wrong.", "The answer is **C** and the rest are wrong.", "**C**, since A and B are wrong",
        "**(C)** because (D) is too large.",
    ], [
        "C, because A is wrong. Wait, it must be B.", "The answer is **(C)** and **(D)**.", "C, because A is wrong. No, B.", "C because it fits. Sorry, B.",
        "C, since A fails. Correction: B.", "C because A is wrong. So B.", "C because it is small. Then again, B is smaller.", "C as usual: B", "C as",
    ]),
    ("B", ["The answer is B. D", box("(B) D")], []),
    ("D", [], ["The answer is B. D", box("(B) D.")]),
    *((one, [], ["The answer is **(C)** and the others are wrong.", "**C**, since A and B are wrong", "**(C)** because (D) is too large."]) for one in "ABD"),
    ("C, D", ["The answer is **(C)** and **(D)**.", "The answers are **C** and **D**.", box("**(C)** and **(D)**")], ["The answer is **(C)** or **(D)**."]),
    ("A, C", ["The answer is (A) and (C).", "The answer is (A), (C)."], ["The answer is (A) or (C).", "The answer is (A), (B)."]),
    ("B", ["The answer is (B) because (A), (C) and (D) are wrong.", "The answer is (B) since (A) or (C) is too large."], ["The answer is (B) and (C).", "The answer is (B), (C)."]),
    ("A", [
        "The answer is (A), (B) is wrong.", "The answer is A, B and C are wrong.", "The answer is (A); (C) isn't possible.",
        "The answer is (A), while (B) is wrong.", "The answer is A, I think.", "The answer is (A) (see above).",
    ], ["The answer is (A), (B) is also correct.", "The answer is (A) and also (B)."]),
    ("D", ["The answer is (D) Both (A) and (B).", box(r"\text{(D) Both A and B}"), "The answer is (D) none of (A), (B)."], []),
    *((one, [box("C"), "The answer is (C) since (D) is too small."], [
        box("(C) and (D)"), box(r"\textbf{(C)} and \textbf{(D)}"), box(r"(C) \& (D)"), box("(C) 12 and (D) 13"), box("C. and D."),
        box("(C) cats or (D) dogs"), "The answer is (C) as well as (D).", "The answer is (C) cats and (D) dogs.",
        "(C) and (D) are correct.", box(r"(C)\ 12 \text{ or } (D)\ 13"),
    ]) for one in ("C", "(C) 12")),
    ("A, B, D", ["The answer is (A), (B), and (D).", box(r"(A), (B)\text{ and }(D)")], ["The answer is (A), (B)."]),
    # Corrections, and bounds.
    *(("13", [f"The answer is 12{text}" for text in texts] + ["12. Scratch that: it is 13.", "#### 12\nCorrection: 13"], [])
      for texts in ([
        ". Scratch that, it's 13.", " apples. Correction: 13 apples.", ". No wait, it is 13.", ". Actually it should be 13.",
        ", I mean 13.", ". Sorry, I meant 13.", ". Wait, that's wrong. It's 13.", ". Oops, 13.", " \u2014 no, 13.", ", or rather 13.",
      ],)),
    ("12", [
        "The answer is 12. Actually, 13 is odd.", "The answer is 12. No 13 is possible.", "The answer is 12. Wait, 2, 3 and 4 divide it.",
        "The answer is 12. No, 2 people cannot share.", "I get 8. No wait, 7. Then 7 + 5 = 12.", "<answer>13. Scratch that: 12</answer>",
    ], []),
    ("B", ["The answer is A. No wait, B.", "The answer is (A). Correction: (B).", "The answer is B. Actually, A, C and D are wrong.",
        "The answer is B. Actually, D, though close, is wrong.", "The answer is B. No.\n\nC. Yes would be wrong.",
    ], []),
    ("Mars", ["The answer is Mars. Actually, Venus, Earth and Mercury are closer."], ["The answer is Mars. No, Venus."]),
    ("Paris", ["The answer is London. Scratch that, it is Paris."], ["The answer is Paris. Sorry, it is London."]),
    ("10 m/s", [
        "12 m/s. Wait, I mean 10 m/s.", "The answer is 12 m/s. Sorry, I meant 10 m/s.", "The answer is 12 m/s, make that 10 m/s.",
        "**12 m/s**. Sorry, **10 m/s**.", "The answer is 12 meters per second. I mean 10 meters per second.",
    ], []),
    ("12 m/s", ["The answer is 12 m/s. Wait, 10 m/s is the speed of the other."], [
        "12 m/s. Wait, I mean 10 m/s.", "The answer is 12 m/s. Sorry, I meant 10 m/s.", "The answer is 12 m/s, make that 10 m/s.",
    ]),
    ("No", ["Yes. Actually, No.", "Yes. Wait, no.", "The answer is Yes. Actually, no."], ["No. Wait, yes."]),
    ("Yes", ["No. Wait, Yes."], ["Yes. Actually, No.", "The answer is Yes. Actually, no."]),
    ("Paris", ["The answer is Paris. Wait, no. Let me check: it is."], []),
    *((one, ["The answer is one half (1/2).", "one half (1/2)", r"The answer is a half ($\frac{1}{2}$).", box(r"\text{one half } (1/2)")],
       ["The answer is one third (1/3).", "The answer is minus one half (-1/2)."]) for one in ("1/2", "0.5")),
    ("2.5", ["The answer is two and a half (2.5) hours."], []),
    ("3/4", ["3 quarters (3/4)", "<answer>3 quarters (3/4)</answer>", r"3 quarters ($\frac{3}{4}$)"], []),
    ("15/4", [], ["3 quarters (3/4)", "<answer>3 quarters (3/4)</answer>", r"3 quarters ($\frac{3}{4}$)"]),
    ("2/3", ["2 thirds (2/3)", "2-thirds (2/3)", "<answer>2 thirds (2/3)</answer>", "The answer is 2 thirds (2/3).", "So it is 2 thirds (2/3)."], ["2 thirds (3/2)"]),
    ("8/3", [], ["2 thirds (2/3)", "The answer is 2 thirds (2/3).", box(r"2 \text{ thirds } (2/3)")]),
    ("5/2", ["5 halves (5/2)", r"<answer>5 halves ($\frac{5}{2}$)</answer>"], []),
    ("12.5", ["12 and a half ($12.5$)", "12 and a half (12.5)", box("12 and a half (12.5)"), "So it is 12 and a half (25/2)."], []),
    ("12", [], ["12 and a half (12.5)", "The answer is 12 and a half (12.5)."]),
    ("2", [], ["So it is 2 thirds (2/3).", "The answer is 2 thirds (2/3)."]),
    ("24", ["The answer is 24, half (12) of which were sold."], []),
    ("10 m", ["The answer is 12 m. Sorry, 10 m."], []),
    ("12 m", ["The answer is 12 m. Actually, 10 m tall.", "12. Actually 3 m * 4 m = 12 m^2."], ["The answer is 12 m. Sorry, 10 m."]),
    ("14", ["The answer is 3 times 4, which is 12, plus 2, which is 14"], ["The answer is 3 times 4, which is 12."]),
    ("-12", [
        "minus 12", "The answer is minus 12.", "So x is negative $12$.", "<answer>negative 12</answer>", "The answer is negative twelve (-12).",
    ], ["15 minus 12", "x minus 12 is -3"]),
    ("3", ["15 minus 12 is 3.", "It is negative 5 plus 8, so 3."], ["minus 3", "The answer is negative 3."]),
    ("12", [
        "12 or so", "five (5) or more; the answer is twelve (12)", "She needs at least 12 boxes.", "Half of 24 is 12.", "12 less than 24 is 12",
        "24 is 50% of 48; half of that is 12", "6 is half of 12.", "Up to symmetry, 12.", "The answer is 12 more.",
        "12 dozen", "She needs 12 * 12 = 144 eggs, so the answer is 12 dozens.", "The answer is one-third of 36 = 12.",
        "The answer is a third of 36, which is 12.", "The answer is 25% of 48, which equals 12.", "The answer is 7 plus 5, so 12.",
        "The answer is 12, which is 3 times 4.", "The answer is 12 of 20, which is 60%.", "The answer is 12 of 20, so 8 of them are missing.",
        "Is the answer 10? No. Is it 11? No. The answer is 12.",
    ], [
        "The answer is 3 times 4, which is 12, plus 2, which is 14", "half of 12", "It is half of 12.", "The answer is a third of 12.", "twice 12", "at least 12", "<answer>at most 12</answer>",
        "12 or more", "12+", "over 12", "The answer is up to 12.", "no more than 12", "12 thousand",
    ]),
    ("12000", ["12 thousand", "The answer is 12 thousand."], []),
    (
        "13",
        ["The answer is 12, no wait, 13.", "The answer is 12? No, 13.", "The answer is 12... actually 13.", "The answer is 12 (wrong), so 13."],
        ["The answer is 13, sorry, 12.", "The answer is 13 or more.", "The answer is > 13.", "The answer is \u2265 13", "The answer is 13 less than 20.", "The answer is the square root of 13."],
    ),
    ("12", ["The answer is 12. Actually, we can check it.", "The answer is 12. Wait, let me look: yes.", "It is 12, more than 11."], []),
    # Names of values: x_1 numbers the values of one x.
    ("x_1=-3, x_2=1", [*map(box, ("x_2=1, x_1=-3", "-3, 1", "1, -3", "x=-3, x=1"))], [*map(box, ("x_1=1, x_2=-3", "x_1=-3", "x=-3, y=1"))]),
    ("x=1, x=-5", [box("x_1=1, x_2=-5")], [box("x_1=1, x_2=5")]),
    ("x_1=5", [box("5"), box("x=5")], [box("y=5")]),
    ("5", [box("x_1=5"), "x_1 = 5"], [box("x_1=6")]),
    ("x=3, y=4", [box("y=4, x=3"), box("(3,4)")], [box("x=4, y=3"), box("(4,3)")]),
    ("5 m", ["5 m", "5", "5 meters"], ["5 km", "5 m^2"]),
    *((one, [box(r"60 \text{km}/\text{h}"), "60 km/h", box(r"60\ \mathrm{km/h}"), box(r"60\,\mathrm{km}/\mathrm{h}")], [box("60 km"), box("60 m/s")])
      for one in (r"60 \text{km}/\text{h}", "60 km/h")),
    ("60 km", [], [box(r"60 \text{km}/\text{h}"), box(r"60\text{ km}/h")]),
    ("60 km/h", [r"60\text{ km}/h", r"The answer is 60\text{ km}/h.", box(r"60\ \frac{\text{km}}{h}")], [box(r"60\text{ km}/s")]),
    # One quantity in two units.
    *((one, ["The answer is 3 hours, which is 180 minutes.", "The answer is 3 hours (180 minutes).", "The answer is 180 minutes, or 3 hours.", box(r"3\text{ hours} = 180\text{ minutes}")],
       ["The answer is 2 hours, which is 181 minutes."]) for one in ("3 hours", "180 minutes", "180")),
    *((one, [], ["The answer is 3 hours, which is 180 minutes."]) for one in ("3 minutes", "180 hours", "60")),
    ("180", [], ["The answer is 2 hours, which is 180 minutes."]),
    ("9.8 m/s^2", [box(r"9.8\ \text{m}/\text{s}^2"), box(r"9.8\ \frac{\text{m}}{\text{s}^{2}}")], [box(r"9.8\ \text{m}/\text{s}"), box(r"9.8\ \text{km}/\text{s}^2")]),
    ("5 m/s", [box(r"5\ \frac{\text{m}}{\text{s}}")], [box(r"5\ \frac{\text{km}}{\text{s}}")]),
    ("12 kJ/mol", [box(r"12 \frac{\text{kJ}}{\text{mol}}"), box(r"12 \frac{\mathrm {kJ}}{\mathrm {mol}}")], [box("11 kJ/mol")]),
    ("5", [box(r"5\ \frac{\text{N}}{\text{m}}"), box(r"5 \dfrac{\text{ft.}}{\text{s}}")], [box(r"\frac{\text{5}}{\text{2}}")]),
    (r"3+\frac{\text{a}}{\text{b}}", [box(r"3+\frac{a}{b}")], [box("3")]),
    ("(3,4)", [box("\\{x=3,y=4\\}"), box("x=3,y=4")], [box("\\{3,4\\}"), box("\\{x=4,y=3\\}")]),
    ("AB", ["The answer is AB."], ["$A$" * 10_000]),
    # Several statements are no several tries.
    ("A", [], ["#### A\n#### B\n#### C", "Suppose A is correct. Contradiction, so C.", "We ask whether A is correct."]),
    ("Paris", [], ["#### Paris\n#### London"]),
    ("12", [], ["<answer>#### 12\n#### 7</answer>", "#### 12\n#### 7"]),
    (
        "12",
        [
            "#### 12\n\nLet me know if the answer is unclear.", "#### 12\nNote: the answer is an integer.",
            "#### 12\nFinal answer: see above", "#### 12\n(Answer: twelve)",
        ],
        [],
    ),
    *((one, [], ["The answer is a third of 36, which is 12.", "The answer is 36 minus 24, which is 12."]) for one in ("36", "24")),
    ("36", ["The answer is the square of 6, which is 36.", "#### the square of 6, which is 36"], []),
    ("6", [], ["The answer is the square of 6, which is 36.", "The answer is the product of 6 and 7."]),
    ("7", ["The answer is the sum of 3 and 4, which is 7.", "The answer is the sum of the digits: 7"], []),
    ("8", [], ["The answer is 12 of 20, so 8 of them are missing."]),
    ("3", ["The answer is 3 of 4 colors, which is 75%."], []),
    ("10", ["The answer is 10 times.", "The answer is 10 times larger.", "**Answer: 10 times**"], []),
    ("5", ["The answer is 5 squared units"], []),
    ("5!!", ["The answer is 5!!"], []),
    ("B, A", [box("(A, B)")], []),
    ("E. coli", ["The answer is E. coli."], ["The answer is E.", "coli"]),
    # A completion that is the answer alone.
    *((alone, [alone], []) for alone in (
        r"2\sqrt{3}", "[0,1)", "(3,4)", "x^2+1", "1,2,3", r"\{1,2\}", "3 1/2", "3+4i", r"2\pi", "1.2e3", "3:2",
        "2:30 PM", "y=2x+1", "101_2", "sqrt(2)",
    )),
    ("3", ["3", "$3$", "1 + 2 = 3"], ["3x", "3!", r"3\pi", "3i", r"x \ge 3", "x=3y"]),
    ("2", [], [r"2\sqrt3", "2x"]),
    # Roots, pi and ratios in prose without dollars, and signs that people type.
    *((one, [], ["The area is 8\u03c0.", "The area is 8\\pi.", "So x = 8\u221a3.", "It's 8:30."]) for one in "83"),
    (r"8\pi", ["The area is 8\u03c0.", "So A = 8\u03c0 cm\u00b2.", "The answer is 8pi."], ["The area is 8."]),
    (r"\frac{\pi}{4}", ["The answer is pi/4"], ["The answer is pi/3"]),
    (r"\sqrt{51}", ["It is \u221a51.", "The answer is sqrt(51)."], ["It is 51."]),
    (r"2\sqrt{2}", ["The answer is 2 sqrt(2)."], ["The answer is 2 sqrt(3)."]),
    ("5:3", ["The ratio is 5:3."], ["The ratio is 3:5."]),
    ("5", [], ["The ratio is 5:3.", "The ratio is 3:5."]),
    (r"6.02 \times 10^{23}", ["The answer is 6.02 x 10^23.", "6.02 x 10^23"], ["The answer is 6.02 x 10^22."]),
    # One value in two forms.
    *((one, ["The answer is 1/4 (25%).", "The answer is 1/4 (0.25)."], []) for one in ("0.25", "1/4")),
    ("1/16", [], ["The answer is 1/4 (25%).", "The answer is 1/4 (0.25)."]),
    ("12", ["The answer must be 12. There were 7 apples."], ["The answer should be 13. There were 12."]),
    ("7", ["The answer is 7. This answer must be an integer."], ["The answer must be 12. There were 7 apples."]),
    # Prices and mixed numbers in prose.
    ("12", [r"The total cost is \$12.", r"**\$12**", r"Each pays \$3, so 4 pay \$12.", r"The cost is $\$12$."], [r"Each pays \$12, so 4 pay \$48."]),
    *((one, ["It takes 3 1/2 hours.", "It takes $3 1/2$ hours.", r"Prices rose by \$3 1/2."], ["It takes 2 1/2 hours."]) for one in ("3.5", "7/2")),
    *((one, [], ["It takes 3 1/2 hours."]) for one in ("1", "3", "1/2")),
    ("1/2", ["In 2020 1/2 of them left.", "The answer is in 2020 1/2 of them."], []),
    *((one, [], ["In 2020 1/2 of them left."]) for one in ("2020.5", "2020")),
    ("2020 1/2", [box("2020 1/2")], []),
    ("7/2", [], ["We add 1 + 2 = 3\n1/2 is left."]),
    # Headings.
    ("B", ["#### Analysis\nBlah.\n\n**Answer: B**", "##### Step\nThe answer is B."], []),
    ("(3,4)", ["#### Step 2\nThe answer is (3, 4)."], []),
    ("42", ["#### 3\nThe answer is 42", "#### 42\n\n#### Explanation\nblah 7", "so #### 42"], []),
    ("7", [], ["#### 42\n\n#### Explanation\nblah 7"]),
    # Options by name.
    (
        "D",
        [
            "The answer is option D.", "The answer is option (D).", "Answer: Option D", "The answer is choice (D)",
            "The answer must be D.", "The answer should be (D).", "Therefore, D is the answer.", "The answer choice is D.",
            "My choice is (D).", "Option D", "D is correct.", "D is the correct answer.", box(r"\text{Option D}"),
        ],
        ["The answer is option C.", "C is correct.", "A is correct, so D is wrong."],
    ),
    # Tags.
    (
        "42",
        [
            "<answer>The answer is 42.</answer>", "<answer>Therefore, x = 42.</answer>", "<Answer>42</Answer>",
            "<answer>She has 42 apples.</answer>", "<answer>#### 42</answer>",
            r"<answer>I think the answer is \(42\).</answer>",
        ],
        ["<answer>41</answer> 42", "<answer>The answer is 43.</answer>"],
    ),
    # Several boxes.
    (
        "42",
        [r"\boxed{43} no: \boxed{42}", "\\boxed{4}\n\\boxed{42}", r"\boxed{42\text{ cm}} = \boxed{42}"],
        [r"\boxed{41} or \boxed{42}", r"\boxed{41}, \boxed{42}", r"\boxed{42} \boxed{41}"],
    ),
    ("B", ["\\boxed{A}. Wait, no.\n\\boxed{B}", "\\boxed{B}\n\n\\boxed{\\text{(B)}}"], []),
    (
        "1,-5",
        [
            r"\boxed{1} or \boxed{-5}", r"$\boxed{1}$ and $\boxed{-5}$", r"$x=\boxed{1}$, $x=\boxed{-5}$",
            r"\boxed{1} \boxed{-5}",
        ],
        [r"\boxed{1}"],
    ),
    # Spacing, fonts and words in a box.
    ("42", [*map(box, (
        r"42\,", r"\,42\,", r"42\;", r"42\ ", "~42~", r"\boldsymbol{42}", r"\underline{42}", r"\bf 42", r"\large 42",
        "=42", r"\approx 42", r"\therefore 42", r"\text{Answer: }42", r"\text{Area: } 42", r"\num{42}",
    ))], [box(r"43\,")]),
    # Upright letters.
    (r"-\frac{1}{\mathrm{e}}", [box(r"-\frac1e")], [box(r"\frac1e")]),
    ("3+4i", [box(r"3+4\mathrm{i}"), box(r"3+4\text{i}"), box(r"3+4\cdot i")], [box("3-4i")]),
    (r"\mathrm{e}", [box("e")], [box("2")]),
    (r"\arctan 2", [box(r"\operatorname{arctan} 2")], [box(r"\tan 2")]),
    # Either sign.
    (
        r"\frac{3\pm\sqrt5}{2}",
        [*map(box, (r"\frac{3\pm\sqrt5}{2}", r"\frac{3+\sqrt5}{2},\frac{3-\sqrt5}{2}", r"x=\frac{3\pm\sqrt5}{2}"))],
        [box(r"\frac{3+\sqrt5}{2}")],
    ),
    (r"1 \pm \sqrt{19}", [box(r"\pm\sqrt{19}+1")], [box(r"1+\sqrt{19}")]),
    (r"100\text{ and }200", [box(r"100 \text{ and } 200"), box("200, 100")], [box("100200")]),
    # Signs around a statement, and words that change its number.
    ("42", ["The answer is 42!", "The answer is: <b>42</b>", "The answer is _42_", "The answer is 42, which is twice 21."], []),
    ("120", ["The answer is 5!"], []),
    (
        "42",
        ["The answer is 42 apples."],
        [
            "The answer is 42 squared", "The answer is twice 42", "The answer is half of 42",
            "The answer is 42 times 2", "The answer is 42 plus 1", "The answer is at least 42",
        ],
    ),
    # Terms, times and years in prose.
    (r"4\pi", ["So it is 4\u03c0."], ["The perimeter is 8 + 4\u03c0.", "It is 4\u03c0r\u00b3.", "It is 8 plus 4\u03c0.", "at (1, 4\u03c0)"]),
    (r"5\pi", ["It is 5\u03c0 cm."], ["It is 25 \u2212 5\u03c0.", "It is (25 - 5\u03c0)/2.", "It is 5\u03c0^2.", "It is 5\\pi r."]),
    (r"\sqrt{5}", ["It is \u221a5."], ["It is 1 + \u221a5.", "The value is 2/\u221a5.", "It is \u221a5x"]),
    ("1/2", ["The ratio is 1:2.", "In 2020 1/2 of them left."], ["They start at 6:12.", "It weighs 1250 1/2 pounds."]),
    ("1250.5", ["It weighs 1250 1/2 pounds."], ["In 1250 1/2 of them left, so 1/2"]),
    ("24", ["The answer is 24 quarters ($6)."], []),
    ("300", [], ["The answer is 3, which is 300%.", "3 (300%)"]),
    ("3", ["The answer is 3, which is 300%."], []),
    # Sets.
    (r"\{3,4\}", [box(r"\{4,3\}"), box("3, 4"), box(r"\left\{3, 4\right\}")], [box("(3,4)"), box("[3,4]"), box("(4,3)")]),
    ("(3,4)", [box("(3,4)")], [box(r"\{3,4\}"), box("(4,3)")]),
    ("3, 4", [box(r"\{3,4\}")], [box(r"\{3,5\}")]),
    ("[0,1)", [box(r"0 \le x < 1")], [box(r"0 \le x \le 1")]),
    (r"x \in [-2,7]", [box(r"-2\le x\le 7"), box("[-2,7]")], [box("(-2,7)")]),
    (r"x \in \{1,2\}", [box(r"\{1,2\}"), box("1,2")], [box("1")]),
    # Days.
    *(
        (day, [*map(box, ("June 20", r"\text{June 20th}", "20 June", "the 20th of June", "Jun. 20")), "The answer is June 20th."],
         [box("June 21"), box("July 20"), box("June 2"), box("20"), box("June 20, 2021"), "June 20 or June 21", "20"])
        for day in ("June 20", "June 20th", "20 June")
    ),
    ("2021-06-20", [box("June 20, 2021"), box("20 June 2021")], [box("June 20"), box("June 20, 2022")]),
    # Letters and names.
    ("A,C", [*map(box, ("A, C", "AC", r"\text{A, C}", r"\text{A and C}", "C,A"))], [box("A,B"), box("A")]),
    (
        "AB",
        [*map(box, ("AB", "A, B", r"\text{A and B}", "(A, B)", r"\text{AB}")), "The answer is A, B."],
        [box("A"), box("B, C"), box("A, B, C"), box("ABC"), "A", "#### A\n#### A, B\n#### B"],
    ),
    ("ABD", [box("A, B, D"), box("ABD"), "The answer is A, B and D."], [box("A, B"), box("ABCD"), box("a, b, c")]),
    ("A, B, D", [box("ABD"), box(r"\text{ABD}"), "#### ABD"], [box("ABCD"), box("AB"), box("BAD")]),
    # A word, and no letters of options.
    ("BAD", [box("bad")], [box("A, B, D"), box("DAB")]),
    ("AX", [], [box("A, X")]),
    (
        "Paris",
        ["The answer is Paris, the capital of France.", "Answer: Paris (France)", "Paris"],
        ["The answer is London, not Paris."],
    ),
    # Words that judge an answer, or are one.
    ("valid", ["The answer is valid.", "Answer: valid", "It is sound. So the answer is **valid**."], [
        "The answer is invalid.", "The answer is not valid.", "The answer is valid or invalid.", "The answer is valid. Wait, it is invalid.",
        "So it is invalid. This answer is valid.", "The answer is invalid. Let me verify that the answer is valid.",
        "Check whether the answer is valid.", "The answer is invalid. This is the right answer.",
    ]),
    ("right triangle", ["The answer is right triangle.", "**Final Answer:** right triangle"], ["The answer is left triangle.", "The answer is right."]),
    ("above", ["The answer is above.", box("above")], ["The answer is below.", "The answer is above 5."]),
    ("Yes", ["Yes, it is. The answer is valid."], ["No. The answer is valid."]),
    # Marks between an option's letter and its value.
    ("B", [
        "(B): Paris", "(B). Paris", "B - Paris", "B \u2014 Paris", "**B**: Paris", "**(B)**: Paris", "The answer is (B): Paris", "Answer: B - Paris",
        "<answer>(B): Paris</answer>", "#### (B): Paris", box("(B): 12"), box(r"\text{(B): Paris}"), "The answer is option B, 12 apples.",
        "Among A, B, C and D the best choice is B.",
    ], [
        "(C): Paris", "C - Paris", "**C**: Paris", "option C, 12 apples", "The best choice is C.", box("A - 1"), box("A - B"), "B - C",
        "(B): (C)", "(B). (C)", "option B, C",
    ]),
    *((one, [], [
        "(B): Paris or (C): London", "B: Paris or C: London", "B - Paris or C - London", "**B**: Paris or **C**: London", "(B). Paris and (C). London",
        "(B): Paris, (C): London", "The answer is option B, 12 apples or option C, 13 apples.", "The answer is option (B), 12, or (C), 13.",
    ]) for one in "BC"),
    ("12", ["(B): 12", "The answer is option B, 12 apples."], ["(B): 13", "option B, 13 apples"]),
    ("A-1", [box("A - 1")], [box("A"), box("1")]),
    ("A. Smith and B. Jones", ["A. Smith and B. Jones", box("A. Smith and B. Jones")], ["A. Smith", "(A)"]),
    # Conditions joined by a word, and sets.
    *((one, [
        *map(box, (r"x<-2 \text{ or } x>3", r"x>3 \text{ or } x<-2", r"(-\infty,-2)\cup(3,\infty)")),
        "The answer is $x<-2$ or $x>3$.", "The answer is x < -2 or x > 3.",
    ], [*map(box, (
        r"x<-2 \text{ and } x>3", r"x<-2 \text{ or } x>4", r"x\le -2 \text{ or } x>3", r"x>-2 \text{ or } x<3", "x<-2", r"x<-2 \text{ or } y>3",
        "(-2,3)", r"(-\infty,-2]\cup(3,\infty)",
    )), "The answer is $x<-2$ and $x>3$."]) for one in (r"(-\infty,-2)\cup(3,\infty)", r"x<-2 \text{ or } x>3")),
    (r"-2<x<0 \text{ or } x>1", [box(r"(-2,0)\cup(1,\infty)")], [box(r"(-2,0]\cup(1,\infty)"), box(r"(-2,1)")]),
    (r"x>2 \text{ and } x<3", [box("2<x<3"), box("(2,3)"), box("x<3, x>2")], [box(r"x>2 \text{ or } x<3"), box("[2,3]"), box(r"\mathbb{R}")]),
    ("x<-2, x>3", [box(r"x<-2 \text{ or } x>3")], [box(r"x<-2 \text{ or } x>4")]),
    ("x<a or x>b", [box(r"x>b \text{ or } x<a")], [box(r"x>a \text{ or } x<b"), box(r"x<a \text{ and } x>b")]),
    ("x=3 or x=5", [box("3,5"), box(r"x=5 \text{ and } x=3")], [box("3"), box("x=3")]),
    # Residues: a modulus is like a unit.
    *((one, [
        *map(box, (r"3 \pmod{7}", r"x \equiv 3 \pmod 7", r"3 \bmod 7", r"3\text{ mod }7", r"3 (\text{mod } 7)", r"10 \bmod 7", "3")),
        "The answer is x \u2261 3 (mod 7).", "So x \u2261 3 (mod 7).", r"The answer is $x \equiv 3 \pmod 7$.", "Answer: 3 mod 7", "x = 3 modulo 7",
    ], [*map(box, ("7", "4", r"4 \pmod 7", r"x \equiv 4 \pmod 7", r"\frac{3}{7}", "21"))]) for one in ("3", r"3 \pmod{7}", r"x \equiv 3 \pmod 7", "3 mod 7")),
    (r"x\equiv 3\pmod 7", [box(r"x \equiv -4 \pmod 7")], [*map(box, (
        r"3 \pmod 5", r"x \equiv 3 \pmod{14}", r"y \equiv 3 \pmod 7", "3 cm", r"3\%", r"x\equiv 3 \pmod 7, x\equiv 2 \pmod 5",
    ))]),
    ("7", [], [box(r"x \equiv 3 \pmod 7"), "So x \u2261 3 (mod 7).", box(r"\pmod 7")]),
    (r"2^{10} \bmod 7", [box("2"), box(r"2 \pmod 7")], [box("1024"), box("7")]),
    # Numbers of statements.
    *((one, [*map(box, (r"\text{I and II}", r"\text{I, II}", "II, I", r"\text{I and II only}", r"\text{(I) and (II)}")), "The answer is I and II."],
       [*map(box, (r"\text{I and III}", "I", "II", r"\text{I, II, III}", r"\text{I or II}", "1, 2")), "The answer is I or II."])
      for one in (r"\text{I and II}", r"\text{I, II}")),
    # Words that make another number of one, and words that do not.
    *((one, [], ["Answer: 5 to 6", "5 more than x", "Answer: 5 more than x", "5th of May", "The answer is the 5th of May.", "The answer is 5 plus n."])
      for one in "56"),
    ("12", ["The answer is 12 times a day.", "Answer: 12 more than Tom", "The answer is 12 to 1 decimal place.", "The answer is 12th."], []),
    # Small forms.
    ("12", [*map(box, (r"12\\", r"\color{red}{12}", r"\textcolor{blue}{12}"))], [box(r"\color{red}{13}"), box(r"1\\2")]),
    ("1.286", [box(r"\frac{9}{7} \approx 1.286"), "The answer is 9/7 \u2248 1.286."], [box(r"\frac{9}{7} \approx 1.386")]),
    (r"\max(a,b)", [box(r"\max\{a,b\}")], [box(r"\min\{a,b\}"), box(r"\max\{a,c\}")]),
    (r"\lg 2", [box(r"\log_{10} 2"), box(r"\lg(2)")], [box(r"\ln 2"), box(r"\lg 3")]),
    ("B", ["I choose B.", "I'd go with (B), since it is even.", "I would pick **B**.", "I select option B because it fits."],
     ["If I choose B, it fails. The answer is C.", "I choose A, B.", "I choose B and C.", "I choose to sell B shares"]),
    *((one, [], ["<answer>5 to 6</answer>", r"\boxed{5 more than x}", "<answer>5 to 6 minutes</answer>"]) for one in "56"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), STYLES)
def test_an_answer_counts_in_each_style_in_which_people_state_it(answer, right, wrong):
    wanted = answer_of_row(answer)

    assert wanted
    assert [one for one in right if not is_right(wanted, answer_of(one))] == []
    assert [one for one in wrong if is_right(wanted, answer_of(one))] == []


def scores(match, answer, *completions):
    task = MatchedTask(SourceConfig(name="jsonl:questions.jsonl", match=match))
    try:
        prompt = Prompt(index=0, text="", answer=answer)
        return [task.score(prompt, completion)[0].value for completion in completions]
    finally:
        task.close()


def test_an_answer_column_of_lists_holds_texts():
    assert scores("exact", '["z"]', "z", "y") == [1, 0]
    assert scores("exact", '["z", "y"]', "z", "y", "x") == [1, 1, 0]
    assert scores("exact", "[1, 2]", "[1, 2]", "1") == [1, 0]


@pytest.mark.process
def test_several_texts_of_a_list_are_all_values_for_mathematics():
    assert scores("math_verify", '["3", "4"]', box("4, 3"), box("3"), box("[3,4]")) == [1, 0, 0]
    assert scores("math_verify", '["5 cm"]', box("5"), box("6")) == [1, 0]
