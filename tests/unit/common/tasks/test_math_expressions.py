"""Answers of data sets and completions of models as mathematics: what is read, what is right, and what is refused."""

import pytest

from heterorl.common.tasks.rewards.math_comparison import answer_of_row, is_right
from heterorl.common.tasks.rewards.math_expressions import Text

# An answer column, what a box may hold that is right, and what is wrong.
PAIRS = [
    (r"\frac{9}{7}", ["9/7", r"\dfrac97"], ["9", "7"]),
    (r"-\frac{2}{3}", ["-2/3"], ["2/3"]),
    (r"\frac12", ["0.5", ".5", "\u00bd"], ["1", "2"]),
    (r"\frac{\sqrt{3}}{2}", [], ["3", "2"]),
    (r"\sqrt{17}", ["\u221a17"], ["17"]),
    (r"\pi", ["\u03c0"], ["3"]),
    (r"1 - \sqrt{2}", [r"1-\sqrt{2}"], ["1", r"\sqrt{2}"]),
    (r"3 + 2\sqrt{5}", [], ["2", "3", "5"]),
    (r"2\sqrt{13}", [], ["2", "13"]),
    ("2\u221a3", [r"2\sqrt{3}"], ["2", "3"]),
    ("5\u03c0", [r"5\pi"], ["5"]),
    ("x \u2265 3", [r"x \ge 3"], ["3"]),
    ("\u22127", ["-7"], ["7"]),
    ("(3, -4)", ["(3,-4)"], ["-4", "(-4,3)"]),
    ("[2, 7)", ["[2,7)"], ["7", "[2,7]"]),
    (r"(-\infty, 4]", [], ["4"]),
    ("x^2 + 3x - 4", ["(x+4)(x-1)"], ["4", "-4"]),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", [], ["4", r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}"]),
    (r"\{1, 2, 3\}", [r"\{3,1,2\}"], ["3", r"\{1, 2\}"]),
    ("2^{10}", ["1024", "2^10"], ["2", "10"]),
    ("6 - 5i", [], ["5", "6"]),
    ("4s+3t", [], ["4s+3", "4s"]),
    ("1, -5", ["-5, 1"], ["-5", "1"]),
    ("x = 3, y = 4", ["x=3,y=4"], ["4", "x=4, y=3"]),
    ("3 and 8", ["3, 8", r"3 \text{ and } 8"], ["8", "3"]),
    (r"7 \text{ or } 8", ["7, 8"], ["8"]),
    ("$3$ and $8$", ["3, 8"], ["8"]),
    ("x=5", ["5"], ["6"]),
    ("y = 2x + 3", ["2x+3"], ["3"]),
    (r"-1 < x < 3", [], ["3", "[-1,3]"]),
    (r"10{,}080", ["10080", "10,080", r"10\,080"], ["10", "80"]),
    (r"10\,080", ["10080", "10 080"], ["10", "80"]),
    ("10\u202f080", ["10080"], ["10"]),
    ("1,234", ["1234"], ["1", "234"]),
    ("100,200,300", ["100200300", "100, 200, 300"], ["300", "100, 200"]),
    # Commas of a number or of a list; 000 is no value of a list.
    ("100, 200", ["100,200", "200,100"], ["100200", "100", "100,201"]),
    ("-1, 200", ["-1,200"], ["-1200"]),
    ("100", [], ["100,100", "100,200"]),
    ("1,000", ["1000"], ["1, 0", "1, 000"]),
    ("1,000, 2,000", ["1000, 2000"], ["1000"]),
    ("1.2e5", ["120000", r"1.2 \times 10^5"], ["1.2", "5"]),
    (r"2.5 \times 10^{6}", ["2500000", "2.5e6"], ["2.5"]),
    (r"18\%", ["0.18", "18%", r"\frac{18}{100}"], ["0.17", "1.8"]),
    ("10 percent", ["0.1", r"10\%"], ["1"]),
    (r"33\frac{1}{3}\%", ["1/3"], ["33"]),
    ("3 1/2", ["3.5", r"\frac{7}{2}", r"3\frac12"], ["1.5", "3"]),
    (r"$0.\overline{3}$", ["1/3"], ["0.3"]),
    (r"$\emptyset$", [r"\varnothing", "\u2205"], ["0"]),
    ("$101_2$", ["101_{2}", "101\u2082"], ["101", "5"]),
    (r"$\frac{1}{2^{99}}$", ["2^{-99}"], [r"\frac{1}{2^{98}}"]),
    ("0.00000012", ["1.2e-7"], ["0.0000003"]),
    (r"\frac{1}{3}", ["0.333333"], ["0.3"]),
    (r"\text{(B)}", ["B", "(B)", r"\textbf{B}"], ["C", r"\text{(C)}"]),
    ("(A)", ["A", "A.", "a"], ["B", "b"]),
    ("B", [r"\textbf{(B)} 12", r"(B)\ 12", "B) twelve", "B. 12"], ["(C) 12", "12"]),
    ("12", [r"\textbf{(B)} 12", r"\text{(B) }12", "B: 12"], ["(B) 13"]),
    ("E. coli", ["E. coli"], ["F. coli"]),
    ("7", ["\uff17", "7\u5143", "7\\text{\u5143}", "7 \uac1c"], ["\uff18", "7\u4e07", "7\u5341"]),
    ("Tuesday", [r"\text{Tuesday}", "tuesday"], ["Monday", "5"]),
    ("no", ["No"], ["on", "yes"]),
    ("xy", ["yx", r"x \cdot y"], ["x"]),
    (r"\$18.90", ["$18.90", "18.9"], ["18"]),
    ("$18.90", ["18.90", r"\$18.90"], ["18"]),
    ("\u20ac5", ["5"], ["6"]),
    ("n = 12", ["12"], ["13"]),
    # Units: two known ones must agree, an unknown one says nothing.
    ("5 cm", ["5", r"5\text{ cm}", "5 centimetres", "5 apples"], ["6", "5 m", r"5\text{ cm}^2", "5 kg", r"\$5", "5%"]),
    ("5", ["5 cm", r"5\%", r"\$5", r"5^\circ", "5 m/s", r"5\text{ sq units}"], ["6 cm"]),
    (
        r"20\text{ cm}^2",
        ["20", "20 sq cm", "20 cm\u00b2", r"20\text{ square cm}"],
        ["400", "20 m^2", r"20\text{ cm}^3"],
    ),
    ("15 miles per hour", ["15", "15 mph", r"15\text{ mi/h}"], ["16", "15 miles", "15 km/h", "15 miles per minute"]),
    ("5 km", ["5 km a day", "5 km per trip"], ["5 km/h", r"5\text{ km/h}", "5 kmh", r"5\ \frac{\text{km}}{\text{h}}"]),
    ("5 dollars", ["$5 per hour"], []),
    ("5 kg", [], [r"5\text{ kg/m}^3", "5 km"]),
    ("9.8 m/s^2", ["9.8 m/s/s", "9.8 meters per second per second", "9.8 m/s^2"], ["9.8 m", "9.8 km/s/s"]),
    ("5 L/min", ["5 liters per one minute"], ["5 L", "5 L/s"]),
    ("12", [r"\text{twelve } (12)", "12 dozen", r"12\text{ dozen}"], ["12 or more", r"\text{negative } 12"]),
    ("negative 12", ["-12", r"\text{minus } 12"], ["12"]),
    ("5 minutes", ["5 min", "5 m", r"5\text{ mins}"], ["5 hours", "5 sec"]),
    ("5 pounds", ["5 lbs", "\u00a35"], ["5 kg", r"5\text{ ounces}"]),
    ("30 mL", ["30 cm^3", "30 ml"], ["30 L"]),
    ("5 dollars", [r"\$5", "$5", "5 USD"], ["5\u00a2", "5 euros", r"\text{5 cents}"]),
    (r"30^\circ", ["30 degrees", r"30^\circ C"], [r"30 \text{ radians}", r"30\%"]),
    (r"30^\circ C", ["30", r"30 \text{ degrees Celsius}", r"30^\circ"], [r"30^\circ F"]),
    ("5\u7c73", ["5", "5 m", "5\u4e2a"], ["5\u5398\u7c73", "5 cm"]),
    (r"12.5\%", ["12.5", "0.125", r"\frac18", r"12.5\text{ percent}"], ["1.25", r"0.125\%", "12.5 cm"]),
    ("12.5", [r"12.5\%"], [r"1.25\%"]),
    (r"5\%, 10\%", ["5%, 10%"], [r"5\%, 11\%"]),
    ("f(2)=3", ["3", "f(2)=1+2=3"], ["4", "f(2)=4", "f(4)=3"]),
    ("f(2)=3, f(3)=5", ["3, 5"], ["3", "f(2)=4, f(3)=6"]),
    ("f(x)=x^2", ["x^2"], ["x^3", "x"]),
    # An equation gives its right side to a name, a function or several unknowns.
    (
        "3",
        [
            "3=x",
            "f(2)=3",
            "2+1=3",
            "x=2+1=3",
            "a+b=3",
            r"\sin A = 3",
            "|z|=3",
            "[ABC]=3",
            r"\angle ABC = 3",
            r"\text{Area of } ABC = 3",
        ],
        ["x^2=3", "2x=3", "x+1=3", r"\sqrt{x}=3", "2^x=3", "3=x^2"],
    ),
    ("3, 4", ["x=3, y=4"], ["x^2=3, y^2=4"]),
    ("x^2=3", [], ["3"]),
    ("0.5", [r"P = \frac{1}{2} = 50\%", r"\frac12, 0.5"], [r"2x = 0.5", r"\frac12, \frac13"]),
    (r"5 \text{ million}", ["5000000"], ["5"]),
    (r"60^\circ", ["60", "60\u00b0"], ["61"]),
    ("3:20 PM", [r"3:20\text{ p.m.}", "3:20", "15:20"], ["3:20 AM", "6:40 PM", "3:21 PM", r"\frac{3}{20}"]),
    ("8:00 am", ["8:00", r"8\text{ AM}", "8"], ["8:00 PM", "20:00", "8:30 am"]),
    ("12:30 PM", ["12:30"], ["00:30", "12:30 am"]),
    ("12:00 am", ["24:00", "0:00"], ["12:00 pm"]),
    ("14:05", ["2:05 PM"], ["14:50", "2:05 AM", "2.8"]),
    ("2:3", ["4:6", "2/3"], ["3:2"]),
    ("7", ["7 PM", "7:00"], ["7:30"]),
    ("2024-05-01", [], ["2018", "2024-01-05"]),
    ("3abc", [r"a \cdot 3bc"], ["3", "3xyz"]),
    (r"\frac{1}{6}xyz", [r"\frac{xyz}{6}"], [r"\frac{1}{6}"]),
    ("3 hundred", ["300"], ["3"]),
    ("5 cats", ["5", "5cats"], ["6"]),
    (r"8$\sqrt{3}$", [r"8\sqrt{3}"], [r"\sqrt{3}"]),
    (r"$2\sqrt{13}$ meters", [r"2\sqrt{13}"], ["2"]),
    (r"As $x=2$, the answer is $\boxed{5}$.", ["5"], ["2"]),
    ("... the answer is 7 points each, so 3*7=21.\n#### 21", ["21"], ["7"]),
    ("He pays $12 .. $4 ..\n#### 1,600", ["1600"], ["4", "1"]),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), PAIRS)
