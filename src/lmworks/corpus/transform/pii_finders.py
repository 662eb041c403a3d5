"""The words after which a telephone number stands, by script, and the ends of internationalized domains.

E-mail, IP and street addresses, telephone, card and account numbers in text.

Precision comes before recall: similar strings that are not personal data (versions, decorators, test numbers, documentation examples) are
kept. Every repetition in a pattern is bounded and none begins inside its own run, so that time is linear in the text. The finders read the
`ascii_form` of a text, in which digits of all scripts are ASCII. Only adjacent ASCII letters make an item part of a word, because Chinese
text has no spaces.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator

import regex

from lmworks.text.letters import SPACELESS, characters

# words of scripts with a case begin at the beginning of a word; the others may stand within one, as Arabic and Hindi join words
_CASED = (
    "tel telephone telefon telefone telefono teléfono teléf telèfon téléphone tél telefoon telefax telepon telp tlf tlfno tfno tfn "
    "phone mobile mobil mobiel móvil celular cellulare cell cel handy portable fixe gsm fax faks télécopie rufnummer whatsapp hotline kom "
    "komórka komorka cep telemóvel fone hp hubungi llame llámenos appelez call ring contacto kontakt puhelin puh sími simi "
    "тел телефон телефона телефону моб мобильный мобільний мобилен факс звоните дзвоніть звоните "
    "τηλ τηλέφωνο τηλεφωνο κινητό κινητο φαξ հեռ հեռախոս ტელ ტელეფონი მობილური điện đt sđt đtdđ"
)
_CASELESS = (
    "هاتف الهاتف تليفون تلفون جوال الجوال موبايل فاكس محمول واتساب اتصل تلفن تلفکس موبایل همراه تماس فون موبائل "
    "טלפון טל נייד פקס סלולרי फ़ोन फोन फ़ोन दूरभाष मोबाइल मोबाईल टेलीफोन टेलीफ़ोन संपर्क सम्पर्क फैक्स दूरध्वनी ফোন মোবাইল টেলিফোন যোগাযোগ "
    "தொலைபேசி கைபேசி அலைபேசி போன் ఫోన్ మొబైల్ ఫోను ಫೋನ್ ದೂರವಾಣಿ ಮೊಬೈಲ್ ഫോൺ മൊബൈൽ ഫോണ്‍ ફોન મોબાઇલ ਫ਼ੋਨ ਫੋਨ ਮੋਬਾਈਲ දුරකථන "
    "โทรศัพท์ โทร มือถือ แฟกซ์ เบอร์ ໂທລະສັບ ໂທ ទូរស័ព្ទ ទូរសព្ទ ဖုန်း တယ်လီဖုန်း 电话 電話 手机 手機 热线 熱線 傳真 传真 座机 微信 致电 "
    "携帯 ファックス ファクス お問い合わせ 전화 휴대폰 핸드폰 연락처 팩스 휴대전화 ስልክ"
)
_NUMBER = (
    "no|number|nr|nº|n°|№|num|núm|número|numéro|numero|nummer|numer|numara(?:sı)?|номер|номера|αριθμός|رقم|شماره|نمبر|מספר|नंबर|नम्बर|नं|নম্বর|"
    "நம்பர்|எண்|నంబర్|号码?|號碼?|番号|번호|số|thoại|di động|เลขที่|หมายเลข|នលេខ|លេខ|ቁጥር"
)
_LINKS = "us|at|on|is|est|es|é|ist|au|le|al|a|على|अब|पर|है|は|은|는|：|是|為|为"


def _alternatives(words: str) -> str:
    return "|".join(sorted(set(words.split()), key=lambda word: (-len(word), word)))


def _label(cased: str, caseless: str) -> str:
    names = rf"(?<![^\W\d_])(?:{_alternatives(cased)})" + (f"|{_alternatives(caseless)}" if caseless else "")
    more = "|".join(filter(None, (_NUMBER, _alternatives(cased), _alternatives(caseless))))
    return rf"(?:{names})(?:\.? ?(?:{more})){{0,2}}(?:\.? ?(?:{_LINKS})){{0,2}}['׳]?[ .:;=/()\-|]{{0,4}}\+?$"


PHONE_LABEL = _label(_CASED, _CASELESS)
"""Matches up to the end of the text before a number."""
ASCII_PHONE_LABEL = _label(" ".join(filter(str.isascii, _CASED.split())), "")
"""The same for text in ASCII, which takes less time."""

_INTERNATIONAL_DOMAINS = """
рф срб бел укр мкд қаз мон ею бг онлайн сайт орг ком москва дети ελ ευ հայ გე ישראל امارات مصر السعودية الاردن المغرب عمان قطر فلسطين
سورية تونس الجزائر عراق ليبيا السودان موريتانيا ایران ايران پاکستان بھارت شبكة موقع كوم بازار भारत भारतम् संगठन नेट कॉम ভারত বাংলা
ভাৰত ભારત ਭਾਰਤ ଭାରତ இந்தியா இலங்கை சிங்கப்பூர் భారత్ ಭಾರತ ഭാരതം ලංකා ไทย คอม ລາວ 中国 中國 台湾 台灣 香港 新加坡 澳門 澳门 한국 닷컴 닷넷
公司 网络 網絡 商城 在线 中文网 集团 网址 移动 政务 公益 みんな コム ストア
"""
DOMAINS = frozenset(_INTERNATIONAL_DOMAINS.split())
"""Top-level domains beyond ASCII."""


Span = tuple[int, int]
Finder = Callable[[str], Iterator[Span]]

# marks of direction, between which numbers stand in Arabic and Hebrew, and word boundaries of scripts without spaces
_UNSEEN = "\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# Of full-width punctuation only what numbers and addresses are written with: the rest ends them, while ASCII's is often that of code.
_FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if re.match(r"[\w+.@-]", chr(code - 0xFEE0))}
_PLAIN = _FULL_WIDTH | {ord(char): str(unicodedata.decimal(char, char)) for char in characters(r"[\p{Nd}--\p{ASCII}]")}
_PLAIN |= dict.fromkeys(map(ord, "‐‑‒–−"), "-")
_PLAIN |= dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u3000"), " ")
_PLAIN |= dict.fromkeys(map(ord, _UNSEEN), " ")
_PLAIN = {code: char for code, char in _PLAIN.items() if code < 0x10000}  # the search takes ten times as long with others
_FOREIGN = re.compile(f"[（{''.join(map(chr, _PLAIN))}]")
_BRACKETS = re.compile(r"（(\+?[0-9]{1,5})）")  # around an area code

_DIGITS = re.compile(r"[0-9][0-9 .()/-]{5,60}[0-9]")  # every kind of number contains a match

_EMAIL = re.compile(
    r"(?<![\w.+%/-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@"
    r"((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,6}([A-Za-z]{2,18}))(?![\w(\[@-]|\.\w)",
    re.ASCII,
)
_DOMAINS = "|".join(sorted(DOMAINS, key=lambda name: (-len(name), name)))
_LETTERS = r"\p{L}\p{M}\p{N}"
_EMAIL_OF_ANY_SCRIPT = regex.compile(
    rf"(?V1)(?<![{_LETTERS}._%+@/-])[\p{{L}}\p{{N}}][{_LETTERS}._%+-]{{0,63}}@"
    rf"((?:[\p{{L}}\p{{N}}][{_LETTERS}-]{{0,61}}\.){{1,6}}({_DOMAINS}|xn--[a-z0-9-]{{2,50}}|[A-Za-z]{{2,18}}))"
    rf"(?![\p{{M}}(\[@-]|[[\p{{L}}\p{{N}}]--{SPACELESS}]|\.[a-z0-9])"
)
_WORLDWIDE = (
    "com org net edu gov mil int info biz name pro aero coop museum mobi jobs travel tel asia cat post app dev xyz online site tech cloud "
    "shop store blog club top live email work world life today news agency digital company design studio space website group "
    "systems solutions photography international engineering consulting foundation community education management marketing academy "
    "center institute energy finance legal health care school university capital ventures partners services support network software "
    "technology berlin london paris tokyo hamburg koeln wien amsterdam nyc"
)
_ENDINGS = frozenset(_WORLDWIDE.split())
_EXAMPLES = re.compile(r"(?:^|\.)(?:example|test|invalid|localhost|local|localdomain|domain|foo|bar|baz|host)(?:\.[a-z]+)?$")
_MACHINE_ACCOUNTS = frozenset({"git", "hg", "svn", "noreply", "no-reply", "donotreply", "do-not-reply"})

_IPV4 = re.compile(r"(?<![\w.])(?<![vV<>~^-])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![\w-]|\.[\w*])", re.ASCII)
_VERSION = re.compile(
    r"(?:\b(?:versions?|release|ver|rev|v|sections?|chapter|build|python|firmware|software)|[=<>~^])[.:]?[\s\"'(]*$", re.IGNORECASE
)
_NETWORK = re.compile(r"\b(?:ip|addr(?:ess)?|host|from|server|ping|dns|gateway|inet|client|peer)\b[^\n]{0,12}$", re.IGNORECASE)
_ADDRESS_OF = re.compile(r"(?:^|[^A-Za-z])(?:ip|addr|address|host|server|gateway|inet|client|peer)[\"']?[=:：] ?[\"']?$", re.IGNORECASE)
_PUBLIC_SERVICES = frozenset({"8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9", "1.2.3.4"})
_SMALL = 64
_IPV6 = re.compile(r"(?<![\w:.])[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])", re.ASCII)

_INTERNATIONAL = re.compile(
    r"(?<![\w+.*/=^)\]-])\+([1-9][0-9]{0,2})((?:[ .-]?(?:\([0-9]{1,5}\)|[0-9]{1,5})){2,6})(?![\w(]|[.,-][0-9])",
    re.ASCII,
)
_NORTH_AMERICAN = re.compile(
    r"(?<![\w.,/+-])(?<!\) )(?:1[-. ])?"
    r"(?:\(([2-9][0-9]{2})\) ?|([2-9][0-9]{2})([-.]))([2-9][0-9]{2})[-.]([0-9]{4})(?![\w]|[-./,][0-9])",
    re.ASCII,
)
_SUBSCRIBER = re.compile(r"\(?[0-9](?:[ ()/.-]{0,2}[0-9]){6,14}(?![\w]|[.,-][0-9])", re.ASCII)
_FICTIONAL = re.compile(r"(?:1?[2-9][0-9]{2})?555[0-9]{4}")  # North American; elsewhere 555 is as good as any digits
_DATE = re.compile(r"(?:19|20)[0-9]{2}[-./ ](?:0?[1-9]|1[0-2])[-./ ](?:0?[1-9]|[12][0-9]|3[01])(?![0-9])")
_CHINESE_MOBILE = re.compile(r"(?<![\w.,/+=#-])1[3-9][0-9]{9}(?![\w]|[.,/-][0-9])", re.ASCII)
_HAN = re.compile("[\u4e00-\u9fff]")
_NAME, _ASCII_NAME = re.compile(PHONE_LABEL, re.IGNORECASE), re.compile(ASCII_PHONE_LABEL, re.IGNORECASE)
_COUNTRY = re.compile(
    r"1|7|2(?:0|7|1[1-368]|[2-6][0-9]|9[0178])|3(?:[0-469]|5[0-9]|7[0-8]|8[0-35-79])|4(?:[013-9]|2[013])|5(?:[1-8]|0[0-9]|9[0-9])"
    r"|6(?:[0-6]|7[0-9]|8[0-9]|9[0-2])|8(?:[1246]|5[02356]|8[06])|9(?:[0-58]|6[0-8]|7[0-79]|9[2-68])"
)

_CARD = re.compile(
    r"(?<![\w.,/=#+-])[2-6][0-9]{3}(?:([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,7}(?:\1[0-9]{3})?|([ -])[0-9]{6}\2[0-9]{5}|[0-9]{9,15})"
    r"(?![\w]|[-. ]?[0-9])",
    re.ASCII,
)
_ISSUERS = re.compile(
    r"4[0-9]{12}(?:[0-9]{3}){0,2}$|5[1-5][0-9]{14}$|2(?:22[1-9]|2[3-9][0-9]|[3-6][0-9]{2}|7[01][0-9]|720)[0-9]{12}$|3[47][0-9]{13}$|6(?:011|5[0-9]{2})[0-9]{12}$"
    r"|35[0-9]{14}$|3(?:0[0-5]|[68][0-9])[0-9]{11}$|62[0-9]{14,17}$"
)
_PUBLISHED_CARDS = (
    "4111111111111111 4242424242424242 4012888888881881 4000056655665556 5555555555554444 5105105105105100 5200828282828210 "
    "378282246310005 371449635398431 6011111111111117 6011000990139424 30569309025904 38520000023237 3530111333300000 "
    "3566002020360505 4222222222222"
)
_TEST_CARDS = frozenset(_PUBLISHED_CARDS.split())

_IBAN = re.compile(r"(?<![\w-])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![\w])", re.ASCII)
_LENGTHS = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 ES24 FI18 FO18 FR27 GB22 GE22 "
    "GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IS26 IT27 JO30 KW30 KZ20 LB28 LI21 LT20 LU20 LV21 MC27 MD24 ME22 MK19 MR27 MT31 "
    "MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SE24 SI19 SK24 SM27 TN24 TR26 UA29 XK20"
)
_IBAN_LENGTHS = {entry[:2]: int(entry[2:]) for entry in _LENGTHS.split()}

_STREET = re.compile(
    r"(?<![\w.,/$§-])(?<![0-9] )[1-9][0-9]{0,4}[A-Z]? (?:(?:North|South|East|West|[NSEW]\.?) )?"
    r"(?:[A-Z][a-z]{2,19} |[1-9][0-9]?(?:st|nd|rd|th) ){1,3}"
    r"(?:Street|St\.|St|Avenue|Ave\.|Ave|Road|Rd\.|Rd|Boulevard|Blvd\.|Blvd|Lane|Ln|Drive|Dr\.|Terrace|Parkway|Pkwy)(?!\w)"
    r"(?:,? (?:Apt|Suite|Unit|Apartment)\.? ?[0-9A-Z]{1,5})?"
    r"(?:, [A-Z][a-z]{2,19}(?: [A-Z][a-z]{2,19}){0,2},? [A-Z]{2} [0-9]{5}(?:-[0-9]{4})?)?(?!\w)"
)
_NO_STREET = re.compile(
    r"\b(?:Example|Main|Wall|Sesame|Downing"
    r"|January|February|March|April|May|June|July|August|September|October|November|December)\b"
)


def without_overlaps(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans from left to right; of two overlapping spans, the one that begins first."""
    end = 0
    for start, stop in sorted(spans):
        if start >= end:
            yield start, stop
            end = stop


