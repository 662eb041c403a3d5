"""The most common function words of each language: running text contains them; lists and fragments do not.

The English list is Gopher's (Rae et al. 2021, A1.1). The others were chosen so that a paragraph of prose contains at least two different
ones; languages with endings instead of small words need more. In scripts without spaces they are searched for inside the text,
where they are a part of other words, too; so their share is what counts.
"""

from __future__ import annotations

STOP_WORDS: dict[str, tuple[str, ...]] = {
    language: tuple(words.split())
    for language, words in {
        "en": "the be to of and that have with",
        "af": "die en van het is in te dat met vir nie wat op sy 'n aan of om",
        "am": "እና ነው በ ላይ ውስጥ ወደ የ ይህ ከ እንደ ግን ሁሉ ወይም አለው ነበር ጋር ስለ ዘንድ ያለው እያንዳንዱ ማንኛውም በማናቸውም ለ አንድ ሌላ",
        "ar": "في من على إلى أن عن التي الذي هذا ما لا كان هذه أو و مع إذا كل هو هي ثم لم قد بين بعد كما",
        "as": (
            "আৰু এই এটা কৰা পৰা বাবে হয় কৰক আপুনি লগত নাই সকলো কৰিব অথবা যদি হ'ব পাৰে এক তাৰ কোনো সেই নহয় আছে আপোনাৰ কৰে "
            "পাৰিব লৈ বা যি"
        ),
        "az": "və bu bir üçün ilə də olan hər ki o öz olmaq kimi daha çox var edən amma вә бу бир үчүн илә да олан һәр олмаг өз",
        "be": "і ў на не што з да як для гэта па але ці яго з'яўляецца мае кожны або быць",
        "bg": "на и да за се от не са ще че с това като или по",
        "bn": "এবং এই করে থেকে জন্য না হয় তার একটি ও করা এ হবে বা ছিল আর কিন্তু যে এক হয়েছে সে আমি এর যা",
        "bo": "དང གི ལ གྱི ཀྱི དེ ནས ཡོད པ བ འདི ཡིན སོགས རང ས ན ནི",
        "ca": "de la el i que en les per amb no és un",
        "cs": "a se na v že je to s z do které i jako pro o by ale",
        "cy": "y yr a i o yn ac ar wedi mae gan neb bod am ei neu na",
        "da": "og at det er en til af på som med den ikke for de har jeg han",
        "de": "der die und das ist zu in nicht mit den von",
        "dz": "དང གི ལུ གྱི ཀྱི དེ ལས ཡོདཔ འདི ཨིན རང ནི ག",
        "el": "και το να του η της με για που δεν την ή είναι από σε στο τα μια τον θα δε",
        "eo": "la kaj de en al ke estas ne por kun aŭ li ĉiu havas sed ĝi el",
        "es": "de la que el en y los se un por con",
        "et": "ja on ei et see mis kui oli ka ning ta aga või mida ma",
        "eu": "eta da ez du bat dira zen izan hau ere baina nahi egin zuen bere",
        "fa": "و در به از که این را با است برای می یک آن یا هر شده ها های بر تا",
        "fi": (
            "ja on ei että se oli hän mutta joka ovat tai jos voi kun myös sen ole jotka kuin niin tämä voit tämän olla "
            "kaikki ne mukaan sekä hänen jonka siitä olivat kuten"
        ),
        "fr": "de la le et les des que en un est pour",
        "ga": "an na agus ar i le tá go bhí is",
        "gl": "de a o que e do da en un por",
        "gu": (
            "અને છે એ આ તે માટે કે ની ના નો થી એક પણ નથી તેના તેની જે કોઈ તમે તમારા હોય હતું છો શકે અથવા સાથે કરવા દરેક "
            "પોતાના જો તો પર કરો કરી રીતે"
        ),
        "ha": "da na a ya ta ba wanda ko shi cikin kowa yana don su ga yi",
        "he": "של את על לא זה הוא עם גם כי או היה אבל יש כל",
        "hi": "के में की है से को और का यह नहीं पर कि ने एक भी इस हो था थे वह या",
        "hr": "i je u na se da za su od koji",
        "hu": "a az és hogy nem is egy ez volt meg ha de van mint csak el",
        "hy": "և է ու որ են իր կամ մեջ այս համար մի նա եւ է՝ որը ոչ բայց այդ պետք ունի յուրաքանչյուր ամեն նրա չի հետ ինչպես բոլոր նաև",
        "id": "yang dan di ini itu dengan untuk dari pada tidak ke akan oleh saya adalah",
        "is": "og að er í á sem til það var með ekki en við sér um fyrir",
        "it": "di e la che il un non per è con del",
        "ja": "の に は を が で て と し れ た な も から まで",
        "ka": (
            "და არის რომ ეს ან მისი უნდა აქვს არ იყო როგორც მის რომელიც თავისი ყოველ ყველა თუ მაგრამ ამ კი იმ მათ შორის "
            "ერთი მიერ ის ასევე"
        ),
        "kk": "және мен бұл үшін бір да де бар не оның әр болып деп туралы ол емес өз барлық тиіс",
        "km": "និង ជា នៅ ក្នុង ដែល មាន ដោយ របស់ ពី ឬ មិន នេះ បាន ទៅ ក៏ ការ ទាំង ឲ្យ ឱ្យ តាម",
        "kn": (
            "ಮತ್ತು ಈ ಒಂದು ಆ ಅಥವಾ ಎಂದು ಯಾವುದೇ ತನ್ನ ಇದು ಅವರ ಎಲ್ಲಾ ಹಾಗೂ ಆದರೆ ನಿಮ್ಮ ನೀವು ಅವರು ಇಲ್ಲ ಹೆಚ್ಚು ಅದು ಎಂಬ ಕೂಡ ಇದೆ ಆಗಿ "
            "ಮೂಲಕ ಪ್ರತಿಯೊಬ್ಬ ಅವನ ನಂತರ ಬಹಳ"
        ),
        "ko": (
            "그 이 있다 수 것은 있는 및 등 대한 그리고 또는 것 것을 것이다 있으며 위해 위한 위하여 때 때문에 한다 하는 할 한 "
            "된다 되는 합니다 입니다 있습니다 같은 이러한 모든 다른 경우 의해 대해 "
            "통해 따라 더 가장 그는 우리는 없다 없는 않는다 않고 아니라 하고 했다 자신의 어떤 여러 함께 매우 이런 그런 하지만 그러나"
        ),
        "ku": "û di de bi ji li ku an ne heye her kes xwe e ya wî",
        "ky": "жана бул бир үчүн менен да ар бар же өз ал эмес тийиш болуп",
        "lo": "ທີ່ ແລະ ໃນ ເປັນ ຂອງ ບໍ່ ໄດ້ ຈະ ໃຫ້ ວ່າ ກັບ ຈາກ ຫຼື ນີ້ ຢູ່ ແຕ່ ໂດຍ ຊຶ່ງ ຕ້ອງ",
        "lt": "ir yra kad į su tai bet kaip jo ne o iš buvo jis tik",
        "lv": "un ir no ar par ka to kas bet uz bija viņš kā arī tas",
        "mk": "и на во да се од за не е со што ги го како или ќе по тоа тој а ја",
        "ml": (
            "ഒരു ഈ എന്ന ആ അല്ലെങ്കിൽ അല്ലെങ്കില്‍ എന്നിവ തന്റെ അത് ഇത് അവരുടെ എല്ലാ മറ്റു മാത്രം നിന്ന് നിന്നും എന്ന് "
            "എന്നാൽ എന്നാല്‍ കൊണ്ട് വേണ്ടി ഏതെങ്കിലും യാതൊരു ഉള്ള വളരെ പോലെ ചെയ്യുന്ന അവർ അവര്‍ ആണ് ഇല്ല കൂടാതെ തന്നെ "
            "എല്ലാവര്‍ക്കും ഓരോ ഉണ്ട് പല ആരും"
        ),
        "mn": "ба нь энэ бол болон юм бөгөөд тэр байна нэг ч аливаа эсвэл мөн бүх тул байх гэж өөрийн",
        "mr": (
            "आणि आहे या हे व किंवा तर ते की त्या आपल्या असे एक तो नाही त्याच्या कोणत्याही पण होते साठी मध्ये ही आहेत "
            "प्रत्येक येथे अशा केले करून तसेच सर्व त्यांच्या मी करा असल्यास तुम्ही हा मला तिच्या झाले होता कि"
        ),
        "ms": "yang dan di ini itu dengan untuk dari pada tidak ke akan oleh saya ada",
        "my": "သည် ကို နှင့် တွင် ၏ အတွက် ပြီး လည်း တယ် သည့် ၍ ဖြင့် ဖြစ်",
        "ne": (
            "र को छ यो मा का पनि छन् गर्न हो वा एक त्यो भएको लागि कुनै तथा गर्ने हुने आफ्नो प्रत्येक थियो तर यस भने ले सबै "
            "हुन्छ उनले उसको"
        ),
        "nl": "de het een van en in is dat niet te op",
        "no": "og i det er som en på til av med ikke for et å de",
        "or": "ଏବଂ ଓ ଏହି ଏକ କରିବା ପାଇଁ ନାହିଁ ତାହା ମଧ୍ୟ କିମ୍ବା ସମସ୍ତ ତାର ହେବ ଯେ କୌଣସି ପ୍ରତ୍ୟେକ ନିଜ ଏ ସେ ଅଛି ସହିତ",
        "pa": "ਅਤੇ ਦੇ ਹੈ ਦੀ ਦਾ ਵਿੱਚ ਨੂੰ ਨਾਲ ਇਹ ਹਨ ਨੇ ਕਿ ਤੋਂ ਇਸ ਜਾਂ ਲਈ ਵੀ ਇੱਕ ਤੇ ਕੋਈ ਵਿਚ ਨਹੀਂ ਹਰ ਆਪਣੇ ਉਹ ਹੋਵੇ ਉਸ",
        "pl": "i w na z się nie do to że jest a o jak ale za od przez",
        "ps": "او د په چې له دی ته هر سره يا نه لري کې دغه هغه خپل شي",
        "pt": "de a o que e do da em um para não",
        "ro": "de și în a la cu pe nu care din este",
        "ru": "и в на не что с как по это для из или если а но его за от то все так же у к",
        "si": "සහ ද හා මෙම ඒ එය ඇත කිරීම සඳහා වේ නැත හෝ ඔහු ඔහුගේ සෑම ම මේ යුතු එක ය කළ ලද බව වන විසින් වැනි තම ඇති එක් මම ඔවුන් නම්",
        "sk": "a sa na v je to že s z do",
        "sl": "in je na se v da za so ki pa",
        "so": "iyo in ka uu ku waa ama oo kasta leeyahay la ay u ee kale",
        "sq": "dhe të e në i për me nuk një që është më ka së si nga por ose kjo do",
        "sr": "и је у на се да за су од који i je u na se da za su od koji",
        "sv": "och att det i som en på är av för med inte ett de har han",
        "sw": "na ya wa kwa ni katika za la kila au ana cha si kama hiyo hii lakini vya yake",
        "ta": (
            "மற்றும் ஒரு இந்த என்று அந்த என இது அவர் உள்ள தனது அல்லது போன்ற என்ற எந்த இல்லை ஆகும் உங்கள் நீங்கள் இருந்து "
            "செய்ய கொண்டு மேலும் அனைத்து ஆனால் என்பது வேண்டும் பல அது பற்றி பிறகு மூலம் அதன் அவர்கள் எல்லா தான் மட்டும் வரை "
            "இருக்கும் முடியும் எனில் நாம் இங்கு அதை இதை ஒவ்வொரு ஒவ்வொருவரும்"
        ),
        "te": (
            "మరియు ఈ ఒక ఆ లేదా అని నుండి కోసం కూడా తన యొక్క ఉంది వారి మీరు మీ ఇది అన్ని ఏ లో వారు కాని ఉన్న తో అది అతను "
            "చేసే చాలా ప్రతి గల వలన"
        ),
        "tg": "ва дар аз ба ки ин бо ҳар ё барои дорад худ як ӯ набояд",
        "th": "ที่ และ ใน เป็น ของ ไม่ ได้ จะ ให้ ว่า กับ จาก หรือ นี้ อยู่ ก็ แต่ โดย ซึ่ง แล้ว มี",
        "ti": "እዩ ኣብ ናይ እዚ ካብ ወይ ምስ ነቲ ድማ ኣለዎ ከም ዝኾነ ወይ'ውን ይኹን ናብ ንምግባር ሓደ ኩሉ እቲ ኢዩ ኦለዎ ኦብ",
        "tl": "ang ng sa mga na at ay ni may kung para o hindi bawat kanyang isang ito",
        "tr": "ve bir bu da de için ile olarak çok daha veya olan gibi en ya her ancak ne kadar sonra o hem ki ise olduğu",
        "tt": "һәм бу бер өчен белән да һәр ия яки үз ул түгел тиеш булган",
        "ug": "ۋە بىر بۇ بىلەن ياكى ئۈچۈن ئۇ بولۇش ھەر بولغان ئۆز ھەممە لازىم we bir bu bilen yaki üchün bolush her bolghan öz",
        "uk": "і в на не що з як до та для це або але й у його за від",
        "ur": "کے میں کی ہے سے اور کا کو یہ نہیں اس ہر یا جو ہو پر ہیں کہ وہ ایک تھا",
        "uz": "va bu bir uchun bilan ham har o'z yoki edi kerak bo'lgan lekin emas hamda shu ва бу бир учун билан ҳам ҳар ўз ёки керак",
        "vi": "và của là các có được trong cho một không với những này khi để cũng đã như thì đó",
        "yi": "און די פון איז אין צו אַ אַז מיט דער ניט אויף האט אָדער זיין א",
        "yo": "ní ti tí àti fún láti sí kan pé ó wọn tàbí kò náà lè ẹni kọ̀ọ̀kan",
        "yue": "嘅 係 喺 同 有 唔 我 或 的 人 都 佢 呢 咗 及 在",
        "zh": "的 了 是 在 和 不 与 及 或 这 也 而 之 以 为 將 将 其 與 這 為 把 被 从 從 都 就 所 到 有 对 對 着 吗 呢 吧",
        "zu": "futhi ukuthi noma uma kanye wonke ngoba kodwa njengoba ukuba lokhu",
    }.items()
}
"""The rule does not apply to other languages."""