def test_an_answer_is_read_as_its_author_wrote_it(answer, right, wrong):
    read = answer_of_row(answer)

    assert read is not None
    for content in [answer.rpartition("####")[2] if "boxed" not in answer else "5", *right]:
        assert is_right(read, f"so it is $\\boxed{{{content}}}$."), content
    for content in wrong:
        assert not is_right(read, f"so it is $\\boxed{{{content}}}$."), content


@pytest.mark.parametrize(
    "answer",
    [
        "", "#### ", "$", r"\frac{1}{", "2 +", "3 +* 4", "((3)", "[1, 2", r"\foo{3}", "x is 5", "5 6", "3.000.000",
        "5 apples and 3 pears", "He has 5 apples since he bought 3", "Tom: 5 Ann: 6", "101_2 + 11_2", "about 5",
        r"\text{increase by } 5", "The capital of France is Paris since the twelfth century",
    ],
)  # fmt: skip
def test_what_cannot_be_read_to_its_end_is_no_answer(answer):
    assert answer_of_row(answer) == []


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("-7", "The answer is \u22127", True),
        ("B", "It rains. The correct option is B.", True),
        ("B", "The correct option is C.", False),
        ("B", "Answer: B) 12", True),
        ("12", "Answer: (B) 12.", True),
        ("13", "Answer: B) 12", False),
        ("7", "2+5\n\u7b54\u6848\uff1a7\u3002", True),
        ("7", "7-2\n\u7b54\u6848\u662f5", False),
        ("7", "The answer is \u22127.", False),
        (r"2\sqrt{3}", "The answer is 2\u221a3.", True),
        ("2", "The answer is 2\u221a3.", False),
        ("18", "So she makes $18 every day.", True),
        ("18", "**Answer: 18**", True),
        ("18", "The answer is \\(18\\).", True),
        ("18", "She has 18 left.\n#### 18", True),
        ("18", "Therefore 18 - 3 = 15", False),
        ("18", "<answer>18</answer>", True),
        ("18", "18, no: <answer>17</answer>", False),
        ("16", "16", True),
        ("3, 8", "\\boxed{3} and \\boxed{8}", True),
        ("3, 8", "The answers are 3 and 8.", True),
        ("Tuesday", "The answer is Tuesday.", True),
        ("Tuesday", "Tuesday", True),
        ("Tuesday", "The answer is Monday, not Tuesday.", False),
        ("B", "The answer is (B).", True),
        ("B", "It is \\boxed{\\text{A}}, not B", False),
        # A stated answer counts, not the last number of the text.
        ("7", "The answer is **5**. There were 7 apples.", False),
        ("5", "The answer is **5**. There were 7 apples.", True),
        ("7", "The answer is \\$5. He had $7.", False),
        ("7", "She has 7. The answer is unknown.", False),
        ("7", "**Answer**: 7 apples. He had 9.", True),
        ("7", "The answer is **7**.\n\nI hope this answers your question about 9.", True),
        ("7", "The answer is 7.\n\nI hope this **answer** helps you.", True),
        ("7", "So x = 7. This answer is correct.", True),
        ("7", "The answer is as follows:\n\n$$7$$", True),
        ("7", "So 7 is the answer to the question.", True),
        ("B", "The answer is **B**.", True),
        # The last statement counts, also of one line.
        ("7", "The answer is 8. Wait, the answer is 7.", True),
        ("8", "The answer is 8. Wait, the answer is 7.", False),
        ("7", "The answer is 7, since 10 - 3 = 7 and 2 + 3 = 5.", True),
        ("7", "The answer is $7, and he had $20 at first.", True),
        # Several values are no single answer, unless they are equal.
        ("7", "The answer is either 7 or 8.", False),
        ("7", "The answer is 7 or maybe 8.", False),
        ("7", "So x is 8 or 7.", False),
        ("8, 7", "So x is 8 or x = 7.", True),
        ("8, 7", "The answer is either 7 or 8.", True),
        ("1/2", "The answer is 1/2, or 50%.", True),
        ("18", "She eats 1 or 2 eggs a day, so 18 are left.", True),
        # A denied value is no answer, and a denied statement ends what stands before it.
        ("7", "The answer is not 7.", False),
        ("7", "She has 7. The answer isn't 7.", False),
        ("7", "She has 7. The answer cannot be $7$.", False),
        ("7", "The answer is not \\boxed{7}.", False),
        ("7", "The answer is neither 7 nor 8.", False),
        ("7", "#### not 7", False),
        ("7", "It is not 7.", False),
        ("7", "The wrong answer is 7.", False),
        ("7", "7 is not the answer.", False),
        ("7", "The answer is less than 7.", False),
        ("6", "The answer is between 6 and 9.", False),
        ("7", "\u7b54\u6848\u4e0d\u662f7\u3002", False),
        ("7", "\u7b54\u6848\u662f7\uff0c\u800c\u4e0d\u662f8\u3002", True),
        ("7", "\u7b54\u6848\u4e0d\u662f8\uff0c\u800c\u662f7\u3002", True),
        ("7", "The answer is 7. The answer is not 8.", True),
        ("7", "The answer is not 8 but 7.", True),
        ("7", "So she has 7 apples, not 8.", True),
        ("7", "She can make no more than 7.", True),
        ("7", "The wrong answer is 8. The right answer is 7.", True),
        ("B", "The answer is B, not C.", True),
        ("Tuesday", "The answer is Tuesday, not Monday.", True),
        ("not possible", "The answer is not possible.", True),
        ("5 cm", "The answer is $5$ m.", False),
        # A box that cannot be read is wrong, also behind a right number.
        ("7", "She has 7. \\boxed{?}", False),
        ("7", "\\boxed{5 \\to 7}", False),
    ],
)
def test_a_completion_says_its_answer_in_a_box_or_in_words(answer, completion, right):
    assert is_right(answer_of_row(answer), completion) is right


def test_an_answer_of_words_is_no_product_of_letters():
    assert answer_of_row("Yes") == [Text("yes")] == answer_of_row(r"\text{Yes}")
    assert answer_of_row("ab") != Text("ab")


@pytest.mark.parametrize("answer", ["12", r"\frac12", "(1,2)", "B", "(B) 12", "5 cm", "2:30 PM"])
@pytest.mark.parametrize("words", ["exec('raise SystemExit')", "E. coli", "(B) exec('raise SystemExit')"])
def test_words_of_a_completion_never_run_as_code(answer, words):
    for completion in (f"\\boxed{{{words}}}", f"<answer>{words}</answer>", f"The answer is {words}"):
        assert is_right(answer_of_row(answer), completion) is (words[:3] == "(B)" and "B" in answer)


def test_more_digits_than_python_reads_are_a_wrong_answer():
    assert not is_right(answer_of_row("12"), "\\boxed{0.\\overline{" + "3" * 5000 + "}}")
    assert not is_right(answer_of_row("12"), "The answer is " + "1" * 20_000)