def ascii_form(text: str) -> str:
    """The text with digits of all scripts, full-width letters and signs of numbers, dashes and spaces as ASCII, and marks of direction as
    spaces; of the same length."""
    if text.isascii() or not _FOREIGN.search(text):
        return text
    return _BRACKETS.sub(r"(\1)", text.translate(_PLAIN))


def emails(text: str) -> Iterator[Span]:
    """Addresses in existing top-level domains, in any script, except examples and machine accounts (git@, noreply@)."""
    if "@" not in text:
        return
    spans = [found.span() for found in _EMAIL.finditer(text) if _is_address(found[0], found[1], found[2])]
    taken = {text.index("@", start) for start, _ in spans}
    for other in _EMAIL_OF_ANY_SCRIPT.finditer(text) if not text.isascii() or "xn--" in text else ():
        new = text.index("@", other.start()) not in taken and (not other[0].isascii() or "xn--" in other[2])
        if new and _is_address(other[0], other[1], other[2]):
            spans.append(other.span())
    yield from without_overlaps(spans)


def _is_address(address: str, domain: str, ending: str) -> bool:
    known = ending.lower() in _ENDINGS or len(ending) == 2
    if ending.isascii() and not ending.startswith("xn--") and not (known and (ending.islower() or ending.isupper())):
        return False
    return address[: address.index("@")].lower() not in _MACHINE_ACCOUNTS and not _EXAMPLES.search(domain.lower())


