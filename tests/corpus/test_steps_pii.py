"""Personal data: planted items are found, what looks like them stays, twice is once, hostile text takes no longer than its length."""

from __future__ import annotations

import itertools
import pydoc_data.topics
import random
import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_documents import outcomes_of, step_of

from lmworks.corpus.document import Document
from lmworks.corpus.transform.pii import FINDERS, entropy, mask
from lmworks.corpus.transform.pii_finders import luhn
from lmworks.recipe.schema.steps import Pii

ALL = tuple(FINDERS)
# put together here, so that no scanner of this repository takes them for real
TOKEN = "q7Jx2LmP9vRt4KzW8nBc5YdHs3FgA6uE1oTi"
KEY = f"-----BEGIN RSA PRIVATE {'KEY'}-----\n" + "\n".join([TOKEN + TOKEN[:28]] * 6) + f"\n-----END RSA PRIVATE {'KEY'}-----"

PLANTED = {
    "email": ["john.smith@gmail.com", "a_b+c@mail.uni-koeln.de", "MARIA@FIRMA.COM", "x@y.co.uk", "li.wei@qq.com",
        "maria.holm@lund.photography"],
    "ip": ["85.214.132.117", "203.1.113.77", "2a00:1450:4001:81b::200e", "2606:4700:4700::64"],
    "phone": ["+49 30 901820", "+1 (212) 664-7665", "(212) 664-7665", "212-664-7665", "+44 20 7946 0018", "+86 10 6552 9988",
        "+31641044153", "+8613817356692"],
    "card": ["4539 1488 0343 6467", "4539148803436467", "5425-2334-3010-9903", "3782 822463 10013",
        "2223 0031 2200 3222", "6222 0210 0111 2345 670"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432", "FR14 2004 1010 0505 0001 3M02 606", "NO93 8601 1117 947"],
    "secret": ["ghp_" + TOKEN, "AKIA" + "Q3EGRZK7WLM2N9XT", "sk-proj-" + TOKEN, "xoxb-" + "2094812731-" + TOKEN, KEY],
    "street": ["1247 North Oakwood Avenue", "88 Willow Creek Road, Apt 4B, Springfield, IL 62704", "23 Maple Street"],
}  # fmt: skip

STAYS = [
    "me@example.com",
    "root@localhost",
    "user@host.example.org",
    "git@github.com:org/repo.git",
    "noreply@github.com",
    "x = a@b.T",
    "w@x.to(device)",
    "icon@2x.png",
    "npm i pkg@1.2.3",
    "127.0.0.1",
    "192.168.0.12",
    "10.0.0.1",
    "0.0.0.0",
    "255.255.255.0",
    "192.0.2.44",
    "8.8.8.8",
    "version 2.14.90.101",
    "==12.200.3.4",
    "1.3.6.1.4.1.311.2",
    "v85.214.132.117",
    "::1",
    "fe80::1",
    "2001:db8::7",
    "x[::2]",
    "12:34:56",
    "00:1a:2b:3c:4d:5e",
    "555-0142",
    "(212) 555-0142",
    "+1 202 555 0142",
    "1995-12-17 03:24:00",
    "3.14159265358979",
    "+0.123456789",
    "1,234,567,890",
    "@@ -102,14 +102,22 @@",
    "4111 1111 1111 1111",
    "4539 1488 0343 6468",
    "1234567890123456",
    "ISBN 978-0-306-40615-7",
    "DE00 3704 0044 0532 0130 00",
    "AKIAIOSFODNN7EXAMPLE",
    "sk-your-key-goes-here-please",
    'password = "changeme-please"',
    'api_key = "YOUR_API_KEY_HERE_00"',
    "sk-learn-contrib-lightning-rods",
    "1 Main Street",
    "In 1861 the Long Road ended",
    "12 April Street",
    "٠١٢٣٤٥٦٧٨٩ ٠١٢٣",
    "１９２．１６８．１．１",
    "550e8400-e29b-41d4-a716-446655440000",
    "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
]


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in PLANTED.items() for value in values])
def test_planted_items_are_masked(kind: str, value: str) -> None:
    text, counts = mask(f"Please write to Anna ({value}), and soon.", ALL)
    assert text == f"Please write to Anna (<{kind.upper()}>), and soon."
    assert {name: count for name, count in counts.items() if count} == {kind: 1}
    assert mask(value, ALL)[0] == mask(f"\n{value}\n", ALL)[0].strip() == f"<{kind.upper()}>"


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert mask(f"See {text} here", ALL)[0] == f"See {text} here"
    assert mask(text, ALL)[0] == text


