"""The most common function words of each language: running text contains them; lists and fragments do not.

The English list is Gopher's (Rae et al. 2021, A1.1). The others have about as many words, chosen so that a page of prose contains at least
two different ones.
"""

from __future__ import annotations

STOP_WORDS: dict[str, tuple[str, ...]] = {
    language: tuple(words.split())
    for language, words in {
        "en": "the be to of and that have with",
        "ar": "في من على إلى أن عن التي الذي هذا ما لا كان",
        "bg": "на и да за се от не са ще че",
        "bn": "এবং এই করে থেকে জন্য না হয় তার একটি ও",
        "ca": "de la el i que en les per amb no és un",
        "cs": "a se na v že je to s z do které",
        "da": "og at det er en til af på som med den",
        "de": "der die und das ist zu in nicht mit den von",
        "el": "και το να του η της με για που δεν",
        "es": "de la que el en y los se un por con",
        "et": "ja on ei et see mis kui oli ka ning",
        "eu": "eta da ez du bat dira zen izan hau ere",
        "fa": "و در به از که این را با است برای",
        "fi": "ja on ei että se oli hän mutta joka ovat",
        "fr": "de la le et les des que en un est pour",
        "ga": "an na agus ar i le tá go bhí is",
        "gl": "de a o que e do da en un por",
        "he": "של את על לא זה הוא עם גם כי או",
        "hi": "के में की है से को और का यह नहीं",
        "hr": "i je u na se da za su od koji",
        "hu": "a az és hogy nem is egy ez volt meg",
        "id": "yang dan di ini itu dengan untuk dari pada tidak",
        "is": "og að er í á sem til það var með",
        "it": "di e la che il un non per è con del",
        "ko": "그 이 있다 수 것은 있는 및 등 대한 그리고",
        "lt": "ir yra kad į su tai bet kaip jo ne",
        "lv": "un ir no ar par ka to kas bet uz",
        "ms": "yang dan di ini itu dengan untuk dari pada tidak",
        "nl": "de het een van en in is dat niet te op",
        "no": "og i det er som en på til av med",
        "pl": "i w na z się nie do to że jest",
        "pt": "de a o que e do da em um para não",
        "ro": "de și în a la cu pe nu care din este",
        "ru": "и в на не что с как по это для из",
        "sk": "a sa na v je to že s z do",
        "sl": "in je na se v da za so ki pa",
        "sr": "и је у на се да за су од који",
        "sv": "och att det i som en på är av för med",
        "ta": "மற்றும் ஒரு இந்த என்று அந்த என இது அவர் உள்ள தனது",
        "tr": "ve bir bu da de için ile olarak çok daha",
        "uk": "і в на не що з як до та для це",
        "ur": "کے میں کی ہے سے اور کا کو یہ نہیں",
        "vi": "và của là các có được trong cho một không",
    }.items()
}
"""The rule does not apply to other languages."""
