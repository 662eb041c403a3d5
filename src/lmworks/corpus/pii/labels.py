"""The words after which a telephone number stands, by script, and the ends of internationalized domains."""

from __future__ import annotations

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
    return rf"(?:{names})(?:\.? ?(?:{more})){{0,2}}(?:\.? ?(?:{_LINKS})){{0,2}}[ .:;=/()\-|]{{0,4}}\+?$"


PHONE_LABEL = _label(_CASED, _CASELESS)
"""Matches up to the end of the text before a number."""
ASCII_PHONE_LABEL = _label(" ".join(filter(str.isascii, _CASED.split())), "")
"""The same for text in ASCII, which takes less time."""

_DOMAINS = """
рф срб бел укр мкд қаз мон ею бг онлайн сайт орг ком москва дети ελ ευ հայ გე ישראל امارات مصر السعودية الاردن المغرب عمان قطر فلسطين
سورية تونس الجزائر عراق ليبيا السودان موريتانيا ایران ايران پاکستان بھارت شبكة موقع كوم بازار भारत भारतम् संगठन नेट कॉम ভারত বাংলা
ভাৰত ભારત ਭਾਰਤ ଭାରତ இந்தியா இலங்கை சிங்கப்பூர் భారత్ ಭಾರತ ഭാരതം ලංකා ไทย คอม ລາວ 中国 中國 台湾 台灣 香港 新加坡 澳門 澳门 한국 닷컴 닷넷
公司 网络 網絡 商城 在线 中文网 集团 网址 移动 政务 公益 みんな コム ストア
"""
DOMAINS = frozenset(_DOMAINS.split())
"""Top-level domains beyond ASCII."""