def ips(text: str) -> Iterator[Span]:
    """Public addresses. Private, reserved, documentation and well-known addresses are kept, and so are probable version numbers."""
    spans: list[Span] = []
    for found in _IPV4.finditer(text) if _DIGITS.search(text) else ():
        if _is_public(found[0]) and found[0] not in _PUBLIC_SERVICES:
            before = text[max(0, found.start() - 30) : found.start()]
            small = max(map(int, found[0].split("."))) < _SMALL
            if _ADDRESS_OF.search(before) or (not _VERSION.search(before) and (not small or _NETWORK.search(before))):
                spans.append(found.span())
    for found in _IPV6.finditer(text) if ":" in text else ():
        if _is_public(found[0].rstrip(":") if not found[0].endswith("::") else found[0]):
            spans.append(found.span())
    yield from without_overlaps(spans)


def _is_public(address: str) -> bool:
    try:
        return (known := ipaddress.ip_address(address)).is_global and not known.is_multicast
    except ValueError:
        return False


def phones(text: str) -> Iterator[Span]:
    """Numbers with a country code, in the North American format, or after a word such as `tel` in one of forty languages, and Chinese
    mobile numbers in Chinese text; fictional 555 numbers are kept.
    """
    if not _DIGITS.search(text):
        return
    spans: list[Span] = []
    if "+" in text:
        for found in _INTERNATIONAL.finditer(text):
            digits = re.sub("[^0-9]", "", found[0])
            grouped = any(char in found[2] for char in " -(") or found[2].count(".") > 1
            plain = len(digits) >= 10 and "." not in found[2] and not set(digits) <= {"0", "1"}
            if 9 <= len(digits) <= 15 and (grouped or plain) and _COUNTRY.match(digits) and not _FICTIONAL.fullmatch(digits):
                spans.append(found.span())
    spans += [found.span() for found in _NORTH_AMERICAN.finditer(text) if found[4] != "555"]
    for found in _SUBSCRIBER.finditer(text):
        if not _FICTIONAL.fullmatch(re.sub("[^0-9]", "", found[0])) and not _DATE.match(found[0]):
            before = text[max(0, found.start() - 30) : found.start()]
            if (_ASCII_NAME if before.isascii() else _NAME).search(before):
                spans.append(found.span())
    for found in _CHINESE_MOBILE.finditer(text):
        if _HAN.search(text, max(0, found.start() - 20), found.end() + 20):  # no preceding word is needed in Chinese text
            spans.append(found.span())
    yield from without_overlaps(spans)