@pytest.mark.parametrize(("kind", "value"), [(kind, values[0]) for kind, values in PLANTED.items() if kind != "street"])
def test_nothing_stands_between_chinese_and_an_item(kind: str, value: str) -> None:
    assert mask(f"请联系{value}谢谢", ALL)[0] == f"请联系<{kind.upper()}>谢谢"
    assert mask(f"联系：{value}。", ALL)[0] == f"联系：<{kind.upper()}>。"
    for before, after in (("联系：", "（工作日）"), ("（", "）"), ("联系：", "，24小时"), ("（见附）", "／QQ")):
        assert mask(f"{before}{value}{after}", ALL)[0] == f"{before}<{kind.upper()}>{after}"


def test_a_key_that_is_cut_off_goes_all_the_same() -> None:
    begun = KEY.partition("\n-----END")[0]
    assert mask(f"here: {begun}", ALL)[0] == "here: <SECRET>"
    assert mask(f"{begun}\n\nand prose goes on.", ALL)[0] == "<SECRET>\n\nand prose goes on."
    assert mask(f"-----BEGIN PRIVATE {'KEY'}-----\nis how such a file begins", ALL)[0].endswith("is how such a file begins")


def test_a_number_after_its_name_and_a_key_after_its_name() -> None:
    assert mask("联系电话：010-65529988", ALL)[0] == "联系电话：<PHONE>"
    assert mask("手机号13817356692", ALL)[0] == "手机号<PHONE>"
    assert mask("电话（０１０）65529988", ALL)[0] == "电话<PHONE>"
    assert mask("手机13812345678，13912345678／13712345678", ALL)[0] == "手机<PHONE>，<PHONE>／<PHONE>"
    assert mask("ip=85.214.132.117 client_ip=14.15.16.17", ALL)[0] == "ip=<IP> client_ip=<IP>"
    assert mask("x=85.214.132.117", ALL)[0] == "x=85.214.132.117"
    assert mask(f"AWS_SECRET_ACCESS_KEY={TOKEN}", ALL)[0] == "AWS_SECRET_ACCESS_KEY=<SECRET>"
    assert mask("Tel.: 030 901820-12", ALL)[0] == "Tel.: <PHONE>"
    assert mask("电话: 010-65529988", ALL)[0] == "电话: <PHONE>"
    assert mask(f'client_secret = "{TOKEN}"', ALL)[0] == 'client_secret = "<SECRET>"'
    assert mask(f'{{"password": "{TOKEN[:16]}"}}', ALL)[0] == '{"password": "<SECRET>"}'
    assert mask("server 14.15.16.17 is down", ALL)[0] == "server <IP> is down"
    assert mask("see section 14.15.16.17", ALL)[0] == "see section 14.15.16.17"


def test_several_of_a_kind_in_any_order() -> None:
    draw = random.Random(0)
    for kind, values in PLANTED.items():
        for _ in range(10):
            chosen = draw.sample(values, len(values))
            text, counts = mask(" and then ".join(chosen), ALL)
            assert text == " and then ".join([f"<{kind.upper()}>"] * len(values))
            assert counts[kind] == len(values)


def test_only_the_kinds_that_were_asked_for() -> None:
    text = "john.smith@gmail.com called from +49 30 901820"
    assert mask(text, ("phone",))[0] == "john.smith@gmail.com called from <PHONE>"


def test_made_up_values_have_the_form_stay_and_are_the_same_for_the_same() -> None:
    for kind, values in PLANTED.items():
        first, counts = mask(f"{values[0]} and again {values[0]}, not {values[1]}", ALL, made_up=True)
        one, again, other = first.replace(", not ", " and again ").split(" and again ")
        assert one == again and counts[kind] == 3
        assert values[0] not in first and mask(first, ALL) == (first, dict.fromkeys(counts, 0))
        if kind in ("email", "ip"):
            assert one != other
    assert mask("2a00:1450:4001:81b::200e", ALL, made_up=True)[0].startswith("2001:db8::")