def cards(text: str) -> Iterator[Span]:
    """Card numbers of a known issuer with a correct check digit (Luhn), except the issuers' test numbers."""
    for found in _CARD.finditer(text) if _DIGITS.search(text) else ():
        digits = found[0].replace(" ", "").replace("-", "")
        if _ISSUERS.match(digits) and digits not in _TEST_CARDS and luhn(digits) and len(set(digits)) > 3:
            yield found.span()


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    doubled = (2 * int(digit) for digit in digits[-2::-2])
    return (sum(map(int, digits[::-2])) + sum(number - 9 * (number > 9) for number in doubled)) % 10 == 0


def ibans(text: str) -> Iterator[Span]:
    """Account numbers with the length of their country and correct check digits (ISO 13616)."""
    for found in _IBAN.finditer(text) if _DIGITS.search(text) else ():
        compact = found[0].replace(" ", "")
        length = _IBAN_LENGTHS.get(compact[:2], 0)
        if len(compact) < length or not length:
            continue
        number = compact[:length]
        if int("".join(str(int(char, 36)) for char in number[4:] + number[:4])) % 97 == 1 and (end := _end_of_characters(found[0], length)):
            yield found.start(), found.start() + end


def _end_of_characters(text: str, length: int) -> int:
    """The position after the first `length` non-blank characters of the text; 0 if that is inside a word."""
    places = [place for place, char in enumerate(text) if char != " "]
    end = places[length - 1] + 1
    return end if end == len(text) or text[end] == " " else 0


def streets(text: str) -> Iterator[Span]:
    """Street addresses in the English format; famous ones and examples are kept."""
    for found in _STREET.finditer(text):
        if not _NO_STREET.search(found[0]):
            yield found.span()