def test_check_digits_and_entropy() -> None:
    assert luhn("79927398713") and not luhn("79927398710")
    assert entropy("aaaa") == 0 and entropy("abcd") == 2


def test_the_step_counts_per_kind() -> None:
    step = step_of(Pii(kinds=("email", "ip")))
    outcome = outcomes_of(step, ["a.b@gmail.com, c.d@gmail.com from 85.214.132.117; call +49 30 901820"])[0]
    assert isinstance(outcome, Document)
    assert outcome.text == "<EMAIL>, <EMAIL> from <IP>; call +49 30 901820"
    assert dict(outcome.facts) == {"pii": 3, "pii_email": 2, "pii_ip": 1}
    assert set(step.statistics) == set(step.makes) == {"pii", "pii_email", "pii_ip"}


def test_almost_nothing_is_masked_in_reference_prose_and_library_code() -> None:
    """E-mail addresses of authors are real ones; of everything else there is next to none."""
    found = 0
    for text in pydoc_data.topics.topics.values():
        found += sum(mask(text, [kind for kind in ALL if kind != "email"])[1].values())
    assert found == 0
    others: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        counts = mask(path.read_text("utf-8", "replace"), [kind for kind in ALL if kind != "email"])[1]
        others += [f"{path.name} {kind}" for kind, count in counts.items() if count]
    assert len(others) <= 2, others


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from([value for values in PLANTED.values() for value in values] + STAYS + list("+-.@ 1a(:\n5<")), max_size=12),
    st.booleans(),
)
def test_masking_twice_is_masking_once(pieces: list[str], made_up: bool) -> None:
    once, _ = mask("".join(pieces), ALL, made_up)
    assert mask(once, ALL, made_up) == (once, dict.fromkeys(ALL, 0))


HOSTILE = [
    "1",
    "1 ",
    "1-",
    "1.",
    "+1 ",
    "+",
    "a@",
    "a.",
    "a@a.",
    "@",
    "a@" + "b" * 63,
    ":",
    "2001:",
    "2001:a:",
    "-----BEGIN PRIVATE KEY-----",
    "A",
    'password="',
    'api_key="aaaaaaaaaaaaaaaaaaaaaaaa',
    "4111 ",
    "4111111111111111 ",
    "DE89",
    "DE89 3704 ",
    "1 Aa ",
    "12 North Ab Cd Ef ",
    "(201) ",
    "201-",
    "tel ",
    "eyJa.",
    "eyJaaaaaaaaaa.",
    "sk-",
    "ghp_a",
    "\u0661",
    "1(",
    "-----BEGIN PRIVATE KEY-----" + "A" * 150 + "-----END ",
]


def _hostile(size: int) -> None:
    draw = random.Random(3)
    texts = [*((unit * (size // len(unit) + 1))[:size] for unit in HOSTILE), "".join(draw.choices("0123456789+-. ()@:aA", k=size))]
    for text in texts:
        for kind, finder in FINDERS.items():
            spans = list(finder(text))
            assert all(start < stop for start, stop in spans), kind
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans)), kind


def test_hostile_text_of_100_kb() -> None:
    _hostile(100_000)


@pytest.mark.slow
def test_hostile_text_of_10_mb() -> None:
    """A pattern that backtracks over its input would be here until the test times out."""
    _hostile(10_000_000)


def test_running_chinese_and_shell_variables_and_dates() -> None:
    kinds = ("phone", "secret")
    key = "0HWP1KK83tqXmJoD1zRRmJ3Ob9e6W2c43OWenp3W"
    assert mask("请在中午之前联系13892884695谢谢。", kinds)[0] == "请在中午之前联系<PHONE>谢谢。"
    assert mask("contact: 13892884695", kinds)[0] == "contact: 13892884695", "eleven digits in English may be anything"
    for frame in ("Send it to AWS_SECRET_ACCESS_KEY={}!", "转账到AWS_SECRET_ACCESS_KEY={}即可。"):
        assert mask(frame.format(key), kinds)[0] == frame.format("<SECRET>")
    for text in (f"SECRET_KEY={key}(os.environ)", "电话：2024-08-13 18:28:32（工作日）"):
        assert mask(text, kinds)[0] == text


LOCAL = [
    "هاتف: 0501234567", "الهاتف: ٠١-٢٣٤٥٦٧٨", "رقم الجوال: ٠٥٠ ١٢٣ ٤٥٦٧", "اتصل على 04 123 4567", "تلفن: ۰۲۱-۱۲۳۴۵۶۷۸", "فون: 042-12345678",
    "फ़ोन: 022-23456789", "दूरभाष: ०२२ २३४५ ६७८९", "मोबाइल नंबर: 98765 43210", "ফোন নম্বর: ০১৭১২-৩৪৫৬৭৮", "தொலைபேசி: 044-12345678",
    "โทร. 02-123-4567", "โทรศัพท์ ๐๘๑-๒๓๔-๕๖๗๘", "เบอร์โทร: 081 234 5678", "ဖုန်း: ၀၉-၁၂၃၄၅၆၇၈", "ទូរស័ព្ទ: 012 345 678",
    "Tél. : 01 23 45 67 89", "Téléphone : 01.23.45.67.89", "Appelez le 01 23 45 67 89", "Teléfono: 912 345 678", "Móvil: 612 34 56 78",
    "Тел.: 8 (495) 123-45-67", "Телефон: 495 123 45 67", "Звоните: 8-800-123-45-67", "Τηλ.: 210 123 4567", "טלפון: 03-1234567",
    "ĐT: 028 3823 4567", "Điện thoại: 0912.345.678", "Số điện thoại: (028) 3823 4567", "Telefon: 0212 123 45 67", "Telepon: (021) 123-4567",
    "電話：03-1234-5678", "電話番号は03-1234-5678", "ＴＥＬ：０３－１２３４－５６７８", "携帯：090-1234-5678",
    "电话：０１０－１２３４５６７８", "전화: 02-123-4567",
    "هاتف: \u200e0501234567", "رقم الهاتف: \u202b0501234567", "טל' 03-1234567", "โทร\u200b081-234-5678",  # marks between the two
    "Тел.: 8 (495) 555-12-34", "โทร 081-555-1234", "Телефон: 8-800-555-35-35", "Tel.: +49 30 5551234", "TEL: +81 3 5551 2345",  # no fiction
]  # fmt: skip
WORLD = [
    "почта@почта.рф", "info@münchen.de", "用户@例子.公司", "अजय@डाटा.भारत", "josé@correo.es", "a@xn--e1afmkfd.xn--p1ai",
    "ｕｓｅｒ＠ｇｍａｉｌ．ｃｏｍ",
]  # fmt: skip
NOT_LOCAL = [
    "سنة ١٩٩٥ ١٢ ١٧", "том 12345678 страница", "ปี 2542 2543 2544", "第１２３４５６７号", "Tel Aviv 1909 1948 1967",
    "電話は1876年に発明された", "telefonu 1234567 değil", "@пример", "имя@ничего.нетакого", "إصدار ٢.١٤.٩٠", "contact 2019-12-17",
]  # fmt: skip


@pytest.mark.parametrize("text", LOCAL)
def test_a_local_number_after_its_label_is_masked_in_forty_languages(text: str) -> None:
    masked, counts = mask(f"{text}\n", ALL)
    assert counts["phone"] == 1 and masked.endswith("<PHONE>\n")
    assert masked[0] == text[0] and not any(char.isdecimal() for char in masked)


@pytest.mark.parametrize("value", WORLD)
def test_addresses_of_any_script_are_masked(value: str) -> None:
    assert mask(f"{value}, ", ALL)[0] == "<EMAIL>, "


@pytest.mark.parametrize("text", NOT_LOCAL)
def test_numbers_and_names_of_other_languages_stay(text: str) -> None:
    assert mask(text, ALL)[0] == text


def test_made_up_values_are_equal_however_digits_are_written() -> None:
    assert mask("هاتف: ٠٥٠١٢٣٤٥٦٧", ALL, made_up=True)[0].split()[1:] == mask("هاتف: 0501234567", ALL, made_up=True)[0].split()[1:]


@pytest.mark.parametrize("piece", ["я@", "@я.", "я@я.", "٠ ", "тел", "تلفن", "tel: 1", "xn--", "é@é.é"])
def test_hostile_text_of_other_scripts_takes_linear_time(piece: str) -> None:
    begun = time.process_time()
    mask(piece * (100_000 // len(piece)), ALL)
    assert time.process_time() - begun < 5
